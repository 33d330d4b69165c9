"""Statements of the source, run in the target: each once, and in the session of the source, as a replica runs it.

Theory of operation. A statement such as ALTER TABLE ends the transaction that it stands in, so it cannot share one with
the offsets. Before it is run a row says that it begins, and what the definitions of its tables are; after it the row
says that it is done, in one transaction with the offsets of all partitions that have it. If the process dies in
between, the next one compares the definitions: if they are the same as before, the statement was not run, for the
database runs each whole or not at all (a statement that changes no definition may run twice). A RENAME that swaps
tables of one definition renames a mark as well, a table of the applier's own. The session that runs a
statement has a lock of the server: it keeps out whoever comes while a predecessor's statement is still running. It
autocommits; the row and the offsets are written over another one.

The variables of the session are the source's (``enter_session``). Of what an older or another server does not tell, the
target's own default must not decide: ``_UNTOLD`` says what the source then means. A variable that the target does not
have is left out if it says what holds there without it.

Source: MariaDB 10.6 and later, "Atomic DDL"; MySQL 8.0, "Atomic Data Definition Statement Support"; MariaDB,
"Replication and Binary Log System Variables"; MySQL, "Replication and Variables".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final
from zlib import crc32

from txmq.binlog.apply.accepted_events import Accepted
from txmq.binlog.apply.target import LENIENT, TargetTables, as_binlog_error, open_session
from txmq.binlog.decoded_changes import SYSTEM_CLOCK, Ddl, DdlKind, SessionValue, TableName
from txmq.binlog.errors import TargetAwayError, TargetError
from txmq.binlog.event_json import ChangeEvent, read_statement
from txmq.client import DatabaseOffsetStore, OffsetPosition
from txmq.errors import StorageError
from txmq.runtime.crashpoints import crash_point
from txmq.xa.database.dbapi import run
from txmq.xa.database.dialects import MYSQL

_UNTOLD: Final[dict[str, SessionValue]] = {
    "character_set_collations": "",  # MariaDB 11.2 and later
    "default_collation_for_utf8mb4": "utf8mb4_general_ci",  # MySQL 8 and later
}
_WITHOUT: Final[dict[str, SessionValue]] = {
    "character_set_collations": "", "check_constraint_checks": 1, "default_table_encryption": 0, "sql_if_exists": 0,
    "sql_require_primary_key": 0,
}  # fmt: skip
_LOCALE: Final = "en_US"  # of the number 0
_CREATE = (
    f"CREATE TABLE IF NOT EXISTS {{table}} (consumer_group {MYSQL.text} NOT NULL, gtid {MYSQL.text} NOT NULL, "
    "state VARCHAR(8) NOT NULL, statement LONGTEXT CHARACTER SET utf8mb4 NOT NULL, "
    "definitions LONGTEXT CHARACTER SET utf8mb4 NOT NULL, changed_at TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP "
    f"ON UPDATE CURRENT_TIMESTAMP, PRIMARY KEY (consumer_group, gtid)){MYSQL.table_options}"
)
_TABLES_OF = "SELECT table_name FROM information_schema.tables WHERE table_schema = %s ORDER BY table_name"
_COLLATION_OF = "SELECT default_collation_name FROM information_schema.schemata WHERE schema_name = %s"
_CREATES = re.compile(r"\s*CREATE\s+(?:DATABASE|SCHEMA)\b", re.IGNORECASE)
_LOCK_S = 60
_NO_TABLE, _NO_DATABASE = 1146, 1049
_COUNTER = re.compile(r" AUTO_INCREMENT=\d+")
BEGUN, DONE, SKIPPED = "begun", "done", "skipped"


# --- the session of the source ----------------------------------------------------------------------------------------


class OtherSessionError(Exception):
    """The target cannot have the source's session."""


