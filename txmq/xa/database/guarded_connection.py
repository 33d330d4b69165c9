"""The connection as the body of a transaction sees it: the driver's own, with the ends of the transaction taken away.

``GuardedConnection`` and ``GuardedCursor`` pass everything through. An exception of a driver's method is noted first:
one failed statement dooms the transaction, because some databases go on with half of the work (MariaDB after 1205).
Calls that would end the transaction (commit, rollback, close, ``with connection``, SQLite's executescript) are refused;
SQL text is not read, so that ``execute("COMMIT")`` is found out later, by the savepoint that is gone.

Rows that a driver gives one by one while it holds its connection (psycopg's ``stream``) end with the block.

Invariants:
    * after ``Guard.end`` every use raises: the connection may serve another block by then;
    * the first error is kept, later ones are mostly its consequences.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import GeneratorType
from typing import Any, Final, TypeVar, cast
from weakref import WeakSet

from txmq.errors import RolledBackError, TransactionStateError, TransactionTimeoutError, caused
from txmq.runtime.call_limits import CallLimit
from txmq.xa.database.dbapi import run
from txmq.xa.database.strand_connection import ThreadConnection

T = TypeVar("T")
_ENDS_THE_TRANSACTION = frozenset(
    {"commit", "rollback", "close", "executescript", "begin", "xa", "transaction", "autocommit", "set_autocommit"}
)


# The beginning of a statement whose work outlives the transaction: another schema, role, path or variable.
_CHANGES_SESSION = re.compile(
    r"\s*(?:(?:USE|RESET|DISCARD)\b|SET\b(?!\s+(?:LOCAL|CONSTRAINTS?|TRANSACTION|STATEMENT)\b|\s*@\w))",
    re.IGNORECASE,
)
_LOOKED_AT_MAX = 500  # characters of a statement
_CHANGING = frozenset({"select_db", "change_user", "set_session", "set_isolation_level", "set_character_set"})
_ERRORS_MAX = 32
WAIT_S_MIN: Final = 1.0  # of a block for its database, even if the deadline is closer
NO_ANSWER: Final = "the database has not answered before timeout= passed: its connection was ended; nothing happened"
_PSYCOPG_IN_TRANSACTION = 2  # and sound: 3 is one that has failed
_STATEMENTS = frozenset({"execute", "executemany"})


class Guard:
    """State that a transaction's connection and its cursors share.

    Attributes:
        error: the first that the driver raised.
        errors: the last ones, with what the application made of them.
        limit: of the connection's calls, the block's deadline.
        is_over: the connection may not be used any more.
        on_use: called before each call of the driver.
        there: runs what uses the driver: here, or in the connection's own thread.
        is_changed: the session is not what it was before: no other block should have the connection.
        was_ended: a call succeeded, and no transaction was open after it: it has ended it.
        was_rolled_back: a call failed, and none was open after it: the database has rolled it back.
    """

    __slots__ = (
        "_knowing", "_rows", "error", "errors", "is_changed", "is_over", "limit", "on_use", "there", "was_ended",
        "was_rolled_back",
    )  # fmt: skip

    def __init__(self, knowing: Any = None, limit: CallLimit | None = None) -> None:
        """``knowing``: the connection, if it says whether it is ``in_transaction``; or None."""
        self.limit = limit or CallLimit()
        self.there: Callable[[Callable[[], Any]], Any] = _here
        self._knowing = knowing
        self.error: BaseException | None = None
        self.errors: deque[BaseException] = deque(maxlen=_ERRORS_MAX)
        self.is_changed = self.is_over = self.was_ended = self.was_rolled_back = False
        self.on_use: Callable[[], None] | None = None
        self._rows: WeakSet[GeneratorType[Any, Any, Any]] | None = None  # the body's own: it ends them by letting go

    def end(self) -> None:
        """The block is over."""
        self.is_over = True
        left, self._rows = self._rows, None
        for rows in left or ():
            with suppress(Exception):  # a connection that cannot be used says so when the transaction is ended
                self.there(rows.close)

    def keep(self, rows: GeneratorType[Any, Any, Any]) -> None:
        """Know rows that hold the connection until they are read or closed."""
        if self._rows is None:
            self._rows = WeakSet()
        self._rows.add(rows)

    def check(self) -> None:
        """Refuse use after the block."""
        if self.is_over:
            raise TransactionStateError("the connection belongs to a transaction block that is over")

    def call(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call the driver, noting what it raises.

        Raises:
            TransactionTimeoutError: no answer came until the block's deadline.
        """
        if self.is_over:
            self.check()
        if self.on_use is not None:
            self.on_use()
        if arguments and isinstance(arguments[0], str) and _changes_session(arguments[0]):
            self.is_changed = True
        if self.was_rolled_back and method.__name__ in _STATEMENTS:  # outside of any transaction it would commit alone
            raise RolledBackError(f"the database has rolled the block's transaction back: {self.error}")
        limit = self.limit
        limit.calls += 1
        try:
            result = method(*arguments, **named)
        except StopIteration:
            raise
        except BaseException as error:
            self.note(error)
            if self._knowing is not None and not self.was_ended and not self._knowing.in_transaction:
                self.was_rolled_back = True
            if limit.has_passed and isinstance(error, Exception):
                raise caused(TransactionTimeoutError(NO_ANSWER), error) from error
            raise
        finally:
            limit.calls -= 1
        if self._knowing is not None and not self.was_rolled_back and not self._knowing.in_transaction:
            self.was_ended = True
        return result

    def note(self, error: BaseException) -> None:
        """A statement of the body failed, or the body raised this: with the errors that led to it."""
        if self.error is None:
            self.error = error
        self.errors.extend(_behind(error))

    def wrap(self, method: Callable[..., Any], source: Any, stand_in: Any) -> Callable[..., Any]:
        """``method``, noting its exceptions; if it returns ``source`` itself (chaining) the stand-in is returned."""

        def guarded(*arguments: Any, **named: Any) -> Any:
            result = self.call(method, *arguments, **named)
            if isinstance(result, GeneratorType):
                return GuardedRows(result, self, source, stand_in)
            return stand_in if result is source else result

        return guarded


