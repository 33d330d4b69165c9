"""Binlog sync from end to end: one MariaDB into another, by reader, broker and applier as processes of their own.

Both commands run and are level before anything is measured. The rate counts from the first change that is written to
the last one that is in the target, writer included. The lag is the age of a row, from the source's COMMIT on, when a
SELECT in the target finds it: one row of every second transaction is looked for, about every 2 ms.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import count
from pathlib import Path

from bench.model import Bound, Measure, NotInstalledError, Row, Surroundings
from bench.rows.binlog import TABLE, UNSYNCED, fill
from tools.sync_settings import sync_settings
from txmq.errors import ConfigError
from txmq.runtime.threads import Signal, start_daemon
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.database_programs import MariaDBFailedError
from txmq.testing.processes.mariadb import MariaDB

CHANGES, CHANGES_PER_S, LAG_S = 100_000, 4_000, 10
INSERTS, UPDATES, DELETES = 12, 6, 2
PER_TRANSACTION = INSERTS + UPDATES + DELETES
SNAPSHOT_ROWS, SNAPSHOT_ROWS_MAX = 100_000, 1_000_000
MARKS = 64  # rows of a last transaction: each partition has some
WAIT_S, LOOK_S = 300.0, 0.002


class Writer:
    """Writes transactions of inserts, updates and a delete to the source; notes when their COMMIT returned."""

    def __init__(self, source: MariaDB) -> None:
        self._connection = source.connect()
        self._next = self.marked = 0
        self.committed: dict[int, float] = {}  # by the id of a row of some transactions, until it is found

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def write(self, transactions: int, per_s: float = 0.0) -> None:
        """So many transactions, at a constant rate or as fast as it goes."""
        begun = time.perf_counter()
        for number in range(transactions):
            if per_s:
                time.sleep(max(begun + number / per_s - time.perf_counter(), 0.0))
            first, self._next = self._next, self._next + INSERTS
            self._send(
                f"BEGIN; INSERT INTO t VALUES {_rows(range(first, first + INSERTS))};"
                f"UPDATE t SET number = number + 1 WHERE id BETWEEN {first - UPDATES} AND {first - 1};"
                f"DELETE FROM t WHERE id BETWEEN {first - DELETES - UPDATES} AND {first - UPDATES - 1}; COMMIT"
            )
            if per_s and number % 2:
                self.committed[first] = time.perf_counter()

    def mark(self) -> None:
        """Rows with negative ids and a new number, which are found in the target after everything else."""
        self.marked += 1
        rows = ", ".join(f"({one}, {self.marked}, '', 0, NOW())" for one in range(-MARKS, 0))
        self._send(f"REPLACE INTO t VALUES {rows}; COMMIT")

    def _send(self, sql: str) -> None:
        with closing(self._connection.cursor()) as cursor:
            cursor.execute(sql)
            while cursor.nextset():
                pass


def _rows(ids: range) -> str:
    return ", ".join(f"({one}, 7, 'customer number {one}', 9.50, '2026-11-23 09:05:00.123')" for one in ids)


class Pair:
    """Two servers, a broker, and a file that the commands take."""

    def __init__(self, directory: Path, opened: ExitStack) -> None:
        self._directory, self._opened = directory, opened
        try:
            self.source = opened.enter_context(MariaDB(directory / "source", binary_log=True, options=UNSYNCED))
            self.target = opened.enter_context(MariaDB(directory / "target"))
        except (MariaDBFailedError, ConfigError) as error:
            raise NotInstalledError(str(error)) from error
        self.broker = opened.enter_context(BrokerProcess(directory / "data"))
        for server in (self.source, self.target):
            server.execute(TABLE)

    def start(self, command: str, *words: str, name: str = "s") -> subprocess.Popen[bytes]:
        """Start a command of ``txmq binlog``; it is killed at the end."""
        config = self._directory / f"{name}.toml"
        config.write_text(sync_settings(name, self.broker.address, self.source.port, self.target.port))
        with (self._directory / "log").open("ab") as log:
            started = subprocess.Popen(
                [sys.executable, "-m", "txmq.cli.main", "binlog", command, "--config", str(config), *words],
                stdout=log, stderr=log,
            )  # fmt: skip
        self._opened.callback(started.wait)
        self._opened.callback(started.kill)
        return started

    def log(self) -> str:
        """The end of what the commands have said."""
        return (self._directory / "log").read_text()[-2000:]


class Watch:
    """Looks for the writer's rows in the target, in a thread of its own, until the block ends."""

    def __init__(self, target: MariaDB, writer: Writer) -> None:
        self._target, self._writer = target, writer
        self._is_ended, self._done = False, Signal()
        self.ages_ms: list[float] = []

    def __enter__(self) -> Watch:
        start_daemon("binlog-bench", self._look)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_ended = True
        if not self._done.wait(WAIT_S):
            raise RuntimeError(f"{len(self._writer.committed)} rows were not found in the target")

    def _look(self) -> None:
        committed = self._writer.committed
        with closing(self._target.connect(autocommit=True)) as connection, closing(connection.cursor()) as cursor:
            while not self._is_ended or committed:
                time.sleep(LOOK_S)
                wanted = list(committed)
                if wanted:
                    cursor.execute(f"SELECT id FROM t WHERE id IN ({', '.join(map(str, wanted))})")
                    found, now = cursor.fetchall(), time.perf_counter()
                    self.ages_ms += [1000 * (now - committed.pop(one)) for (one,) in found]
        self._done.set()