def enter_session(connection: Any, session: Mapping[str, SessionValue]) -> None:
    """Set the variables of the source's session; those that the connection has as they are stay untouched.

    Raises:
        OtherSessionError: the target has no such variable, or its machine another time zone.
        Exception: the driver's own.
    """
    wanted = dict(session)
    clock = wanted.pop("system_clock", None)
    if clock is not None and clock != (found := _text(run(connection, SYSTEM_CLOCK)[0][0][0])):
        raise OtherSessionError(
            f"it was run in the time zone SYSTEM, whose clock says {clock}, and {found} in the target: give both "
            "servers one default_time_zone"
        )
    names = sorted({*wanted, *_UNTOLD})
    place = ", ".join(["%s"] * len(names))
    shown = run(connection, f"SHOW SESSION VARIABLES WHERE variable_name IN ({place})", names)[0]
    held = {_text(name): _text(value) for name, value in shown}
    for name in names:
        value = wanted.get(name, _UNTOLD.get(name))
        if name not in held:
            if name in wanted and value != _WITHOUT.get(name):
                raise OtherSessionError(f"it was run with {name} = {value}, which the target does not have")
        elif held[name] not in _shown(name, value):
            run(connection, f"SET SESSION {name} = %s", (value,))


def _shown(name: str, value: SessionValue | None) -> tuple[str, ...]:
    """How the server shows a value."""
    if name == "timestamp":
        return ()
    if name == "lc_time_names" and value == 0:
        return (_LOCALE,)
    return (str(value), "ON") if value == 1 else (str(value), "OFF") if value == 0 else (str(value),)


# --- statements -------------------------------------------------------------------------------------------------------


