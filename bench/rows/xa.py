"""XA with MariaDB: what the database does alone with a row, by a plain commit and in two phases."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from bench.model import Measure, Row, Surroundings
from bench.rows.databases import ORDER, VALUE, Database, mariadb, row, row_and_outbox
from bench.rows.last_resource import THREADS, WARM_UP
from txmq.testing.bench.timing import in_threads

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


ROWS = (
    Row(
        "mariadb-bare", "bare MariaDB: one row, plain commit; with an outbox row; XA PREPARE + XA COMMIT", _bare,
        {f"{name}, {threads} thr": "tx/s" for threads in THREADS for name in (*_WORK, "XA")},
    ),
)  # fmt: skip
