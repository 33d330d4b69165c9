"""A task of a sink against a real broker, without Spark: what is prepared, what is left, what is told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import txmq
from txmq.addresses import parse_bootstrap
from txmq.client.client import Client
from txmq.errors import FencedError, TransactionConflictError, UnavailableError, UnknownTopicError
from txmq.spark.sink import sink
from txmq.spark.sink import task as sink_task
from txmq.spark.sink.digest import Attempt
from txmq.spark.sink.options import SinkOptions
from txmq.spark.sink.queries import Opened, Queries, Standing
from txmq.spark.sink.sink import BatchWriter, TaskMessage
from txmq.spark.sink.task import Written
from txmq.testing.processes.broker import BrokerProcess


def options(broker: BrokerProcess, topic: str = "out", timeout_s: float = 60.0) -> SinkOptions:
    """Of a sink to one topic."""
    return SinkOptions(broker.address, topic, None, timeout_s, None, None)


def rows(*values: bytes) -> Any:
    """One Arrow batch."""
    return pa.record_batch([pa.array(values, pa.binary())], names=["value"])


def life(client: txmq.Client, query: str) -> Attempt:
    """A life of a driver, whose query is open: its task 0, attempt 0 of batch 0."""
    epoch = Queries(client).new_epoch()
    Queries(client).open(query, epoch)
    return Attempt(query, epoch, 0, 0, 0)


def values(client: txmq.Client, topic: str) -> list[bytes | None]:
    """Everything readers see."""
    return [message.value for message in client.browse(topic)]


@pytest.fixture
def topic(client: txmq.Client, request: pytest.FixtureRequest) -> str:
    """A topic of the test's own."""
    name = request.node.name[:60]
    client.topics.create(name, partitions=1)
    return str(name)


def decide(client: txmq.Client, *winners: Written) -> bool:
    """The driver's commit."""
    at = winners[0].attempt
    return Queries(client).commit(at.query, at.epoch, at.batch, [txid for one in winners for txid in one.txids])


def test_winners_of_a_batch_are_seen_once_and_losers_never(
    broker: BrokerProcess, client: txmq.Client, topic: str
) -> None:
    told, driver = options(broker, topic), life(client, topic)
    first = sink_task.write(client, told, driver, iter([rows(b"a", b"b")]))
    loser = sink_task.write(client, told, driver._replace(task=1), iter([rows(b"c")]))
    winner = sink_task.write(client, told, driver._replace(task=1, attempt=1), iter([rows(b"c")]))
    assert (values(client, topic), first.digest.rows, len(client.transactions.list())) == ([], 2, 3)
    assert decide(client, first, winner) is True
    assert decide(client, first, winner) is False
    assert values(client, topic) == [b"a", b"b", b"c"]
    assert [client.outcome(txid) for txid in loser.txids] == [txmq.Outcome.ROLLED_BACK]
    assert client.transactions.list() == []
    with pytest.raises(TransactionConflictError):
        sink_task.write(client, told, driver._replace(task=2), iter([rows(b"late")]))
    Queries(client).delete(topic)


