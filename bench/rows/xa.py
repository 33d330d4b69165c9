"""XA with MariaDB: a row and its message in two phases, against what the database does alone with the row."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from bench.model import Bound, Measure, Row, Surroundings
from bench.rows.databases import ORDER, VALUE, Database, mariadb, row, row_and_outbox
from bench.rows.last_resource import (
    THREADS,
    WARM_UP,
    beside,
    broker_and_client,
    row_and_message,
    share_of_steps,
    units_beside,
    visible,
)
from bench.rows.steps import bare_steps
from txmq.testing.bench.limits import SYNCED_ECHO
from txmq.testing.bench.model import LATENCY_UNITS
from txmq.testing.bench.timing import in_threads
from txmq.xa import MySQLResource

_numbers = itertools.count(1)
_WORK = {"plain commit": row, "with outbox row": row_and_outbox}


def row_in_two_phases(database: Database) -> Callable[[], object]:
    """XA START, the row, XA END, XA PREPARE, XA COMMIT: five statements, on one connection."""
    connection = database.connect()
    connection.autocommit(True)
    cursor = connection.cursor()
    insert = database.sql(ORDER)

    def work() -> None:
        xid = f"'bench-{next(_numbers)}'"
        cursor.execute(f"XA START {xid}")
        cursor.execute(insert, (VALUE,))
        cursor.execute(f"XA END {xid}")
        cursor.execute(f"XA PREPARE {xid}")
        cursor.execute(f"XA COMMIT {xid}")

    return work


@contextmanager
def _bare(surroundings: Surroundings) -> Iterator[Measure]:
    makers: dict[str, Callable[[Database], Callable[[], object]]] = {**_WORK, "XA": row_in_two_phases}
    with mariadb(surroundings.directory) as database:

        def measure(count: int) -> dict[str, float]:
            return {
                f"{name}, {threads} thr": in_threads(partial(make, database), threads, count)[0]
                for threads in THREADS
                for name, make in makers.items()
            }

        measure(WARM_UP)
        yield lambda: measure(surroundings.count(4000))


@contextmanager
def _xa(surroundings: Surroundings) -> Iterator[Measure]:
    with (
        mariadb(surroundings.directory) as database, bare_steps(database, surroundings.directory) as steps,
        broker_and_client(surroundings) as (broker, client), client.producer() as producer,
    ):  # fmt: skip
        resource = MySQLResource("orders", connect=database.connect)
        resource.install(client)
        work = row_and_message(producer, resource, database.sql(ORDER))
        pids = broker.pid, database.pid(), steps.pid

        def measure(count: int) -> dict[str, float]:
            return beside(work, {"bare XA": partial(row_in_two_phases, database), "steps": steps.xa}, count, pids)

        measure(WARM_UP)
        yield lambda: measure(surroundings.count(2000))


ROWS = (
    Row(
        "xa-mariadb", "XA (MariaDB): a row and its message, against XA PREPARE + XA COMMIT of the row", _xa,
        units_beside("bare XA"),
        (
            Bound("share, 1 thr", 55, "%", best=share_of_steps("bare XA", 1)),
            Bound("share, 8 thr", 45, "%", best=share_of_steps("bare XA", 8)),
        ),
        (SYNCED_ECHO,),
    ),
    Row(
        "visible-xa-mariadb", "from XA COMMIT of MariaDB to the message at a reader",
        partial(visible, opened=mariadb, made=MySQLResource), LATENCY_UNITS,
    ),
    Row(
        "mariadb-bare", "bare MariaDB: one row, plain commit; with an outbox row; XA PREPARE + XA COMMIT", _bare,
        {f"{name}, {threads} thr": "tx/s" for threads in THREADS for name in (*_WORK, "XA")},
    ),
)  # fmt: skip
