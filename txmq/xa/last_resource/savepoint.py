"""A part of a transaction in a database whose statements may fail without dooming the rest: ``tx.savepoint``.

An error that leaves it rolls the part back, and the transaction is as sound as it was before it. If a statement
failed and the part ends normally, the work of its other statements stays, in databases that go on after a failed
statement (MySQL, MariaDB, SQLite: it did nothing); PostgreSQL does not go on, so that the part is rolled back and that
is said by an error.

Invariant: if the savepoint is gone (a deadlock takes all of them, as a COMMIT by the body does) the block is doomed.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from txmq.errors import RolledBackError, TransactionStateError
from txmq.xa.database.dbapi import run
from txmq.xa.database.guarded_connection import Guard, GuardedConnection, in_its_thread


class Savepoint:
    """One savepoint. Begun when made, ended by ``release`` or ``roll_back``.

    Args:
        guarded: the connection of a block.
        number: no other savepoint of the block has it.
    """

    def __init__(self, guarded: Any, number: int) -> None:
        if not isinstance(guarded, GuardedConnection):
            raise TransactionStateError("a savepoint needs the connection of a transaction block")
        self._guard: Guard = object.__getattribute__(guarded, "_guard")
        self._connection: Any = object.__getattribute__(guarded, "_connection")
        self._name = f"txmq_part_{number}"
        self._before = self._guard.error
        in_its_thread(guarded, lambda: guarded.cursor().execute(f"SAVEPOINT {self._name}"))

    def release(self) -> None:
        """End the part normally: its work stays.

        Raises:
            RolledBackError: it could not: a statement in it failed, and the database does not go on after that.
        """
        try:
            self._run("RELEASE SAVEPOINT")
        except Exception as error:  # noqa: BLE001  the driver's; the statement's own error says more
            failed = self._guard.error or error
            self.roll_back()
            raise RolledBackError(f"a statement of the savepoint failed, it is rolled back: {failed}") from failed
        self._guard.error = self._before

    def roll_back(self) -> None:
        """Undo the part. If that fails, the block is doomed."""
        if self._guard.is_over:
            return
        try:
            self._run("ROLLBACK TO SAVEPOINT")
            self._run("RELEASE SAVEPOINT")
        except Exception as error:  # noqa: BLE001  the driver's: the block fails with the first error
            self._guard.note(error)
        else:
            self._guard.error = self._before

    def _run(self, verb: str) -> None:
        self._guard.there(lambda: self._run_there(verb))

    def _run_there(self, verb: str) -> None:
        with suppress(AttributeError):  # only mysqlclient has results that are not waited for
            while self._connection.next_result() == 0:
                self._connection.discard_result()
        run(self._connection, f"{verb} {self._name}")
