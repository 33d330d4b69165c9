"""The table and the drawing of a run of peers, from figures that are made up."""

from __future__ import annotations

import pytest

from bench.model import Result, Row
from bench.page import page
from bench.peers import backlog, queue
from bench.peers.catalogue import NATS, OWN, PEERS, RABBITMQ
from bench.peers.orders import UNITS
from bench.peers.queues import OWN_QUEUE, PEER_QUEUES, QUEUES
from bench.peers.run import (
    LAST_RESOURCE,
    OUTBOX,
    OUTBOX_ALONE,
    OUTBOX_BACKLOG,
    OUTBOX_WOKEN,
    backlog_name,
    relay_name,
    row_name,
)
from bench.peers.shares import shares
from bench.peers.table import charts, markdown
from bench.peers.works import ALONE, CALLERS, TRANSACTIONS, WORKS
from bench.rows.brokers import ROWS

FACTS = {"cores": "2", "load before": "0.3"}
LABEL_LENGTH_MAX = 42  # of what is drawn left of the bars
TOGETHER = f"rate, {CALLERS} callers"


def result(name: str, *rounds: dict[str, float]) -> Result:
    made = Result(Row(name, name, lambda _: pytest.fail("never opened"), dict.fromkeys(rounds[0], "x")))
    for figures in rounds:
        made.add(figures)
    return made


def orders(one: float, eight: float, cpu: float, latency: float) -> dict[str, float]:
    figures = {"rate, 1 thr": one, f"rate, {CALLERS} thr": eight, "CPU": cpu, "p50": 1.0, "p99": 2.0}
    return figures | {f"p50, {CALLERS} thr": latency, f"p99, {CALLERS} thr": 9.0}


def test_table_has_a_line_for_each_peer_measured() -> None:
    text = markdown(
        [
            result(row_name(OWN, ALONE.name), {"rate": 4000.0, "p50": 0.2, "p99": 0.4}),
            result(row_name(RABBITMQ, ALONE.name), {"rate": 1000.0, "p50": 0.9, "p99": 1.4}),
        ],
        FACTS, PEERS,
    )  # fmt: skip
    assert "| 4000 | 0.2 / 0.4 |" in text
    assert "| 1000 | 0.9 / 1.4 |" in text
    assert NATS.title not in text


def test_shares_are_of_the_same_round() -> None:
    results = {
        LAST_RESOURCE: result(LAST_RESOURCE, orders(70, 40, 200, 1), orders(50, 30, 200, 1), orders(65, 35, 310, 1)),
        OUTBOX_ALONE: result(OUTBOX_ALONE, *[orders(100, 100, 100, 1)] * 3),
        relay_name(OWN): result(relay_name(OWN), *[orders(100, 70, 100, 2)] * 3),
    }
    commit, relay = shares(results, PEERS)
    assert commit.samples["rate, 1 thr"] == [70, 50, 65]
    assert commit.verdict == "pass"
    assert (relay.median(f"rate, {CALLERS} thr"), relay.median(f"p50, {CALLERS} thr")) == (50, 50)
    assert relay.verdict == "MISS"
    text = markdown([*results.values(), commit, relay], FACTS, PEERS)
    assert "| at least 60 % | 65 % [50, 70] |" in text
    assert "| at most 10 % | 50 % [50, 50] |" in text


def test_outbox_stands_beside_each_queue_in_postgresql() -> None:
    def handled(name: str, one: float, eight: float, p50: float) -> Result:
        return result(name, {queue.ONE: one, queue.ALL: eight, "p50": p50, "p99": 9.0})

    own, others = handled(OWN_QUEUE.name, 130, 210, 2.0), [handled(one.name, 100, 100, 1.0) for one in PEER_QUEUES]
    found = shares({one.row.name: one for one in (own, *others)}, PEERS)
    assert [one.median(queue.ONE) for one in found] == [130] * len(PEER_QUEUES)
    assert [one.median("p50") for one in found] == [200] * len(PEER_QUEUES)
    assert {one.verdict for one in found} == {"MISS"}  # it takes twice as long, and promises 1.5 times
    assert len({one.row.name for one in found}) == len(PEER_QUEUES)
    text = markdown([own, *others, *found], FACTS, PEERS)
    assert f"| {OWN_QUEUE.title} | 130 | 210 | 2 / 9 |" in text


def test_backlog_stands_beside_the_orders_of_its_line() -> None:
    text = markdown(
        [
            result(OUTBOX, orders(70, 40, 200, 1)), result(OUTBOX_BACKLOG, {"drained": 31_000.0}),
            result(backlog_name(RABBITMQ), {"drained": 7000.0}),
        ],
        FACTS, PEERS,
    )  # fmt: skip
    [own] = [line for line in text.splitlines() if line.startswith("| txmq, outbox |")]
    assert own.endswith("| 31,000 |")
    assert own.startswith("| txmq, outbox | 70 | 40 |")
    assert f"| outbox and relay into {RABBITMQ.title} |" in text


def test_transactions_stand_beside_durable_peers_alone() -> None:
    names = [row_name(peer, TRANSACTIONS.name) for peer in PEERS]
    results = {name: result(name, {"rate": 10.0, TOGETHER: 20.0}) for name in names}
    beside = [share.row.title for share in shares(results, PEERS)]
    assert beside == [f"transactions beside {peer.title}" for peer in PEERS if peer.is_durable and peer != OWN]


def test_page_draws_peers_beside_each_other() -> None:
    name = row_name(RABBITMQ, TRANSACTIONS.name)
    missing = Result(Row(name, name, lambda _: pytest.fail("never opened"), {}), missing="not installed: apt-get")
    own = result(row_name(OWN, TRANSACTIONS.name), {"rate": 10.0, TOGETHER: 20.0})
    text = page([own, missing], FACTS, {}, charts(PEERS))
    assert text.count("<svg") == 2  # one caller, and several
    assert "not installed: apt-get" in text


def test_every_line_of_the_drawing_is_a_figure() -> None:
    units = {row_name(peer, work.name): work.units for peer in PEERS for work in WORKS}
    units |= dict.fromkeys((LAST_RESOURCE, OUTBOX, OUTBOX_WOKEN, OUTBOX_ALONE, *map(relay_name, PEERS)), UNITS)
    units |= dict.fromkeys((OUTBOX_BACKLOG, *map(backlog_name, PEERS)), backlog.UNITS)
    units |= {one.name: queue.UNITS for one in QUEUES}
    for chart in charts(PEERS):
        for line in chart.lines:
            assert line.figure in units[line.row], line
            assert len(line.label) <= LABEL_LENGTH_MAX
    assert {row.name for row in ROWS} <= set(units)
