"""txmq's tables in a database: markers, one row per last-resource transaction, which is its outcome; identity; tokens.

Theory of operation. The owner inserts ``(txid, 'committed')`` inside the application's transaction; the database's
COMMIT makes rows and marker durable together. A resolver inserts ``(txid, 'rolled-back')`` in a transaction of its own
first: the primary key lets exactly one of the two in. If that insert is acknowledged, the owner's cannot come in any
more: rolled back, for good. If it meets the owner's row, that one is read in a new transaction which also writes to it
and commits, so that it is durable before it is reported.

Tables::

    <table>          txid (primary key), outcome ('committed' | 'rolled-back'), deadline_ms, written_ms, seen (grows
                     with each look; before, in the owner's row, the number of its session, by which a resolver ends it
                     while the row is uncommitted); in MySQL and MariaDB also uuid, a foreign key of the identity's, or
                     NULL
    <table>_identity id (always 1), name, uuid, cluster (empty until a client was there)
    <table>_token    the fencing tokens, one row for each home of the broker's cluster: home (16 hex digits, primary
                     key), accepted (the newest that is known to be accepted there; empty: none is), drawn (after that
                     one)

In MySQL and MariaDB a marker refers to the database's identity by a foreign key, so that one of another identity does
not get in (``insert_committed_or_fail``). It needs no query: InnoDB looks the key up in the index. Tables that an older
txmq has made, or a user who may not refer to a table, have none; then the INSERT reads the identity, as elsewhere.

Invariants:
    * a rolled-back row keeps the owner's out of this database, and proves a rollback only under the newest fencing
      token (``xa/fencing.py``);
    * an outcome that is committed never changes; only the marker sweep deletes a row (``marker_sweep.py``);
    * the owner's row gets in only if the identity is the expected one, and before the deadline on the database's clock;
      both are conditions of the INSERT itself, or the foreign key is (``insert_committed_or_fail``);
    * rows are deleted by their keys, at most EXPIRED_SIZE at once: writers of other rows do not wait for it;
    * methods with "own transaction" in their docstring commit before they return, or raise and leave nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final, NamedTuple

from txmq.errors import ConfigError
from txmq.model import is_valid_table
from txmq.runtime.logging import get_logger
from txmq.xa.database.dbapi import Connection, driver_of, is_error, is_integrity_error, run, text
from txmq.xa.database.dialects import Dialect, dialect_for, placeholder_of, server_began_ms
from txmq.xa.database.mysql_server import Statement
from txmq.xa.database.sqlite_file import QueuePlace

COMMITTED, ROLLED_BACK = "committed", "rolled-back"
ROLLED_BACK_KEPT_MS = 24 * 3600 * 1000  # after the deadline: longer than any delayed COMMIT lives
EXPIRED_SIZE = 500  # rows in one DELETE
_LITERAL = re.compile(r"[0-9A-Za-z._-]{1,220}\Z")
_SEEN_SIZE: Final = 500  # markers that are looked at in one statement
_KEY = re.compile(r"FOREIGN KEY \(`uuid`\) REFERENCES [^ ]*_identity` \(`uuid`\)")


@dataclass(frozen=True, slots=True)
class DatabaseIdentity:
    """A database's identity. ``uuid`` is 32 hex digits; ``cluster`` the broker's 16, or empty before the first
    client."""

    name: str
    uuid: str
    cluster: str


def _require_literals(txid: str, uuid: str) -> None:
    """Make sure that both may stand between quotes in SQL.

    Raises:
        ValueError: txid or uuid are not what they are called.
    """
    if not (_LITERAL.match(txid) and _LITERAL.match(uuid)):
        raise ValueError(f"not to be written into SQL: {txid[:80]!r}, {uuid[:80]!r}")


@contextmanager
def own_transaction(connection: Connection, dialect: Dialect, place: QueuePlace | None = None) -> Iterator[None]:
    """A transaction of txmq's own: committed at the end, rolled back on any exception."""
    lease = None
    if place is not None:
        lease = place.begin(connection, dialect.begin)
    elif dialect.begin:
        run(connection, dialect.begin)
    try:
        for statement in dialect.settings:
            run(connection, statement)
        yield
        connection.commit()
    except BaseException:
        with suppress(Exception):
            connection.rollback()
        raise
    finally:
        if lease is not None:
            lease.release()


