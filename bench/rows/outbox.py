"""txmq's outbox against row + outbox row in one commit, and against that with an unordered relay into the same broker.

Until the messages are at a reader, all of it running. The bare limits are of the same rounds: the commit that moves no
message, and the unordered relay (``bench/peers/relay.py``), which promises less. A backlog is rows that wait when the
relay begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import txmq
from bench.model import Bound, Measure, Row, Surroundings
from bench.peers.catalogue import OWN
from bench.peers.orders import measured, outbox, outbox_alone, visible
from bench.peers.own_outbox import drained, fill, installed, own_outbox, woken_outbox
from bench.peers.works import CALLERS, Pace
from bench.rows.databases import Open, mariadb, postgresql
from txmq.testing.bench.limits import SYNCED_ECHO

BACKLOG, LONG_BACKLOG = 200_000, 1_000_000
_PACED = 400  # orders at a steady pace whose relay is woken
_ONE, _ALL = "rate, 1 thr", f"rate, {CALLERS} thr"
_OF_ALONE, _OF_RELAY = "of nothing moved, 1 thr", f"of the unordered relay, {CALLERS} thr"
_CPU_MORE = f"CPU above nothing moved, {CALLERS} thr"
_LATENCIES = {"p50 woken": "ms", "p99 woken": "ms", "p50 polling": "ms", "p99 polling": "ms"}
_RATES = {
    f"{name}{thr}": "orders/s" for thr in (", 1 thr", f", {CALLERS} thr") for name in ("rate", "nothing moved", "relay")
}
_CPU = {_CPU_MORE: "us", "CPU": "us", "CPU nothing moved": "us", "CPU relay": "us"}
_SOON = (Bound("p50 woken", 3, "ms", at_least=False), Bound("p50 polling", 15, "ms", at_least=False))


@contextmanager
def _beside(surroundings: Surroundings, *, opened: Open) -> Iterator[Measure]:
    with (
        opened(surroundings.directory) as database, OWN.start(surroundings.directory) as running, ExitStack() as stack,
    ):  # fmt: skip
        pace = Pace(surroundings.count(10) / 10)
        alone = measured(outbox_alone(database, stack), pace)
        relay = measured(outbox(OWN, running, database, stack), pace)
        own = measured(own_outbox(OWN, running, database, stack), pace)
        woken = woken_outbox(OWN, running, database, stack)

        def measure() -> dict[str, float]:
            theirs, ours, bare = relay(), own(), alone()
            soon = visible(woken, surroundings.count(_PACED))
            figures = {_OF_ALONE: 100 * ours[_ONE] / bare[_ONE], _OF_RELAY: 100 * ours[_ALL] / theirs[_ALL]}
            for name, side in (("rate", ours), ("nothing moved", bare), ("relay", theirs)):
                figures |= {f"{name}, 1 thr": side[_ONE], f"{name}, {CALLERS} thr": side[_ALL]}
            figures |= {f"{name} woken": soon[name] for name in ("p50", "p99")}
            figures |= {f"{name} polling": ours[name] for name in ("p50", "p99")}
            cpu = {"CPU": ours["CPU"], "CPU nothing moved": bare["CPU"], "CPU relay": theirs["CPU"]}
            return figures | cpu | {_CPU_MORE: ours["CPU"] - bare["CPU"]}

        yield measure


@contextmanager
def _backlog(surroundings: Surroundings, *, opened: Open, rows: int) -> Iterator[Measure]:
    """Filled before the clock starts; a relay of this process takes it to the broker."""
    with (
        opened(surroundings.directory) as database, OWN.start(surroundings.directory) as running,
        txmq.connect(running.address, timeout=60) as client,
    ):  # fmt: skip
        outbox = installed(database)

        def measure() -> dict[str, float]:
            count = surroundings.count(rows)
            fill(outbox, database.connect, count)
            sent, seconds = drained(client, outbox, database.connect)
            if sent != count:
                raise AssertionError(f"{sent} messages were sent, {count} waited")
            return {"drained": sent / seconds}

        yield measure


def _rows(suffix: str, name: str, opened: Open, bounds: tuple[Bound, ...], cpu: dict[str, str]) -> tuple[Row, ...]:
    def backlog(row: str, rows: int, *, is_long: bool = False) -> Row:
        return Row(
            f"{row}{suffix}", f"outbox in {name}: a backlog of {rows:,} rows, until all are in the broker",
            partial(_backlog, opened=opened, rows=rows), {"drained": "msg/s"}, (Bound("drained", 30_000, "msg/s"),),
            (SYNCED_ECHO,), repeats=1 if is_long else 3, is_long=is_long,
        )  # fmt: skip

    return (
        Row(
            f"outbox{suffix}", f"outbox and its relay ({name}), until a reader has it, against row + outbox row",
            partial(_beside, opened=opened),
            {_OF_ALONE: "%", _OF_RELAY: "%"} | cpu | _LATENCIES | _RATES, (*bounds, *_SOON), (SYNCED_ECHO,),
        ),
        backlog("outbox-backlog", BACKLOG), backlog("outbox-backlog-large", LONG_BACKLOG, is_long=True),
    )  # fmt: skip


_BOUNDS = (
    Bound(_OF_ALONE, 75, "%"), Bound(_OF_RELAY, 100, "%"), Bound(_CPU_MORE, 70, "us", at_least=False),
)  # fmt: skip
ROWS = (
    *_rows("-mariadb", "MariaDB", mariadb, _BOUNDS, _CPU),
    *_rows("-postgresql", "PostgreSQL", postgresql, (), {}),  # its bounds: bench/peers/shares.py
)
