"""The table and the drawing of a run: peers next to each other, a column or a panel for each work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from bench.model import Result
from bench.page import Chart, Line
from bench.peers.model import IN_FLIGHT, Peer
from bench.peers.orders import CPU_PARTS
from bench.peers.queue import ALL, ONE
from bench.peers.queues import QUEUES
from bench.peers.run import (
    BACKLOG,
    LAST_RESOURCE,
    ORDERS,
    OUTBOX,
    OUTBOX_ALONE,
    OUTBOX_BACKLOG,
    OUTBOX_WOKEN,
    QUEUE,
    SYNCS,
    backlog_name,
    relay_name,
    row_name,
)
from bench.peers.works import ALONE, BY_TASKS, CALLERS, DELIVERY, FLYING, TASKS, TRANSACTIONS
from txmq.testing.bench.limits import busy
from txmq.testing.bench.model import amount

_ORDER_TITLES = {
    LAST_RESOURCE: "txmq, last resource",
    OUTBOX: "txmq, outbox",
    OUTBOX_WOKEN: "txmq, outbox, relay in the service",
    OUTBOX_ALONE: "row + outbox row, no message moved",
}


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of a work.

    Attributes:
        figures: shown one after the other, with ``/`` between them.
    """

    title: str
    work: str
    figures: tuple[str, ...]


_PUBLISHING = (
    Column("syncs a message", SYNCS, ("syncs",)),
    Column("alone, msg/s", ALONE.name, ("rate",)),
    Column("p50 / p99, ms", ALONE.name, ("p50", "p99")),
    Column(f"{TASKS} tasks, msg/s", BY_TASKS.name, ("rate",)),
    Column("p50 / p99, ms", BY_TASKS.name, ("p50", "p99")),
    Column(f"{IN_FLIGHT} in flight, msg/s", FLYING.name, ("rate",)),
    Column("syncs a transaction", SYNCS, ("syncs, tx",)),
    Column("transactions/s, 1 caller", TRANSACTIONS.name, ("rate",)),
    Column(f"{CALLERS} callers", TRANSACTIONS.name, (f"rate, {CALLERS} callers",)),
    Column("delivery p50 / p99, ms", DELIVERY.name, ("p50", "p99")),
)
_ORDERING = (
    Column("orders/s, 1 thread", ORDERS, ("rate, 1 thr",)),
    Column(f"{CALLERS} threads", ORDERS, (f"rate, {CALLERS} thr",)),
    Column("processor, us/order", ORDERS, ("CPU",)),
    Column("service / database / broker / relay", ORDERS, CPU_PARTS),
    Column("commit to reader at a steady pace, p50 / p99, ms", ORDERS, ("p50", "p99")),
    Column(f"the same, {CALLERS} threads", ORDERS, (f"p50, {CALLERS} thr", f"p99, {CALLERS} thr")),
    Column("a backlog drained, rows/s", BACKLOG, ("drained",)),
)
_QUEUING = (
    Column("handled/s, 1 caller", QUEUE, (ONE,)),
    Column(f"{CALLERS} callers", QUEUE, (ALL,)),
    Column("commit to handler at a steady pace, p50 / p99, ms", QUEUE, ("p50", "p99")),
)


def markdown(measured: Sequence[Result], facts: Mapping[str, str], peers: Sequence[Peer]) -> str:
    """The table for docs/benchmarks.md: machine, publishing, row and message, promises, reasons."""
    results = {result.row.name: result for result in measured}
    publishing = [(f"{peer.title} ({peer.acknowledged})", partial(row_name, peer)) for peer in peers]
    orders = [(title, name, OUTBOX_BACKLOG if name == OUTBOX else "") for name, title in _ORDER_TITLES.items()]
    orders += [(f"outbox and relay into {peer.title}", relay_name(peer), backlog_name(peer)) for peer in peers]
    ordering = [(title, {ORDERS: name, BACKLOG: drained}.__getitem__) for title, name, drained in orders]
    queuing = [(queue.title, partial(_only, queue.name)) for queue in QUEUES]
    parts = [
        ", ".join(f"{name} {text}" for name, text in facts.items()) + "\n",
        f"{busy(facts)}\n" if busy(facts) else "",
        _table("broker, from its Python client", publishing, _PUBLISHING, results),
        _table("row and message, MariaDB", ordering, _ORDERING, results),
        _table("row and message, PostgreSQL, asyncpg", queuing, _QUEUING, results),
        _promises(measured),
        _reasons(results),
    ]
    return "\n".join(part for part in parts if part)


