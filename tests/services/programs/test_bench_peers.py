"""``make bench-peers``: an outbox and its relay move every order once; a quick run leaves table, page and figures."""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

import txmq
from bench.peers import __main__ as program
from bench.peers.catalogue import OWN
from bench.peers.model import TOPICS, number_of
from bench.peers.orders import last_resource, measured, outbox
from bench.peers.works import CALLERS, Pace
from bench.rows.databases import sqlite

PACE = Pace(0.05)


def test_relay_moves_each_order_once(tmp_path: Path) -> None:
    with OWN.start(tmp_path) as running, sqlite(tmp_path) as database:
        with ExitStack() as stack:
            figures = measured(outbox(OWN, running, database, stack), PACE, first=CALLERS)()
        with ExitStack() as stack:
            beside = measured(last_resource(OWN, running, database, stack), PACE, first=CALLERS)()
        assert set(figures) - set(beside) == {"CPU: relay"}
        with closing(database.connect()) as connection:
            [(orders,)] = connection.execute("SELECT COUNT(*) FROM orders")
            assert list(connection.execute("SELECT COUNT(*) FROM outbox")) == [(0,)]
        with txmq.connect(running.address) as client:
            numbers = [number_of(message.value or b"") for message in client.browse(TOPICS[0])]
    assert len(numbers) == len(set(numbers)) == orders
    assert min(figures[f"rate, {CALLERS} thr"], figures["p50"], figures["CPU"]) > 0


def test_quick_run_leaves_table_page_and_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "bare_limits", lambda _: {})  # seconds of it, and tested elsewhere
    words = ["--quick", "--peers", "txmq-interval", "--works", "alone", "tasks", "in-flight", "tx"]
    words += ["--directory", str(tmp_path)]
    assert program.main(words) == 0
    kept = {path.suffix: path for path in tmp_path.iterdir()}
    assert sorted(kept) == [".html", ".json", ".md"]
    [alone, tasks, flying, transactions] = json.loads(kept[".json"].read_text())["rows"]
    assert [row["failure"] for row in (alone, tasks, flying, transactions)] == [None] * 4
    assert kept[".md"].read_text() in capsys.readouterr().out
    assert "<svg" in kept[".html"].read_text()
