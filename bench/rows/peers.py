"""The usual way without txmq: an outbox table, and a relay that looks each second."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from bench.model import Measure, Row, Surroundings
from bench.peers.catalogue import OWN
from bench.peers.orders import outbox, visible
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


ROWS = (_row("", "SQLite", sqlite), _row("-mariadb", "MariaDB", mariadb))