Lines = Sequence[tuple[str, Callable[[str], str]]]


def _table(
    head: str, lines: Lines, columns: Sequence[Column], results: Mapping[str, Result]
) -> str:  # fmt: skip
    """``lines`` are titles, and the names of rows by their work."""
    shown = [
        [title, *(_cell(results.get(name_of(column.work)), column) for column in columns)] for title, name_of in lines
    ]
    shown = [line for line in shown if any(line[1:])]
    return _rows([[head, *(column.title for column in columns)], ["---"] * (len(columns) + 1), *shown]) if shown else ""


def _only(name: str, _work: str) -> str:
    return name


def _cell(result: Result | None, column: Column) -> str:
    if result is None:
        return ""
    medians = [median for figure in column.figures if (median := result.median(figure)) is not None]
    if not medians:
        return "none" if result.failure is None else "failed"
    return " / ".join(map(amount, medians))


def _rows(lines: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _promises(measured: Sequence[Result]) -> str:
    lines = [
        [result.row.title, bound.figure, f"{'at least' if bound.at_least else 'at most'} {bound.limit:g} %",
         f"{result.median(bound.figure) or 0:.0f} % [{min(samples):.0f}, {max(samples):.0f}]"]
        for result in measured
        for bound in result.row.bounds
        if (samples := result.samples.get(bound.figure))
    ]  # fmt: skip
    return (
        _rows([["txmq beside others", "figure", "promise", "median [lowest, highest]"], ["---"] * 4, *lines])
        if lines
        else ""
    )


def _reasons(results: Mapping[str, Result]) -> str:
    """Why there are no figures, each reason once."""
    found: dict[str, None] = {}
    for result in results.values():
        reason = result.missing or result.failure
        if reason is not None:
            found[f"* {result.row.title}: {reason}\n"] = None
    return "".join(found)


# --- the drawing ------------------------------------------------------------------------------------------------------

_SPREAD = "Dots at p50, p90, p99, p99.9; figures are p50 / p99."


def charts(peers: Sequence[Peer]) -> tuple[Chart, ...]:
    """A panel for each work."""

    def panel(title: str, work: str, figure: str, note: str, is_latency: bool = False) -> Chart:
        return Chart(title, note, tuple(Line(row_name(peer, work), peer.title, figure) for peer in peers), is_latency)

    ordered = [(title, name) for name, title in _ORDER_TITLES.items()]
    ordered += [(f"outbox into {peer.title}", relay_name(peer)) for peer in peers]
    return (
        panel("One publish at a time", ALONE.name, "p50", f"Time until the acknowledgement. {_SPREAD}", True),
        panel(f"{TASKS} tasks", BY_TASKS.name, "rate", f"Acknowledged messages a second, {BY_TASKS.title}."),
        panel("Many in flight", FLYING.name, "rate", f"Acknowledged messages a second, {IN_FLIGHT} unacknowledged."),
        panel("Transactions, one caller", TRANSACTIONS.name, "rate", TRANSACTIONS.title.capitalize() + ", a second."),
        panel(f"Transactions, {CALLERS} callers", TRANSACTIONS.name, f"rate, {CALLERS} callers", "The same."),
        panel("Delivery", DELIVERY.name, "p50", f"{DELIVERY.title.capitalize()}. {_SPREAD}", True),
        Chart(
            f"A row and its message, {CALLERS} threads",
            "Orders a second, until the last one is read; each outbox has a relay.",
            tuple(Line(name, title, f"rate, {CALLERS} thr") for title, name in ordered),
        ),
        Chart(
            "From the commit to the reader", f"Orders at a steady pace. {_SPREAD}",
            tuple(Line(name, title, "p50") for title, name in ordered if name != OUTBOX_ALONE), is_latency=True,
        ),
        Chart(
            "A backlog", "Rows a second, of a million that wait in MariaDB.",
            (
                Line(OUTBOX_BACKLOG, "txmq, outbox", "drained"),
                *(Line(backlog_name(peer), f"outbox into {peer.title}", "drained") for peer in peers),
            ),
        ),
        Chart(
            f"A queue in PostgreSQL, {CALLERS} callers", "Orders a second, until the last one is handled.",
            tuple(Line(queue.name, queue.title, ALL) for queue in QUEUES),
        ),
        Chart(
            "From the commit to the handler", f"PostgreSQL, orders at a steady pace. {_SPREAD}",
            tuple(Line(queue.name, queue.title, "p50") for queue in QUEUES if queue.is_handled), is_latency=True,
        ),
    )  # fmt: skip