class GuardedRows:
    """What a generator of the driver gives, noting its errors.

    Args:
        source, stand_in: as of ``Guard.wrap``.
    """

    __slots__ = ("_guard", "_rows", "_source", "_stand_in")

    def __init__(self, rows: GeneratorType[Any, Any, Any], guard: Guard, source: Any, stand_in: Any) -> None:
        self._rows, self._guard, self._source, self._stand_in = rows, guard, source, stand_in
        guard.keep(rows)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        row = self._guard.call(self._rows.__next__)
        return self._stand_in if row is self._source else row

    def close(self) -> None:
        """Let go of the connection."""
        self._rows.close()


class GuardedCursor:
    """A cursor of a transaction's connection."""

    __slots__ = ("_cursor", "_guard")

    def __init__(self, cursor: Any, guard: Guard) -> None:
        object.__setattr__(self, "_cursor", cursor)
        object.__setattr__(self, "_guard", guard)

    def execute(self, *arguments: Any, **named: Any) -> Any:
        """Run a statement. Returns the driver's result, or this cursor if the driver returns its own."""
        cursor = self._cursor
        result = self._guard.call(cursor.execute, *arguments, **named)
        return self if result is cursor else result

    def __getattr__(self, name: str) -> Any:
        if name == "executescript":
            raise TransactionStateError("executescript commits: inside a transaction block use execute")
        if name == "connection":
            raise TransactionStateError("inside a transaction block use tx.connection(resource)")
        self._guard.check()
        value = getattr(self._cursor, name)
        return self._guard.wrap(value, self._cursor, self) if callable(value) else value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._cursor, name, value)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        row = self._guard.call(self._cursor.fetchone)
        if row is None:
            raise StopIteration
        return row

    def __enter__(self) -> GuardedCursor:
        return self

    def __exit__(self, *_: object) -> None:
        # Not checked: a block may end after the transaction's. MySQLdb reads here what was left unread, errors too.
        if self._guard.is_over:
            self._cursor.close()
        else:
            self._guard.call(self._cursor.close)