class TargetStatements:
    """See the module's docstring. One call of ``run_once`` at a time; ``running`` and ``look`` for any thread.

    Args:
        patient: makes a connection whose answers may take however long.
        database: where the table of statements is.
        skipped: ids of transactions whose statements are not run.
        accepted: says whose tables a statement may touch.
    """

    def __init__(
        self, connect: Callable[[], Any], patient: Callable[[], Any], tables: TargetTables, store: DatabaseOffsetStore,
        group: str, database: str, skipped: Collection[str], accepted: Accepted,
    ) -> None:  # fmt: skip
        self._connect, self._tables, self._store, self._group = connect, tables, store, group
        self._patient, self._accepted = patient, accepted
        self.running: set[str] = set()  # transactions whose statements are being run
        self._table, self._database, self._skipped = f"{database}.txmq_binlog_ddl", database, skipped
        mark = f"txmq_rename_{crc32(group.encode()):08x}"
        self._marks = TableName(database, mark), TableName(database, f"{mark}_run")

    def install(self) -> None:
        """Create the database and the tables that the applier keeps its state in, if they are missing.

        Raises:
            TargetAwayError, TargetError: the target cannot be reached, or refuses.
        """
        with self._session(self._connect) as connection:
            try:
                run(connection, f"CREATE DATABASE IF NOT EXISTS {self._database}")
                run(connection, _CREATE.format(table=self._table))
            except Exception as error:
                raise as_binlog_error(error) from error
        try:
            self._store.install()
        except StorageError as error:
            raise as_binlog_error(error.__cause__ or error) from error

    def run_once(self, event: ChangeEvent, positions: Sequence[OffsetPosition]) -> None:
        """Run a statement, unless it was, and save the offsets after it.

        Args:
            positions: after the statement's message, of every partition that has it.

        Raises:
            TargetError: the target refuses the statement, or it cannot be run there as it stands.
            FencedError: a partition is another process's.
            TargetAwayError: try it again.
        """
        one = _Statement(str(event.source["gtid"]), read_statement(event), event.fields["topics"])
        self.running.add(one.gtid)
        try:
            with self._session(self._connect) as connection, self._session(self._patient) as running:
                running.autocommit(True)
                self._lock(running)
                self._run_once(connection, running, one, positions)
        except Exception as error:
            raise as_binlog_error(error) from error
        finally:
            self.running.discard(one.gtid)
        self._tables.forget()

    def look(self) -> None:
        """Find out whether the target still answers, while it may be running a statement for hours.

        Raises:
            TargetAwayError: it does not.
        """
        with self._session(self._connect):
            pass

    def _run_once(
        self, connection: Any, running: Any, one: _Statement, positions: Sequence[OffsetPosition]
    ) -> None:  # fmt: skip
        """Note it over one connection, and run it over another, whose session becomes the source's."""
        gtid, sql = one.gtid, one.ddl.statement
        tables, is_swap = [self._tables.name(table) for table in one.ddl.tables], one.is_swap
        if is_swap:
            self._lay_mark(connection, gtid)
            tables += self._marks
            sql = f"{sql.rstrip().rstrip(';')}\n, {_quoted(self._marks[0])} TO {_quoted(self._marks[1])}"
        definitions = "\n".join(self._definition(connection, name) for name in tables)
        state, before = self._begun(connection, gtid, sql, definitions, positions)
        if gtid in self._skipped:
            state = SKIPPED
        elif before == definitions:
            self._require_runnable(one)
            if one.ddl.kind is DdlKind.DATABASE:
                self._require_tables(running, one)
            self._run(running, one, sql)
            crash_point("binlog.ddl.run")
            state = DONE
        for position in positions:
            self._store.save_in(connection, self._group, position, None, most=position.offset - 1)
        statement = f"UPDATE {self._table} SET state = %s WHERE consumer_group = %s AND gtid = %s"  # noqa: S608 - settings
        run(connection, statement, (DONE if state == BEGUN else state, self._group, gtid))
        connection.commit()
        crash_point("binlog.ddl.noted")
        if is_swap:
            run(connection, f"DROP TABLE IF EXISTS {', '.join(map(_quoted, self._marks))}")

    def _lay_mark(self, connection: Any, gtid: str) -> None:
        """For a statement that has not begun: the mark under its first name."""
        begun = f"SELECT 1 FROM {self._table} WHERE consumer_group = %s AND gtid = %s"  # noqa: S608 - settings
        if not run(connection, begun, (self._group, gtid))[0]:
            run(connection, f"DROP TABLE IF EXISTS {', '.join(map(_quoted, self._marks))}")
            run(connection, f"CREATE TABLE {_quoted(self._marks[0])} (id INT)")
            crash_point("binlog.ddl.marked")

    @contextmanager
    def _session(self, connect: Callable[[], Any]) -> Iterator[Any]:
        connection = open_session(connect, LENIENT)
        try:
            yield connection
        finally:
            with suppress(Exception):  # the offset store has closed it, if it refused an offset
                connection.close()

    def _lock(self, connection: Any) -> None:
        ((is_mine,),) = run(connection, "SELECT GET_LOCK(%s, %s)", (f"txmq-{self._group}"[:64], _LOCK_S))[0]
        if is_mine != 1:
            raise TargetAwayError("another process of the group is running a statement in the target")

    def _begun(
        self, connection: Any, gtid: str, sql: str, definitions: str, positions: Sequence[OffsetPosition]
    ) -> tuple[str, str]:
        """Note that a statement begins; its state, and its tables' definitions when it began first."""
        for position in positions:  # fences: a process that has lost a partition runs nothing
            at = position._replace(offset=position.offset - 1)
            self._store.save_in(connection, self._group, at, None, most=at.offset)
        run(
            connection,
            f"INSERT INTO {self._table} (consumer_group, gtid, state, statement, definitions) "  # noqa: S608 - settings
            "VALUES (%s, %s, %s, %s, %s) ON DUPLICATE KEY UPDATE state = state",
            (self._group, gtid, BEGUN, sql, definitions),
        )
        where = "WHERE consumer_group = %s AND gtid = %s"
        look = f"SELECT state, definitions, statement FROM {self._table} {where}"  # noqa: S608 - settings
        ((state, before, begun),) = run(connection, look, (self._group, gtid))[0]
        if _text(begun) != sql and gtid not in self._skipped:
            raise TargetError(
                f"transaction {gtid} has two statements, {_text(begun)[:200]!r} and {sql[:200]!r}: somebody else than "
                f"the reader has written one of them. To pass over this one, start again with --skip-ddl {gtid}"
            )
        connection.commit()
        crash_point("binlog.ddl.begun")
        return str(state), str(before)

    def _definition(self, connection: Any, name: TableName) -> str:
        if not name.name:
            found = run(connection, "SHOW DATABASES LIKE %s", (name.database,))[0]
            return f"{name.database}: {len(found)}"
        try:
            ((_, text, *_rest),) = run(connection, f"SHOW CREATE TABLE {_quoted(name)}")[0]
        except Exception as error:
            if error.args[:1] in ((_NO_TABLE,), (_NO_DATABASE,)):
                return f"{name}: none"
            raise
        return f"{name}: {_COUNTER.sub('', str(text))}"

    def _require_runnable(self, one: _Statement) -> None:
        ddl = one.ddl
        if ddl.kind is DdlKind.SWAP:
            raise one.not_run("an online-alter tool has put another table in the place of the table")
        for database in {table.database for table in ddl.tables} | {ddl.database}:
            if database and self._tables.database(database) != database and (
                ddl.kind is DdlKind.DATABASE
                or re.search(rf"(?<![\w$`])`?{re.escape(database)}`?\s*\.", ddl.statement)
            ):  # fmt: skip
                called = self._tables.database(database)
                raise one.not_run(f"it names the database {database}, which is {called} in the target")

    def _require_tables(self, connection: Any, one: _Statement) -> None:
        """What drops or alters a database concerns the tables that are there: their topics have it."""
        if _CREATES.match(one.ddl.statement):
            return
        for of in one.ddl.tables:
            rows = run(connection, _TABLES_OF, (self._tables.database(of.database),))[0]
            found = [TableName(of.database, _text(name)) for (name,) in rows]
            foreign = self._accepted.foreign(found, one.topics)
            if foreign is not None:
                raise one.not_run(f"{foreign} is there, whose topic does not have it")

    def _run(self, connection: Any, one: _Statement, sql: str) -> None:
        ddl = one.ddl
        database = self._tables.database(ddl.database) if ddl.database else ""
        try:
            if ddl.kind is DdlKind.CREATE:
                self._make_databases(connection, one)
            if database and ddl.kind is not DdlKind.DATABASE:
                connection.select_db(database)
            enter_session(connection, ddl.session)
            run(connection, sql)
        except TargetError:
            raise
        except OtherSessionError as error:
            raise one.not_run(str(error)) from error
        except Exception as error:
            if MYSQL.may_pass(error):
                raise
            raise one.not_run(str(error)) from error

    def _make_databases(self, connection: Any, one: _Statement) -> None:
        """Those that are missing; a new table has from its database what its own statement leaves open."""
        wanted = one.ddl.collation
        collate = f" COLLATE {wanted}" if wanted else ""
        for table in one.ddl.changed:
            name = self._tables.name(table).database
            run(connection, f"CREATE DATABASE IF NOT EXISTS {_quoted_name(name)}{collate}")
        name = self._tables.name(one.ddl.changed[0]).database
        ((found,),) = run(connection, _COLLATION_OF, (name,))[0]
        if wanted and _text(found) != wanted:
            raise one.not_run(
                f"the database {name} has the collation {_text(found)}, and {wanted} at the source: "
                f"ALTER DATABASE {_quoted_name(name)} COLLATE {wanted}"
            )


@dataclass(frozen=True, slots=True)
class _Statement:
    """A statement of a transaction, and the topics that have it."""

    gtid: str
    ddl: Ddl
    topics: Mapping[str, int]

    @property
    def is_swap(self) -> bool:
        """Whether it is a RENAME after which there are the same names as before."""
        moved = self.ddl.moved
        return self.ddl.kind is DdlKind.RENAME and {old for old, _ in moved} == {new for _, new in moved}

    def not_run(self, why: str) -> TargetError:
        """What says why it cannot be run, and what to do."""
        return TargetError(
            f"the statement of transaction {self.gtid} cannot be run in the target: {why}: {self.ddl.statement[:200]}. "
            f"Give the target's table the form that the source's has, and start again with --skip-ddl {self.gtid}"
        )


def _text(value: Any) -> str:
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


def _quoted(table: TableName) -> str:
    return f"{_quoted_name(table.database)}.{_quoted_name(table.name)}"


def _quoted_name(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