@contextmanager
def _replica(surroundings: Surroundings) -> Iterator[Measure]:
    transactions = surroundings.count(CHANGES) // PER_TRANSACTION
    per_s = CHANGES_PER_S / PER_TRANSACTION
    with ExitStack() as opened:
        pair = Pair(surroundings.directory, opened)
        writer = opened.enter_context(closing(Writer(pair.source)))
        for command in ("run", "apply"):
            pair.start(command)

        def level() -> None:
            """Wait until the target has all that was written."""
            writer.mark()
            marks = "SELECT COUNT(*) FROM t WHERE id < 0 AND number = %s"
            eventually(lambda: pair.target.execute(marks, (writer.marked,)) == [(MARKS,)], pair.log, WAIT_S)

        def measure() -> dict[str, float]:
            level()
            started = time.perf_counter()
            writer.write(transactions)
            written = time.perf_counter()
            level()
            taken = time.perf_counter() - started
            figures = {
                "rate": transactions * PER_TRANSACTION / taken,
                "written": transactions * PER_TRANSACTION / (written - started),
            }
            started = time.perf_counter()
            with Watch(pair.target, writer) as watch:
                writer.write(int(surroundings.count(LAG_S) * per_s), per_s)
                offered = time.perf_counter() - started
            _require_equal(pair)
            ages = statistics.quantiles(watch.ages_ms, n=100)
            return figures | {
                "offered": surroundings.count(LAG_S) * CHANGES_PER_S / offered,
                "lag p50": ages[49], "lag p99": ages[98], "lag max": max(watch.ages_ms),
            }  # fmt: skip

        yield measure


def _require_equal(pair: Pair) -> None:
    rows = "SELECT COUNT(*), SUM(CRC32(CONCAT_WS('|', id, number, name, price, at))) FROM t"
    eventually(lambda: pair.source.execute(rows) == pair.target.execute(rows), pair.log)


@contextmanager
def _snapshot(surroundings: Surroundings, *, full: int) -> Iterator[Measure]:
    rows, numbers = surroundings.count(full), count(1)
    with ExitStack() as opened:
        pair = Pair(surroundings.directory, opened)
        fill(pair.source, rows)

        def measure() -> dict[str, float]:
            started = time.perf_counter()
            reader = pair.start("run", "--snapshot", "only", name=f"s{next(numbers)}")
            if reader.wait(WAIT_S):
                raise RuntimeError(pair.log())
            return {"rate": rows / (time.perf_counter() - started)}

        yield measure


ROWS = (
    Row(
        "binlog-replica",
        f"MariaDB into MariaDB, end to end: {CHANGES:,} changes, then {LAG_S} s of {CHANGES_PER_S:,} changes/s",
        _replica,
        {
            "rate": "changes/s", "written": "changes/s", "offered": "changes/s", "lag p50": "ms", "lag p99": "ms",
            "lag max": "ms",
        },
        (Bound("rate", 8_000, "changes/s"), Bound("lag max", 1_000, "ms", at_least=False)),
        repeats=3,
    ),
    Row(
        "binlog-snapshot", f"snapshot of a table of {SNAPSHOT_ROWS:,} rows, start and end of the reader included",
        partial(_snapshot, full=SNAPSHOT_ROWS), {"rate": "rows/s"}, repeats=3,
    ),
    Row(
        "binlog-snapshot-large", f"the same of {SNAPSHOT_ROWS_MAX:,} rows",
        partial(_snapshot, full=SNAPSHOT_ROWS_MAX), {"rate": "rows/s"}, repeats=1, is_long=True,
    ),
)  # fmt: skip
