"""``txmq query``: what Spark's writers have left at a broker is listed, and forgotten when it was meant."""

from __future__ import annotations

import json

from typer.testing import CliRunner, Result

import txmq
from txmq.cli.main import app
from txmq.spark.sink.queries import Queries
from txmq.testing.processes.broker import BrokerProcess


def test_query_is_listed_and_deleted_when_it_was_meant(broker: BrokerProcess) -> None:
    def run(*words: str, answer: str = "") -> Result:
        return CliRunner().invoke(app, ["query", *words, "--bootstrap", broker.address], input=answer)

    with txmq.connect(broker.address) as client:
        queries = Queries(client)
        epoch = queries.new_epoch()
        queries.open("write-17", epoch)
    (found,) = json.loads(run("list", "--json").stdout)
    assert (found["query"], found["epoch"], found["batch"], found["prepared"]) == ("write-17", epoch, None, 0)
    assert "write-17" in run("list").stdout
    assert "write-17" in str(run("delete", "write-71", "--yes").exception)  # the nearest name
    assert run("delete", "write-17", answer="n\n").exit_code == 1
    assert len(json.loads(run("list", "--json").stdout)) == 1
    assert run("delete", "write-17", answer="y\n").exit_code == 0
    assert json.loads(run("list", "--json").stdout) == []