class GuardedConnection:
    """A transaction's connection."""

    __slots__ = ("_connection", "_guard")

    def __init__(self, connection: Any, guard: Guard) -> None:
        object.__setattr__(self, "_connection", connection)
        object.__setattr__(self, "_guard", guard)

    def cursor(self, *arguments: Any, **named: Any) -> GuardedCursor:
        """A cursor that notes errors; arguments as the driver's."""
        return GuardedCursor(self._guard.call(self._connection.cursor, *arguments, **named), self._guard)

    def execute(self, *arguments: Any, **named: Any) -> GuardedCursor:
        """Run a statement on a cursor of its own, as sqlite3 and psycopg do."""
        connection, guard = self._connection, self._guard

        def execute(*arguments: Any, **named: Any) -> Any:
            cursor = connection.cursor()
            cursor.execute(*arguments, **named)
            return cursor

        return GuardedCursor(guard.call(execute, *arguments, **named), guard)

    def executemany(self, *arguments: Any, **named: Any) -> GuardedCursor:
        """Run a statement for many rows on a cursor of its own."""
        cursor = self.cursor()
        cursor.executemany(*arguments, **named)
        return cursor

    def __getattr__(self, name: str) -> Any:
        if name == "transaction" and type(self._connection).__module__.partition(".")[0] == "psycopg":
            self._guard.check()
            return self._nested
        self._refuse_ends(name)
        value = getattr(self._connection, name)
        if name in _CHANGING:
            self._guard.is_changed = True
        return self._guard.wrap(value, self._connection, self) if callable(value) else value

    def __setattr__(self, name: str, value: Any) -> None:
        self._refuse_ends(name)
        if name == "isolation_level":
            raise TransactionStateError("isolation_level cannot change inside a transaction block")
        self._guard.is_changed = True
        setattr(self._connection, name, value)

    def __enter__(self) -> GuardedConnection:
        raise TransactionStateError("'with connection' commits: the transaction block does that")

    def __exit__(self, *_: object) -> None:
        """Never reached: ``__enter__`` refuses."""

    @contextmanager
    def _nested(self, *arguments: Any, **named: Any) -> Iterator[Any]:
        """psycopg's own: inside a transaction it is a savepoint; an error that leaves it has been undone."""
        guard = self._guard
        before = guard.error
        try:
            with self._connection.transaction(*arguments, **named) as nested:
                yield nested
        except BaseException:
            if int(self._connection.info.transaction_status) == _PSYCOPG_IN_TRANSACTION:
                guard.error = before
            raise

    def _refuse_ends(self, name: str) -> None:
        self._guard.check()
        if name in _ENDS_THE_TRANSACTION:
            raise TransactionStateError(f"{name} is not for the body of a transaction block: the block ends it")


def _changes_session(text: str) -> bool:
    """Whether one of the statements in it does; as far as it is looked at."""
    if _CHANGES_SESSION.match(text, 0, _LOOKED_AT_MAX):
        return True
    end = text.find(";", 0, _LOOKED_AT_MAX)
    while end >= 0:
        if _CHANGES_SESSION.match(text, end + 1, _LOOKED_AT_MAX):
            return True
        end = text.find(";", end + 1, _LOOKED_AT_MAX)
    return False


def _behind(error: BaseException) -> Iterator[BaseException]:
    """An error and those that led to it; SQLAlchemy keeps the driver's as ``orig``."""
    todo, seen = [error], set[int]()
    while todo and len(seen) < _ERRORS_MAX:
        one = todo.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            behind = (one.__cause__, one.__context__, getattr(one, "orig", None))
            todo.extend(other for other in behind if isinstance(other, BaseException))


def _here(work: Callable[[], Any]) -> Any:
    return work()


def guarded(connection: Any, guard: Guard) -> GuardedConnection:
    """A transaction's connection for the body of a block."""
    if not isinstance(connection, ThreadConnection):
        return GuardedConnection(connection, guard)
    guard.there = lambda work: connection.call(lambda _: work())
    return GuardedConnection(connection.driver_connection, guard)


def behind_guard(connection: Any) -> Any:
    """The driver's connection of a block's; any other is itself."""
    return (
        object.__getattribute__(connection, "_connection") if isinstance(connection, GuardedConnection) else connection
    )


def in_its_thread(connection: GuardedConnection, work: Callable[[], T]) -> T:
    """Run what uses a block's connection where that may be used."""
    guard: Guard = object.__getattribute__(connection, "_guard")
    return cast("T", guard.there(work))


def tell_of_use(connection: Any, on_use: Callable[[], None]) -> None:
    """Call ``on_use`` before each call of the driver, if the connection is a block's."""
    if isinstance(connection, GuardedConnection):
        guard: Guard = object.__getattribute__(connection, "_guard")
        guard.on_use = on_use


def doom(connection: Any, error: BaseException) -> bool:
    """Let a transaction's block fail, as if a statement had; False if the connection is no block's."""
    if not isinstance(connection, GuardedConnection):
        return False
    guard: Guard = object.__getattribute__(connection, "_guard")
    guard.note(error)
    return True


class Savepoint:
    """A part of a transaction in a database whose statements may fail without dooming the rest: ``tx.savepoint``.

    Begun when made, ended by ``release`` or ``roll_back``. An error that leaves it rolls the part back, and the
    transaction is as sound as it was before it. If a statement failed and the part ends normally, the work of its other
    statements stays, in databases that go on after a failed statement (MySQL, MariaDB, SQLite: it did nothing);
    PostgreSQL does not go on, so that the part is rolled back and that is said by an error.

    Invariant: if the savepoint is gone (a deadlock takes all of them, as a COMMIT by the body does) the block is
    doomed.

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