def test_a_broker_that_dies_within_a_task_costs_nothing(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as broker, txmq.connect(broker.address, timeout=60.0) as client:
        client.topics.create("out", partitions=2)

        def dying() -> Iterator[Any]:
            for number in range(6):
                yield rows(*[b"%d-%d-" % (number, n) + bytes(1500) for n in range(1500)])  # half a chunk
                if number in (2, 4):
                    broker.kill()
                    broker.start()

        written = sink_task.write(client, options(broker), life(client, "q"), dying())
        assert (written.digest.rows, len(written.txids) > 2) == (9000, True)
        broker.kill()
        broker.start()
        assert values(client, "out") == []
        assert decide(client, written) is True
        seen = values(client, "out")
        assert (len(seen), len(set(seen))) == (9000, 9000)


def test_a_task_that_fails_rolls_back_what_it_has_prepared(
    broker: BrokerProcess, client: txmq.Client, topic: str
) -> None:
    def failing() -> Iterator[Any]:
        yield rows(*[bytes(3000)] * 1500)
        yield rows(*[bytes(3000)] * 1500)
        assert len(client.transactions.list()) > 0
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        sink_task.write(client, options(broker, topic), life(client, topic), failing())
    assert client.transactions.list() == []
    last = int(client.session.next_txid()[1].rpartition("-")[2], 16)
    assert client.session.finished_through == last - 1, "the broker would keep outcomes for ever"
    client.session.finished(last)
    with pytest.raises(UnknownTopicError):
        sink_task.write(client, options(broker, "nosuch"), life(client, topic), iter([rows(b"x")]))


def test_later_life_of_driver_fences_former_ones_tasks(broker: BrokerProcess, client: txmq.Client, topic: str) -> None:
    told = options(broker, topic)
    before = life(client, topic)
    left = sink_task.write(client, told, before, iter([rows(b"left")]))
    with txmq.connect(broker.address) as other:
        after = life(other, topic)
        assert after.epoch > before.epoch
        assert client.transactions.list() == []
        for late in (
            lambda: sink_task.write(client, told, before, iter([rows(b"zombie")])),
            lambda: decide(client, left),
        ):
            with pytest.raises(FencedError):
                late()
        assert decide(other, sink_task.write(other, told, after, iter([rows(b"once")]))) is True
    assert values(client, topic) == [b"once"]


def test_absent_or_full_broker_is_reported_and_nothing_hangs(tmp_path: Path) -> None:
    with (
        BrokerProcess(tmp_path / "data", settings={"prepared_bytes_max": 2 << 20}) as broker,
        closing(Client(parse_bootstrap(broker.address), timeout=5.0)) as client,
    ):
        client.topics.create("out")
        at = life(client, "q")
        with pytest.raises(UnavailableError, match=r"within 10 s: .* prepared_bytes_max 2097152 bytes: .* raise that"):
            sink_task.write(client, options(broker, timeout_s=10.0), at, iter([rows(*[bytes(1000)] * 3000)]))
        broker.kill()
        with pytest.raises(txmq.errors.ConnectionLostError):
            sink_task.write(client, options(broker, timeout_s=0.5), at, iter([rows(b"x")]))
        with pytest.raises(txmq.errors.ConnectionLostError, match=r"tried for 0\.5 s \(option timeout\)"):
            sink_task.client_of(options(broker, timeout_s=0.5))

        def goes_away() -> Iterator[Any]:
            broker.start()
            yield rows(b"x")
            broker.kill()

        with pytest.raises(UnavailableError, match=r"within 5 s: cannot connect"):
            sink_task.write(client, options(broker, timeout_s=5.0), at, goes_away())


def test_next_job_in_worker_waits_as_long_as_it_says(broker: BrokerProcess) -> None:
    patient, hasty = (sink_task.client_of(options(broker, timeout_s=seconds)) for seconds in (60.0, 0.5))
    assert (patient.timeout, hasty.timeout) == (60.0, 0.5)
    assert sink_task.client_of(options(broker, timeout_s=60.0)) is patient


@pytest.mark.parametrize(
    ("query", "advice"),
    [(None, "look into the topic before you write it again"), ("job", "write it again with the same queryId")],
)
def test_unanswered_commit_reports_what_may_have_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, query: str | None, advice: str
) -> None:
    with BrokerProcess(tmp_path / "data") as broker, txmq.connect(broker.address, timeout=2.0) as client:
        client.topics.create("out")
        told = replace(options(broker, timeout_s=2.0), query=query, batch=None if query is None else 0)
        at = life(client, query or "write-1")
        messages = [TaskMessage(sink_task.write(client, told, at, iter([rows(b"x")])))]
        monkeypatch.setattr(sink, "client_of", lambda _: client)  # it answered a moment ago
        broker.kill()
        writer = BatchWriter(told, at, Opened(0, Standing()))
        with pytest.raises(
            txmq.errors.ConnectionLostError, match=rf"the batch may be written, or not: {advice}.*cannot connect"
        ):
            writer.commit(messages)
        writer.abort(messages)  # as Spark does then; what it cannot say is no error
        broker.start()
        if query is not None:
            BatchWriter(told, at, Opened(0, Standing())).commit(messages)
            assert values(client, "out") == [b"x"]