@contextmanager
def reading(connection: Connection, dialect: Dialect) -> Iterator[None]:
    """Read outside any transaction: no lock is waited for, and none is left."""
    try:
        for statement in dialect.settings:
            run(connection, statement)
        yield
    finally:
        # Drivers that begin by themselves have begun one. If this fails, the connection is lost: the next statement
        # says so.
        with suppress(Exception):
            connection.rollback()


class MarkerTable:
    """The statements on one database's tables. Has no connection of its own and keeps no state.

    Args:
        is_weak: a commit that may be lost is accepted.

    Attributes:
        name: with its schema, once it is ``qualified``: what a body chooses by USE does not matter then.
        given_name: as it was given.
        mark: how the driver writes a parameter.
        place: in the queue of the writers to an SQLite file; None for any other database.
        has_key: the server keeps markers of another identity out (``create_tables``).
    """

    def __init__(self, table: str, dialect: Dialect, placeholder: str, *, is_weak: bool = False) -> None:
        if not is_valid_table(table):
            raise ConfigError(f"table={table[:80]!r}: expected letters, digits and '_', at most 48, or schema.table")
        self.dialect, self.given_name, self.mark = dialect, table, placeholder
        self.place: QueuePlace | None = None
        self.has_key = False
        self._is_weak = is_weak
        self._name(table)

    def _name(self, table: str) -> None:
        dialect, self.name = self.dialect, table
        self._delete = dialect.delete.format(table=table)
        conditions = (dialect.forces_commit if not self._is_weak else "", dialect.ends_idle)
        also = "".join(f" AND {condition}" for condition in conditions if condition)
        self._insert_committed = self._written(
            f"INSERT INTO {table} (txid, outcome, deadline_ms, written_ms, seen) "  # noqa: S608
            f"SELECT ?, '{COMMITTED}', ?, {dialect.now_ms}, {dialect.session_number} FROM {table}_identity "
            f"WHERE id = 1 AND uuid = ? AND {dialect.now_ms} < ?{also}"
        )

    @classmethod
    def on(
        cls, connection: Connection, table: str, dialect_name: str | None, *, is_weak: bool = False
    ) -> MarkerTable:  # fmt: skip
        """The tables as seen through a connection's driver."""
        driver = driver_of(connection)
        dialect = dialect_for(driver, dialect_name)
        return cls(table, dialect, placeholder_of(driver, dialect), is_weak=is_weak)

    def qualify(self, connection: Connection) -> None:
        """Name the tables together with the schema in which this connection finds them. Outside any transaction."""
        d = self.dialect
        if "." in self.name or not d.schema_of:
            return
        ((found,),) = self._read(connection, f"SELECT {d.schema_of}", (self.name,))
        schema = "" if found is None else text(found)
        if schema and d.quote not in schema and "%" not in schema and "?" not in schema:  # they mark parameters
            self._name(f"{d.quote}{schema}{d.quote}.{self.name}")

    @contextmanager
    def beginning_with(self, settings: tuple[str, ...]) -> Iterator[None]:
        """Own transactions begin with these settings (``Dialect.settings``) within the block."""
        before, self.dialect = self.dialect, replace(self.dialect, settings=settings)
        try:
            yield
        finally:
            self.dialect = before

    def is_there(self, connection: Connection) -> bool:
        """Whether all tables can be read. False if one is missing, or if the user may not read it."""
        try:
            for table in (self.name, f"{self.name}_identity", f"{self.name}_token"):
                self._read(connection, f"SELECT 1 FROM {table} WHERE 1 = 0")  # noqa: S608
        except Exception as error:
            if not is_error(error):
                raise
            return False
        return True

    def probe(self, connection: Connection) -> None:
        """Try the statements that resolving needs, without effect. Own transaction, rolled back.

        Raises:
            the driver's error: a privilege is missing, or the database is read-only.
        """
        if not self.dialect.has_privileges:
            return
        try:
            self._run(
                connection,
                f"INSERT INTO {self.name} (txid, outcome, deadline_ms, written_ms, seen) "  # noqa: S608
                f"SELECT name, uuid, 0, 0, 0 FROM {self.name}_identity WHERE 1 = 0",
            )
            self._run(connection, f"UPDATE {self.name} SET seen = seen + 1 WHERE 1 = 0")  # noqa: S608
            self._run(connection, f"{self._delete} WHERE 1 = 0")
            columns, tokens = "home, accepted, drawn", f"{self.name}_token"
            self._run(connection, f"INSERT INTO {tokens} ({columns}) SELECT {columns} FROM {tokens} WHERE 1 = 0")  # noqa: S608
            self._run(connection, f"UPDATE {tokens} SET drawn = '' WHERE 1 = 0")  # noqa: S608
        finally:
            with suppress(Exception):
                connection.rollback()

    def tables_without_rollback(self, connection: Connection, *, two_phase: bool) -> list[tuple[str, str]]:
        """Tables whose engine cannot roll back (or prepare), in every schema: ``schema.table``, engine."""
        statement = self.dialect.engines_two_phase if two_phase else self.dialect.engines
        if not statement:
            return []
        return [(text(name), text(engine)) for name, engine in self._read(connection, statement)]

    def put_identity(self, connection: Connection, identity: DatabaseIdentity) -> None:
        """Store which database this is. Own transaction.

        Raises:
            the driver's IntegrityError: it is stored already.
        """
        with own_transaction(connection, self.dialect):
            self._run(
                connection,
                f"INSERT INTO {self.name}_identity (id, name, uuid, cluster) VALUES (1, ?, ?, ?)",  # noqa: S608
                (identity.name, identity.uuid, identity.cluster),
            )

    def bind_cluster(self, connection: Connection, cluster: str) -> None:
        """Store the cluster if none is stored yet. Own transaction."""
        with own_transaction(connection, self.dialect):
            self._run(
                connection,
                f"UPDATE {self.name}_identity SET cluster = ? WHERE id = 1 AND cluster = ''",  # noqa: S608
                (cluster,),
            )

    def identity(self, connection: Connection) -> DatabaseIdentity | None:
        """This database's identity; None if none was put.

        Raises:
            the driver's error: the table is missing.
        """
        rows = self._read(connection, f"SELECT name, uuid, cluster FROM {self.name}_identity WHERE id = 1")  # noqa: S608
        return DatabaseIdentity(*map(text, rows[0])) if rows else None

    def now_ms(self, connection: Connection) -> int:
        """The database's clock."""
        ((now_ms,),) = self._read(connection, f"SELECT {self.dialect.now_ms}")
        return int(now_ms)

    def insert_committed(self, connection: Connection, txid: str, uuid: str, deadline_ms: int) -> bool:
        """The owner's row, in the transaction that is open.

        Args:
            deadline_ms: on the database's clock.

        Returns:
            False if nothing was inserted: the database is not ``uuid`` (``is_expected``), or the deadline has passed.

        Raises:
            the driver's IntegrityError: a resolver has resolved the transaction before.
        """
        parameters = [txid, deadline_ms, uuid, deadline_ms]
        _, count = run(
            connection, self._insert_committed, [*parameters, deadline_ms] if self.dialect.ends_idle else parameters
        )
        return count == 1

    def insert_committed_statement(self, txid: str, uuid: str, deadline_ms: int) -> str:
        """The same row as SQL without parameters, to be sent together with other statements.

        Raises:
            ValueError: txid or uuid are not what they are called.
        """
        _require_literals(txid, uuid)
        now = self.dialect.now_ms
        return (
            f"INSERT INTO {self.name} (txid, outcome, deadline_ms, written_ms, seen) "  # noqa: S608
            f"SELECT '{txid}', '{COMMITTED}', {int(deadline_ms)}, {now}, {self.dialect.session_number} "
            f"FROM {self.name}_identity "
            f"WHERE id = 1 AND uuid = '{uuid}' AND {now} < {int(deadline_ms)}"
        )

    def insert_committed_or_fail(self, txid: str, uuid: str, deadline_ms: int) -> Statement:
        """The owner's row as SQL that fails unless it gets in: what is sent after it is not done then.

        Only with ``has_key``. After an error of ``KEPT_OUT``, ``insert_committed`` tells why, or gets it in.
        One query less than a condition that reads the identity, which is the half of this statement's cost.

        Raises:
            ValueError: txid or uuid are not what they are called.
        """
        _require_literals(txid, uuid)
        return Statement(
            f"INSERT INTO {self.name} (txid, outcome, deadline_ms, written_ms, seen, uuid) VALUES (%s, "  # noqa: S608
            f"IF(@@foreign_key_checks AND @@timestamp * 1000 < %s, '{COMMITTED}', NULL), "
            f"%s, @@timestamp * 1000, 0, '{uuid}')",
            (f"'{txid}'", str(deadline_ms), str(deadline_ms)),
        )

    def is_expected(self, connection: Connection, uuid: str) -> bool:
        """Whether this is the database ``uuid``. In the transaction that is open."""
        identity = f"SELECT 1 FROM {self.name}_identity WHERE id = 1 AND uuid = ?"  # noqa: S608
        return bool(self._run(connection, identity, (uuid,))[0])

    def outcome_of(self, connection: Connection, txid: str) -> str | None:
        """The outcome that stands in the row of ``txid``, committed or not by the broker; None without a row."""
        rows = self._read(connection, f"SELECT outcome FROM {self.name} WHERE txid = ?", (txid,))  # noqa: S608
        return text(rows[0][0]) if rows else None

    def touch(self, connection: Connection) -> None:
        """Commit a small write, so that earlier work is durable, too. Own transaction; MySQL and MariaDB."""
        now = self.dialect.now_ms
        with own_transaction(connection, self.dialect):
            self._run(
                connection,
                f"INSERT INTO {self.name} (txid, outcome, deadline_ms, written_ms, seen) "  # noqa: S608
                f"VALUES ('-', 'touch', 0, {now}, 0) ON DUPLICATE KEY UPDATE seen = seen + 1",
            )

    def insert_rolled_back(
        self, connection: Connection, txid: str, uuid: str, deadline_ms: int, *, waits: bool = True
    ) -> bool:
        """A resolver's row. Own transaction: when this returns True, the owner's does not get into this database.

        Args:
            waits: for a row that somebody holds.

        Returns:
            False if the database is not ``uuid``: nothing was inserted, nothing is known.

        Raises:
            the driver's IntegrityError: there is a row; read it.
        """
        with own_transaction(connection, self.dialect, self.place):
            if self.dialect.waits_briefly and not waits:
                self._run(connection, self.dialect.waits_briefly)
            _, count = self._run(
                connection,
                f"INSERT INTO {self.name} (txid, outcome, deadline_ms, written_ms, seen) "  # noqa: S608
                f"SELECT ?, '{ROLLED_BACK}', ?, {self.dialect.now_ms}, 0 FROM {self.name}_identity "
                "WHERE id = 1 AND uuid = ?",
                (txid, deadline_ms, uuid),
            )
        return count == 1

    def read_durably(self, connection: Connection, txid: str) -> str | None:
        """The outcome of a row, made durable by a write of our own to it. Own transaction.

        Returns:
            The word that stands in it, or None if the row has gone.
        """
        with own_transaction(connection, self.dialect, self.place):
            _, count = self._run(
                connection,
                f"UPDATE {self.name} SET seen = seen + 1 WHERE txid = ?",  # noqa: S608
                (txid,),
            )
            rows, _ = self._run(connection, f"SELECT outcome FROM {self.name} WHERE txid = ?", (txid,))  # noqa: S608
        return text(rows[0][0]) if rows and count == 1 else None

    def require_free(self, connection: Connection, txid: str) -> None:
        """Make sure, without a wait, that no open transaction holds the row of ``txid``, if it can be asked.

        Raises:
            Exception: the driver's error, of which the dialect says ``is_held``.
        """
        if self.dialect.held:
            self._read(connection, f"SELECT 1 FROM {self.name} WHERE txid = ?{self.dialect.held}", (txid,))  # noqa: S608

    def end_holder(self, connection: Connection, txid: str) -> int | None:
        """End the session that has written the row of ``txid``, and not committed it. Outside any transaction.

        A row that is older than the server is of a session that is gone: the server is rolling it back, and has given
        its number to another one. One of the second in which the server began may be such a row, and is left to the
        server's own limit for idle transactions.

        Returns:
            Its number; None if there is no such row, or the server ends such a session by itself.

        Raises:
            the driver's error: the user may not.
        """
        if not self.dialect.end_session:
            return None
        run(connection, "SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED")
        row = f"SELECT seen, written_ms FROM {self.name} WHERE txid = ?"  # noqa: S608
        rows = self._read(connection, row, (txid,))
        number, written_ms = (int(rows[0][0]), int(rows[0][1])) if rows else (0, 0)
        if not number or self.outcome_of(connection, txid) is not None:  # committed: others have looked at it
            return None
        if written_ms < server_began_ms(connection):
            return None
        run(connection, f"{self.dialect.end_session} {number}")
        return number

    def wait_for_lock(self, connection: Connection, txid: str) -> None:
        """Wait until no transaction holds the row of ``txid``, if there is one.

        Raises:
            Exception: the driver's error for a lock that was waited for in vain.
        """
        self._read(connection, f"SELECT 1 FROM {self.name} WHERE txid = ? FOR UPDATE", (txid,))  # noqa: S608

    def committed_before(self, connection: Connection, age_ms: int, after: str, limit: int) -> list[str]:
        """Transaction ids of committed rows older than ``age_ms`` and after ``after``, in order."""
        rows = self._read(
            connection,
            f"SELECT txid FROM {self.name} WHERE outcome = '{COMMITTED}' AND txid > ? "  # noqa: S608
            f"AND written_ms < {self.dialect.now_ms} - ? ORDER BY txid LIMIT {int(limit)}",
            (after, age_ms),
        )
        return [text(txid) for (txid,) in rows]

    def delete_committed(self, connection: Connection, txids: Sequence[str]) -> None:
        """Remove committed rows. Own transaction. The broker's ``commit`` of each must be durable."""
        if not txids:
            return
        marks = ", ".join("?" * len(txids))
        with own_transaction(connection, self.dialect, self.place):
            self._run(
                connection,
                f"{self._delete} WHERE outcome = '{COMMITTED}' AND txid IN ({marks})",
                txids,
            )

    def delete_expired_rolled_back(self, connection: Connection) -> int:
        """Remove rolled-back rows 24 h after their deadline (and 24 h old), some at a time. Own transaction."""
        limit = f"{self.dialect.now_ms} - {ROLLED_BACK_KEPT_MS}"
        # Looked for first, without locks: a DELETE by anything but the key would wait for every open transaction.
        expired = self._read(
            connection,
            f"SELECT txid FROM {self.name} WHERE outcome = '{ROLLED_BACK}' "  # noqa: S608
            f"AND deadline_ms < {limit} AND written_ms < {limit} LIMIT {EXPIRED_SIZE}",
        )
        if not expired:
            return 0
        marks = ", ".join("?" * len(expired))
        with own_transaction(connection, self.dialect):
            _, count = self._run(
                connection,
                f"{self._delete} WHERE outcome = '{ROLLED_BACK}' AND txid IN ({marks})",
                [text(txid) for (txid,) in expired],
            )
        return count

    def _read(self, connection: Connection, operation: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with reading(connection, self.dialect):
            return self._run(connection, operation, parameters)[0]

    def _run(
        self, connection: Connection, operation: str, parameters: Sequence[Any] = ()
    ) -> tuple[list[tuple[Any, ...]], int]:
        return run(connection, self._written(operation), parameters)

    def _written(self, operation: str) -> str:
        """As the driver wants its parameters marked."""
        return operation if self.mark == "?" else operation.replace("?", self.mark)


class TokenRow(NamedTuple):
    """What stands in the row of a home: the token that is known to be accepted, and the one drawn after it."""

    accepted: str = ""
    drawn: str = ""


class _MovedError(Exception):
    """Another resolver was faster."""


class TokenTable:
    """The statements on the fencing tokens (laws: ``xa/fencing.py``). Has no connection of its own and keeps no state.

    Args:
        markers: the table that it goes with.
    """

    def __init__(self, markers: MarkerTable) -> None:
        self._markers, self._name, self._mark = markers, f"{markers.name}_token", markers.mark

    def statement(self) -> str:
        """What creates it if it is missing."""
        d = self._markers.dialect
        columns = f"home {d.text} NOT NULL PRIMARY KEY, accepted {d.text} NOT NULL, drawn {d.text} NOT NULL"
        return f"CREATE TABLE IF NOT EXISTS {self._name} ({columns}){d.table_options}"

    def row(self, connection: Connection, home: str) -> TokenRow:
        """The tokens of a home; empty ones if none was drawn. Outside any transaction.

        Raises:
            the driver's error: the table is missing.
        """
        with reading(connection, self._markers.dialect):
            statement = f"SELECT accepted, drawn FROM {self._name} WHERE home = {self._mark}"  # noqa: S608
            rows, _ = run(connection, statement, (home,))
        return TokenRow(*map(text, rows[0])) if rows else TokenRow()

    def draw(
        self, connection: Connection, home: str, before: TokenRow, after: TokenRow, rolled_back: Sequence[str] = ()
    ) -> bool:
        """Put other tokens in the place of ``before``. Own transaction.

        Args:
            rolled_back: transactions whose rolled-back markers this one sees.

        Returns:
            False if others stand there, nothing was done.

        Raises:
            ConfigError: it does not see such a marker: another database answers than a moment ago.
        """
        try:
            with own_transaction(connection, self._markers.dialect, self._markers.place):
                self._replace(connection, home, before, after)
                self._require(connection, rolled_back)
        except _MovedError:
            return False
        except Exception as error:
            if before == TokenRow() and is_integrity_error(error):
                return False
            raise
        return True

    def _replace(self, connection: Connection, home: str, before: TokenRow, after: TokenRow) -> None:
        m, name = self._mark, self._name
        if before == TokenRow():
            run(connection, f"INSERT INTO {name} (home, accepted, drawn) VALUES ({m}, {m}, {m})", (home, *after))  # noqa: S608
            return
        statement = (
            f"UPDATE {name} SET accepted = {m}, drawn = {m} "  # noqa: S608
            f"WHERE home = {m} AND accepted = {m} AND drawn = {m}"
        )
        _, count = run(connection, statement, (*after, home, *before))
        if count != 1:
            raise _MovedError

    def _require(self, connection: Connection, rolled_back: Sequence[str]) -> None:
        left = iter(rolled_back)
        while some := list(islice(left, _SEEN_SIZE)):
            marks = ", ".join([self._mark] * len(some))
            where = f"outcome = '{ROLLED_BACK}' AND txid IN ({marks})"
            ((count,),), _ = run(connection, f"SELECT COUNT(*) FROM {self._markers.name} WHERE {where}", some)  # noqa: S608
            if int(count) != len(some):
                raise ConfigError("another database answers than a moment ago: rolled-back markers are not there")


def statements(table: MarkerTable) -> list[str]:
    """What creates the missing tables, in this order; the markers come last."""
    d, name = table.dialect, table.name
    identity = f"id {d.number} NOT NULL PRIMARY KEY, name {d.text} NOT NULL, uuid {d.text} NOT NULL, "
    identity += f"cluster {d.text} NOT NULL{d.identity_key}"
    return [
        f"CREATE TABLE IF NOT EXISTS {name}_identity ({identity}){d.table_options}",
        TokenTable(table).statement(),
        _markers(table, d.marker_key.format(table=name)),
    ]


def _markers(table: MarkerTable, key: str) -> str:
    d = table.dialect
    columns = f"txid {d.text} NOT NULL PRIMARY KEY, outcome {d.text} NOT NULL, deadline_ms {d.number} NOT NULL, "
    columns += f"written_ms {d.number} NOT NULL, seen {d.number} NOT NULL"
    return f"CREATE TABLE IF NOT EXISTS {table.name} ({columns}{key}){d.table_options}"


def create_tables(connection: Connection, table: MarkerTable) -> None:
    """Create missing tables. Databases commit that by themselves, or here."""
    *others, markers = statements(table)
    with own_transaction(connection, table.dialect):
        for statement in others:
            run(connection, statement)
        try:
            run(connection, markers)
        except Exception as error:
            if not (is_error(error) and table.dialect.marker_key):
                raise
            get_logger(table=table.name).warning("markers without their foreign key are slower", error=str(error))
            run(connection, _markers(table, ""))


def look_for_key(connection: Connection, table: MarkerTable) -> None:
    """See whether the markers have their foreign key. Outside any transaction."""
    if not table.dialect.marker_key:
        return
    try:
        ((_, definition),) = run(connection, f"SHOW CREATE TABLE {table.name}")[0]
        table.has_key = _KEY.search(text(definition)) is not None
    finally:
        with suppress(Exception):  # if this fails, the connection is lost: the next statement says so
            connection.rollback()
