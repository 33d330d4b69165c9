"""``make bench-peers``: an outbox and its relay move every order once; a quick run leaves table, page and figures."""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

import txmq
from bench.peers import __main__ as program
from bench.peers import backlog, queue
from bench.peers.catalogue import OWN
from bench.peers.model import TOPICS, number_of
from bench.peers.orders import last_resource, measured, outbox
from bench.peers.own_outbox import own_outbox, woken_outbox
from bench.peers.queues import OWN_QUEUE
from bench.peers.works import CALLERS, Pace
from bench.rows.databases import postgresql_server, sqlite
from txmq.testing.bench.model import PERCENTILES

PACE, ROWS = Pace(0.05), 700


def test_relays_move_each_order_once(tmp_path: Path) -> None:
    with OWN.start(tmp_path) as running, sqlite(tmp_path) as database:
        found = []
        for make in (outbox, own_outbox, woken_outbox, last_resource):
            with ExitStack() as stack:
                found.append(measured(make(OWN, running, database, stack), PACE, first=CALLERS)())
        figures = found[0]
        assert set(figures) == set(found[1])
        assert set(figures) - set(found[2]) == set(figures) - set(found[3]) == {"CPU: relay"}
        with closing(database.connect()) as connection:
            [(orders,)] = connection.execute("SELECT COUNT(*) FROM orders")
            assert list(connection.execute("SELECT COUNT(*) FROM outbox")) == [(0,)]
        with txmq.connect(running.address) as client:
            numbers = [number_of(message.value or b"") for message in client.browse(TOPICS[0])]
    assert len(numbers) == len(set(numbers)) == orders
    assert min(figures[f"rate, {CALLERS} thr"], figures["p50"], figures["CPU"]) > 0


def test_backlog_is_moved_to_its_end(tmp_path: Path) -> None:
    with OWN.start(tmp_path) as running, sqlite(tmp_path) as database:
        for opened in (backlog.into_own(running, database, ROWS), backlog.into_peer(OWN, running, database, ROWS)):
            with opened as measure:
                assert measure()["drained"] > 0
        with txmq.connect(running.address) as client:
            assert client.offsets(TOPICS[0], 0).end == 2 * ROWS


def test_queue_hands_each_order_to_another_process(tmp_path: Path) -> None:
    with OWN.start(tmp_path) as running, postgresql_server(tmp_path) as server:
        dsn = f"postgresql://postgres@127.0.0.1:{server.port}/{server.database}"
        with queue.measured(OWN_QUEUE, dsn, running.address, PACE, first=CALLERS) as measure:
            figures = measure()
    assert set(figures) == {queue.ONE, queue.ALL, *PERCENTILES}
    assert min(figures.values()) > 0


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
