"""The usual way without txmq: an outbox table and a relay, which looks each second, or as often as it can."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from bench.model import Bound, Measure, Row, Surroundings
from bench.peers.catalogue import OWN
from bench.peers.orders import last_resource, measured, outbox, visible
from bench.peers.works import CALLERS, Pace
from bench.rows.databases import Open, mariadb, sqlite
from txmq.testing.bench.model import LATENCY_UNITS

POLL_S = 1.0
ORDERS = 600  # at their pace, spread over several polls


@contextmanager
def _outbox_relay(surroundings: Surroundings, *, opened: Open) -> Iterator[Measure]:
    with (
        opened(surroundings.directory) as database, OWN.start(surroundings.directory) as running,
        ExitStack() as stack,
    ):  # fmt: skip
        service = outbox(OWN, running, database, stack, POLL_S)
        yield lambda: visible(service, ORDERS)


def _row(suffix: str, name: str, opened: Open) -> Row:
    return Row(
        f"peer-outbox{suffix}", f"peer: outbox table in {name}, relay polling each second: visible",
        partial(_outbox_relay, opened=opened), LATENCY_UNITS, repeats=2,
    )  # fmt: skip


@contextmanager
def _last_resource_and_relay(surroundings: Surroundings) -> Iterator[Measure]:
    with (
        mariadb(surroundings.directory) as database, OWN.start(surroundings.directory) as running,
        ExitStack() as stack,
    ):  # fmt: skip
        pace = Pace(surroundings.count(10) / 10)
        own = measured(last_resource(OWN, running, database, stack), pace)
        relay = measured(outbox(OWN, running, database, stack), pace)

        def measure() -> dict[str, float]:
            ours, theirs = own(), relay()
            figures = {f"share of {name}": 100 * ours[name] / theirs[name] for name in (_RATE, _LATENCY)}
            for name in (_RATE, _LATENCY):
                figures |= {f"{name}, own": ours[name], f"{name}, relay": theirs[name]}
            return figures

        yield measure


_RATE, _LATENCY = f"rate, {CALLERS} thr", f"p50, {CALLERS} thr"


ROWS = (
    Row(
        "last-resource-relay", "last resource (MariaDB) against outbox and relay, both running, until it is there",
        _last_resource_and_relay,
        {
            f"share of {_RATE}": "%", f"share of {_LATENCY}": "%", f"{_RATE}, own": "orders/s",
            f"{_RATE}, relay": "orders/s", f"{_LATENCY}, own": "ms", f"{_LATENCY}, relay": "ms",
        },
        (Bound(f"share of {_RATE}", 100, "%"), Bound(f"share of {_LATENCY}", 10, "%", at_least=False)), repeats=3,
    ),
    _row("", "SQLite", sqlite), _row("-mariadb", "MariaDB", mariadb),
)  # fmt: skip
