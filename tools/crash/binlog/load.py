"""The load of the binlog campaign: a process that writes to the source until SIGTERM.

Writers change rows of ten tables in transactions, of which some are rolled back, some have savepoints, and a few are
larger than one txmq transaction. XA transactions are committed, rolled back, committed in one phase, or left prepared;
a *settler* ends what it finds prepared, its own or of a killed predecessor: it commits what was decided, and rolls the
rest back. A commit is decided when XA PREPARE has been answered, and not before: a killed server may have prepared what
its binlog does not have. One thread alters, renames, empties, drops and makes tables meanwhile. What a killed database,
a lock or a missing table costs is one transaction.

At the end nothing is prepared, and every table has its name again.
"""

from __future__ import annotations

import itertools
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import MySQLdb

from tools.crash.binlog.directory import BinlogCampaignDirectory
from tools.crash.binlog.statements import Changes, alterations
from tools.crash.binlog.tables import MOVED, TABLES
from tools.crash.processes import pause, run_in_threads
from txmq.testing.processes.database_programs import chosen_program
from txmq.xa.database.dbapi import run

WRITERS, XA_WORKERS = 3, 4
LIVES = 10**6  # transactions of one process, at most: stamps stay different
_AWAY = (2002, 2003, 2006, 2013, 1927, 1053, 1077)


class Load:
    """See the module's docstring.

    Args:
        name: of this process: xids begin with it.
    """

    def __init__(self, world: BinlogCampaignDirectory, name: str, seed: int) -> None:
        abilities = chosen_program().abilities
        self._tables = [table.of(abilities) for table in TABLES]
        self._world, self._name, self._seed = world, name, seed
        self._ends = threading.Event()
        self._stamps = itertools.count(seed % 10**9 * LIVES)
        self._xids = itertools.count(1)

    def stop(self) -> None:
        """End it."""
        self._ends.set()

    def run(self) -> None:
        """Write until ``stop``, then tidy up."""
        bodies = [self._write] * WRITERS + [self._write_xa] * XA_WORKERS + [self._settle, self._alter]
        run_in_threads([self._looped(body, number) for number, body in enumerate(bodies)])
        self._tidy()

    def _looped(self, body: Callable[[Any, random.Random], None], number: int) -> Callable[[], None]:
        def loop() -> None:
            rng = random.Random(self._seed * 100 + number)
            while not self._ends.is_set():
                with suppress(MySQLdb.OperationalError), self._connected() as connection:
                    while not self._ends.is_set():
                        body(connection, rng)
                pause(0.05)  # the database is away

        return loop

    @contextmanager
    def _connected(self) -> Iterator[Any]:
        connection = self._world.connect()
        try:
            yield connection
        finally:
            with suppress(MySQLdb.Error):
                connection.close()

    def _changes(self, rng: random.Random) -> Changes:
        return Changes(self._tables, rng, next(self._stamps), keyless_grow=not self._world.snapshot.exists())

    # --- transactions ------------------------------------------------------------------------------------------------

    def _write(self, connection: Any, rng: random.Random) -> None:
        pause(rng.uniform(0, 0.04))
        try:
            run(connection, "BEGIN")
            for statement in self._changes(rng).of_a_transaction():
                run(connection, statement)
            run(connection, "ROLLBACK" if rng.random() < 0.1 else "COMMIT")
        except MySQLdb.Error as error:
            _refuse_away(error)
            run(connection, "ROLLBACK")

    def _write_xa(self, connection: Any, rng: random.Random) -> None:
        pause(rng.uniform(0, 0.1))
        if self._world.calm.exists():
            return
        commits, one_phase, is_left = rng.random() < 0.7, rng.random() < 0.2, rng.random() < 0.4
        name = f"{self._name}-{next(self._xids)}"
        xid = f"'{name}'"
        run(connection, f"XA START {xid}")
        try:
            for statement in self._changes(rng).of_a_transaction(has_savepoints=False):
                run(connection, statement)
        except MySQLdb.Error as error:
            _refuse_away(error)
            _end_badly(connection, xid)
            return
        run(connection, f"XA END {xid}")
        if one_phase:
            run(connection, f"XA COMMIT {xid} ONE PHASE" if commits else f"XA ROLLBACK {xid}")
            return
        run(connection, f"XA PREPARE {xid}")
        if commits:
            self._world.decide(name)
        if is_left:
            raise MySQLdb.OperationalError(2006, "left prepared")
        run(connection, f"XA {'COMMIT' if commits else 'ROLLBACK'} {xid}")

    def _settle(self, connection: Any, rng: random.Random) -> None:
        """End some of what is prepared."""
        pause(0.3)
        self._settle_some(connection, lambda: rng.random() < 0.3 or self._world.calm.exists())

    def _settle_some(self, connection: Any, is_chosen: Callable[[], bool]) -> int:
        """End what is chosen of the prepared transactions; how many there were."""
        found, decided = prepared(connection), self._world.decided()
        for name in found:
            if is_chosen():
                with suppress(
                    MySQLdb.OperationalError
                ):  # its owner is there, or the server has not seen that it is gone
                    run(connection, f"XA {'COMMIT' if name in decided else 'ROLLBACK'} '{name}'")
        return len(found)

    # --- tables ------------------------------------------------------------------------------------------------------

    def _alter(self, connection: Any, rng: random.Random) -> None:
        pause(rng.uniform(0.2, 1.0))
        if self._world.calm.exists():
            return
        for statement in alterations(self._tables, rng, connection, moves=not self._world.snapshot.exists()):
            try:
                run(connection, statement)
            except MySQLdb.Error as error:
                _refuse_away(error)
                return  # a prepared transaction has the table, or it is not there, or the server has no such statement
            pause(rng.uniform(0, 0.3))

    def _tidy(self) -> None:
        with self._connected() as connection:
            while self._settle_some(connection, lambda: True):
                pause(0.05)
            for table in self._tables:
                with suppress(MySQLdb.Error):
                    run(connection, f"RENAME TABLE {table.name}{MOVED} TO {table.name}")


def prepared(connection: Any) -> list[str]:
    """XA transactions that are prepared at a server."""
    return [data if isinstance(data, str) else data.decode() for *_, data in run(connection, "XA RECOVER")[0]]


def _refuse_away(error: MySQLdb.Error) -> None:
    if error.args and error.args[0] in _AWAY:
        raise error


def _end_badly(connection: Any, xid: str) -> None:
    """A statement failed within an XA transaction: roll it back."""
    with suppress(MySQLdb.OperationalError):  # it is marked for rollback
        run(connection, f"XA END {xid}")
    run(connection, f"XA ROLLBACK {xid}")


def main(directory: str, name: str, seed: str) -> None:
    """Write until SIGTERM."""
    load = Load(BinlogCampaignDirectory(Path(directory)), name, int(seed))
    signal.signal(signal.SIGTERM, lambda *_: load.stop())
    load.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
