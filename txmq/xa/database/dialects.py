"""Differences of databases: how a transaction begins, the clock, placeholders, durability, table options.

A ``Dialect`` is a value; ``dialect_for`` chooses it by the driver of the connection, or by name. If a difference takes
more than a piece of SQL (may a transaction begin here, is durability weak) it is a function of each dialect.

Sources: SQLite, "Transaction", "PRAGMA synchronous"; MariaDB, "SET TRANSACTION", "innodb_flush_log_at_trx_commit";
PostgreSQL 15, section 20.5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from txmq.errors import ConfigError
from txmq.xa.database.dbapi import Connection, run, text

_PLACEHOLDERS = {"qmark": "?", "format": "%s", "pyformat": "%s"}
_MYSQL_DRIVERS = ("MySQLdb", "pymysql", "mysql", "mariadb", "aiomysql", "asyncmy")
_POSTGRESQL_DRIVERS = ("psycopg", "pg8000", "asyncpg")
# Gone away, lost, lost in a read, ended for being idle, killed, server shutting down.
_MYSQL_LOST = frozenset({2006, 2013, 2055, 4031, 1927, 1053})
# Lock wait, deadlock, lock table full, row changed, NOWAIT, interrupted, too long; too many connections; disk full.
_MYSQL_PASSING = _MYSQL_LOST | {1205, 1213, 1206, 1020, 3572, 1317, 1969, 3024, 1040, 1203, 1226, 2002, 2003, 1021}
_MYSQL_HELD = frozenset({1205, 3572})  # lock wait (MariaDB: also for NOWAIT), NOWAIT
_MYSQL_ROLLS_BACK = frozenset({1213, 1206, 1020})  # deadlock, lock table full, row changed (snapshot isolation)
_MYSQL_DURABILITY = ("innodb_flush_log_at_trx_commit", "innodb_flush_method", "log_bin", "sync_binlog")
_MYSQL_ENGINES = (
    "SELECT CONCAT(t.table_schema, '.', t.table_name), t.engine FROM information_schema.tables t "
    "JOIN information_schema.engines e ON e.engine = t.engine "
    "WHERE t.table_schema NOT IN ('mysql', 'sys', 'information_schema', 'performance_schema') "
    "AND t.table_type = 'BASE TABLE' AND (e.transactions <> 'YES'"
)
# Error numbers of MySQL and MariaDB; the libraries' own are 2000 to 2999 and 5000 to 5999. A number that is not
# surely a server's is none.
_OF_MYSQL_SERVERS = (range(1000, 2000), range(3000, 5000))
_SQLITE_PASSING = frozenset({5, 6, 7, 9, 10, 13})  # BUSY, LOCKED, NOMEM, INTERRUPT, IOERR, FULL
_PASSING_STATES = ("08", "40", "53", "57")  # connection, serialization and deadlock, resources, operator
_POSTGRESQL_CURRENT = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED"
_POSTGRESQL_IDLE = "idle_in_transaction_session_timeout"
# "off" ends where COMMIT is answered; any other level is the user's choice among durable ones.
_POSTGRESQL_FORCED = (
    "set_config('synchronous_commit', CASE current_setting('synchronous_commit') WHEN 'off' THEN 'on' "
    "ELSE current_setting('synchronous_commit') END, true)"
)
_POSTGRESQL_INSTALL_LOCK = 0x74786D71  # "txmq": any number that nobody else uses
_INSTALL_WAIT_S = 60
_SQLITE_SYNCHRONOUS_FULL = 2  # also in WAL mode: NORMAL syncs only at a checkpoint, a power loss takes commits back


_IN_AUTOCOMMIT = "it is in autocommit; open it without"
_BUSY = "it is already in a transaction; commit or roll that back first"


@dataclass(frozen=True, slots=True)
class Dialect:
    """One kind of database.

    Attributes:
        begin: the statement that begins a transaction that will write; empty if the driver begins by itself.
        now_ms: SQL expression, the database's clock in ms since 1970.
        is_local_clock: the database's clock is this machine's.
        text: column type for ASCII of up to 200 characters, compared byte by byte.
        number: column type for 64 bits.
        table_options: text after the column list of CREATE TABLE.
        why_not_idle: why a transaction cannot begin on this connection now, or None.
        strengthen: raise what a connection may set for itself, beyond what ``weakness`` names. Outside any transaction.
        weakness: which setting lets a commit be lost, as text, or None.
        for_resolvers: statement that lets locks be waited for a second only, and statements see and change as many rows
            as they say; empty for SQLite, where ``connect`` is told, and where ``resolving`` says it.
        settings: statements at the start of each transaction, whose effect ends with it. A connection of PostgreSQL may
            be another one in the next transaction (pgbouncer), and another client's: nothing is set for longer.
        resolving: such statements of a resolver's.
        installing: such statements of ``install``'s: only one of these transactions goes on at a time.
        forces_commit: SQL condition that holds and makes this transaction's commit durable, whatever the session or
            the body has set; empty if neither can.
        turn_to_install: statements that take and give back a turn in which only one session installs.
        placeholder: how most drivers write a parameter.
        read_committed: statement that lets a session lock no more than the rows it changes; empty if that takes none or
            the server's binary log refuses it.
        delete: how a statement that deletes rows by their key begins.
        identity_key, marker_key: what lets the server itself keep markers of another identity out, after the columns of
            the two tables; empty if a condition of the INSERT costs as little.
        engines: statement that lists tables (``schema.table``, engine) that cannot roll back, of all schemas that the
            user sees; empty if all tables can.
        engines_two_phase: the same for tables that cannot roll back or cannot prepare.
        schema_of: SQL expression, the schema in which the table ``?`` is found; empty if a connection has but one.
        quote: what stands around a name.
        session_number: SQL expression, what ``end_session`` takes; 0 if the server ends idle transactions by itself.
        end_session: how a statement that ends another session begins; empty if there is none.
        held: after a SELECT of a row: fails at once if an open transaction holds it; empty if that cannot be asked.
        waits_briefly: statement that lets the open transaction wait for a lock for a moment only; empty if ``held``
            says whether there is one, or if there are no locks of rows.
        is_held: whether an error says that somebody else holds a row.
        ends_idle: condition that always holds, and lets the server end the session if it is still idle in the open
            transaction at ``?``, by its clock in ms; empty if ``end_session`` does that.
        has_privileges: users of this kind of database may lack privileges.
        is_lost: whether an error means that the session has ended.
        is_answer: whether an error is the server's own answer, rather than the driver's word for having none: then the
            session tells what became of its COMMIT.
        is_of_driver: whether it surely says nothing of the transaction: the driver did not ask the server (closed,
            results unread); SQLite failed for another reason than the statement's.
        rolls_back: whether the database itself has rolled the whole transaction back with this error.
        may_pass: whether a statement that failed so may succeed when the transaction is run again unchanged.
    """

    name: str
    begin: str
    now_ms: str
    is_local_clock: bool
    text: str
    number: str
    table_options: str
    for_resolvers: str
    why_not_idle: Callable[[Connection], str | None]
    weakness: Callable[[Connection], str | None]
    placeholder: str = "%s"
    settings: tuple[str, ...] = ()
    resolving: tuple[str, ...] = ()
    installing: tuple[str, ...] = ()
    forces_commit: str = ""
    turn_to_install: tuple[str, str] | None = None
    strengthen: Callable[[Connection], None] = lambda _connection: None
    read_committed: Callable[[Connection], str] = lambda _connection: ""
    delete: str = "DELETE FROM {table}"
    identity_key: str = ""
    marker_key: str = ""
    engines: str = ""
    engines_two_phase: str = ""
    schema_of: str = ""
    quote: str = '"'
    session_number: str = "0"
    end_session: str = ""
    held: str = ""
    waits_briefly: str = ""
    is_held: Callable[[BaseException], bool] = lambda _error: False
    ends_idle: str = ""
    has_privileges: bool = True
    is_lost: Callable[[Any, Exception], bool] = lambda connection, _error: bool(getattr(connection, "closed", False))
    is_answer: Callable[[BaseException], bool] = lambda _error: True
    is_of_driver: Callable[[BaseException], bool] = lambda _error: False
    rolls_back: Callable[[Connection, BaseException], bool] = lambda _connection, _error: False
    may_pass: Callable[[BaseException], bool] = lambda _error: False

    def is_retriable(self, connection: Any, error: BaseException) -> bool:
        """Whether a transaction that ended with this error may succeed when it is run again."""
        return self.may_pass(error) or (isinstance(error, Exception) and self.is_lost(connection, error))


def _sqlite_why_not_idle(connection: Any) -> str | None:
    if _sqlite_is_in_transaction(connection):
        # Python 3.12's autocommit=False keeps one open all the time.
        return _BUSY
    if getattr(connection, "autocommit", -1) is True:
        return _IN_AUTOCOMMIT
    if run(connection, "PRAGMA locking_mode")[0] == [("exclusive",)]:
        return "PRAGMA locking_mode = EXCLUSIVE: it keeps every other connection out, a resolver's too"
    if run(connection, "PRAGMA journal_mode")[0] == [("off",)]:
        return "PRAGMA journal_mode = off: it cannot roll back"
    return None


def _sqlite_is_in_transaction(connection: Any) -> bool:
    known = getattr(connection, "in_transaction", None)
    if known is not None:
        return bool(known)
    try:  # a wrapper hides it; BEGIN is refused within a transaction, and takes no lock
        run(connection, "BEGIN")
    except Exception as error:
        if "within a transaction" not in str(error):
            raise
        return True
    connection.rollback()
    return False


def _sqlite_strengthen(connection: Connection) -> None:
    """Sync the directory, too: a journal whose removal a power loss takes back rolls the commit back."""
    if run(connection, "PRAGMA synchronous")[0] == [(_SQLITE_SYNCHRONOUS_FULL,)]:
        run(connection, "PRAGMA synchronous = EXTRA")


def _sqlite_weakness(connection: Connection) -> str | None:
    ((level,),) = run(connection, "PRAGMA synchronous")[0]
    if level < _SQLITE_SYNCHRONOUS_FULL:
        return f"PRAGMA synchronous = {level}, below FULL (2)"
    ((mode,),) = run(connection, "PRAGMA journal_mode")[0]
    return f"PRAGMA journal_mode = {mode}" if mode == "memory" else None


def _mysql_why_not_idle(connection: Any) -> str | None:
    known = getattr(connection, "get_autocommit", None)  # the server's last word; only some drivers have it
    if known() if known is not None else int(run(connection, "SELECT @@autocommit")[0][0][0]):
        return _IN_AUTOCOMMIT
    try:
        # Refused with 1568 in the middle of a transaction, by MariaDB and by MySQL; BEGIN would commit it silently.
        run(connection, "SET TRANSACTION READ WRITE")
    except Exception as error:
        if error.args and error.args[0] == 1568:
            return _BUSY
        raise
    return None


def _mysql_weakness(connection: Connection) -> str | None:
    found = mysql_variables(connection, *_MYSQL_DURABILITY)
    if found.get("innodb_flush_log_at_trx_commit") != "1":
        return f"innodb_flush_log_at_trx_commit = {found.get('innodb_flush_log_at_trx_commit')}, not 1"
    if found.get("innodb_flush_method", "").lower() in ("nosync", "littlesync"):
        return f"innodb_flush_method = {found['innodb_flush_method']}"
    if found.get("log_bin") == "ON" and found.get("sync_binlog") != "1":
        # With a binary log it is the log that decides, and InnoDB's own commit is not forced.
        return f"sync_binlog = {found.get('sync_binlog')}, not 1, with a binary log"
    return None


def mysql_variables(connection: Connection, *names: str) -> dict[str, str]:
    """Variables of a MySQL or MariaDB server; those it does not know are left out (SELECT @@name would fail)."""
    wanted = ", ".join(f"'{name}'" for name in names)
    rows = run(connection, f"SHOW VARIABLES WHERE Variable_name IN ({wanted})")[0]
    return {text(name): text(value) for name, value in rows}


def server_began_ms(connection: Connection) -> int:
    """When a MySQL or MariaDB server began, by its clock, in ms since 1970: the end of that second.

    Ends the transaction.
    """
    while True:
        ((before,),) = run(connection, "SELECT UNIX_TIMESTAMP()")[0]
        ((_, uptime_s),) = run(connection, "SHOW GLOBAL STATUS LIKE 'Uptime'")[0]
        ((after,),) = run(connection, "SELECT UNIX_TIMESTAMP()")[0]
        connection.rollback()
        if before == after:
            return 1000 * (int(before) - int(text(uptime_s)) + 1)


def _number(error: BaseException) -> Any:
    number = getattr(error, "errno", None)  # of MariaDB's connector, whose errors have only a text else
    return number if isinstance(number, int) else error.args[0] if error.args else None


def code_of(error: BaseException) -> int | None:
    """The error number of MySQL's or MariaDB's server or of the client library."""
    number = _number(error)
    return number if isinstance(number, int) else None


def is_answer_of_server(error: BaseException) -> bool:
    """Whether an error is the server's answer to a statement, rather than the client library's word for having none."""
    code = code_of(error)
    return code is not None and any(code in numbers for numbers in _OF_MYSQL_SERVERS)


def _mysql_is_lost(_connection: Any, error: Exception) -> bool:
    return _number(error) in _MYSQL_LOST


def _mysql_read_committed(connection: Connection) -> str:
    found = mysql_variables(connection, "log_bin", "binlog_format")
    if found.get("log_bin") == "ON" and found.get("binlog_format") == "STATEMENT":
        return ""  # it refuses what is written at READ COMMITTED
    return "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED"


def _mysql_rolls_back(connection: Connection, error: BaseException) -> bool:
    if _number(error) == 1205:
        return mysql_variables(connection, "innodb_rollback_on_timeout").get("innodb_rollback_on_timeout") == "ON"
    return _number(error) in _MYSQL_ROLLS_BACK


def _postgresql_why_not_idle(connection: Any) -> str | None:
    if getattr(connection, "autocommit", False):
        return _IN_AUTOCOMMIT
    info, ask = getattr(connection, "info", None), getattr(connection, "get_transaction_status", None)
    if info is None and ask is None:
        return "its wrapper hides whether it is in a transaction"
    status = info.transaction_status if info is not None else ask()  # type: ignore[misc]
    return None if int(status) == 0 else _BUSY


def _postgresql_weakness(connection: Connection) -> str | None:
    for name in ("fsync", "synchronous_commit"):
        ((value,),) = run(connection, f"SHOW {name}")[0]
        if value == "off":
            connection.rollback()
            return f"{name} = off"
    connection.rollback()  # SHOW began a transaction
    return None


def sqlstate(error: BaseException) -> str | None:
    """The SQLSTATE of a PostgreSQL driver's error: psycopg's, psycopg2's, pg8000's; None if it carries none."""
    for name in ("sqlstate", "pgcode"):
        found = getattr(error, name, None)
        if found is not None:
            return str(found)
    fields = _number(error)
    return fields.get("C") if isinstance(fields, dict) else None


def _postgresql_may_pass(error: BaseException) -> bool:
    state = sqlstate(error) or ""
    return state.startswith(_PASSING_STATES) or state == "55P03"  # the lock is not available


def _sqlite_may_pass(error: BaseException) -> bool:
    code = getattr(error, "sqlite_errorcode", None)
    return code & 0xFF in _SQLITE_PASSING if isinstance(code, int) else "locked" in str(error)


_SQLITE_DID_NOT_LOOK = ("closed database", "disk I/O error", "created in a thread")


def _sqlite_did_not_look(error: BaseException) -> bool:
    """Of a savepoint that is gone it says so: code 1, "no such savepoint"."""
    return _sqlite_may_pass(error) or any(words in str(error) for words in _SQLITE_DID_NOT_LOOK)


SQLITE = Dialect(
    name="sqlite",
    # A deferred transaction that reads first fails when it then writes and another one wrote meanwhile.
    begin="BEGIN IMMEDIATE",
    now_ms="CAST((julianday('now') - 2440587.5) * 86400000.0 AS INTEGER)",
    is_local_clock=True,
    text="TEXT",
    number="INTEGER",
    # A row and its key in one page: of a small transaction 4 KiB in 22 less to write and sync.
    table_options=" WITHOUT ROWID",
    for_resolvers="",
    placeholder="?",
    why_not_idle=_sqlite_why_not_idle,
    weakness=_sqlite_weakness,
    strengthen=_sqlite_strengthen,
    has_privileges=False,
    # The frames of a COMMIT whose sync failed are in the WAL, unseen, and a restart may bring them back.
    is_answer=lambda _error: False,
    is_of_driver=_sqlite_did_not_look,
    rolls_back=lambda _connection, error: _sqlite_may_pass(error),
    may_pass=_sqlite_may_pass,
)
MYSQL = Dialect(
    name="mysql",
    begin="BEGIN",
    # In UTC: UNIX_TIMESTAMP(NOW()) is off by an hour after clocks were put back.
    now_ms="(TIMESTAMPDIFF(MICROSECOND, '1970-01-01 00:00:00', UTC_TIMESTAMP(3)) DIV 1000)",
    is_local_clock=False,
    text="VARCHAR(200) CHARACTER SET ascii COLLATE ascii_bin",
    number="BIGINT",
    table_options=" ENGINE=InnoDB",
    # Of rows, and of tables. What ``connect`` limits for the application's sessions does not hold for resolvers.
    for_resolvers="SET SESSION innodb_lock_wait_timeout = 1, lock_wait_timeout = 1, "
    "sql_select_limit = DEFAULT, sql_safe_updates = 0, sql_big_selects = 1",
    why_not_idle=_mysql_why_not_idle,
    weakness=_mysql_weakness,
    turn_to_install=(f"SELECT GET_LOCK('txmq install', {_INSTALL_WAIT_S})", "SELECT RELEASE_LOCK('txmq install')"),
    read_committed=_mysql_read_committed,
    # For many keys among few rows a full scan is cheaper: it waits for every open transaction, at any isolation.
    delete="DELETE {table} FROM {table} FORCE INDEX (PRIMARY)",
    identity_key=", UNIQUE KEY (uuid)",
    # NULL, as an INSERT that reads the identity leaves it, refers to nothing.
    marker_key=", uuid VARCHAR(200) CHARACTER SET ascii COLLATE ascii_bin, "
    "FOREIGN KEY (uuid) REFERENCES {table}_identity (uuid)",
    schema_of="IF(? = '', NULL, DATABASE())",
    quote="`",
    session_number="CONNECTION_ID()",
    end_session="KILL CONNECTION",
    held=" FOR UPDATE NOWAIT",
    is_held=lambda error: _number(error) in _MYSQL_HELD,
    engines=_MYSQL_ENGINES + ")",
    engines_two_phase=_MYSQL_ENGINES + " OR e.xa <> 'YES')",
    is_lost=_mysql_is_lost,
    is_answer=is_answer_of_server,
    is_of_driver=lambda error: code_of(error) is not None and not is_answer_of_server(error),
    rolls_back=_mysql_rolls_back,
    may_pass=lambda error: _number(error) in _MYSQL_PASSING,
)
POSTGRESQL = Dialect(
    name="postgresql",
    begin="",
    now_ms="CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)",
    is_local_clock=False,
    text='VARCHAR(200) COLLATE "C"',
    number="BIGINT",
    table_options="",
    for_resolvers="",
    resolving=(_POSTGRESQL_CURRENT, f"SELECT set_config('lock_timeout', '1s', true), {_POSTGRESQL_FORCED}"),
    forces_commit=f"{_POSTGRESQL_FORCED} <> ''",
    # CREATE TABLE IF NOT EXISTS fails in all but one of those that run at the same moment.
    installing=(_POSTGRESQL_CURRENT, f"SELECT pg_advisory_xact_lock({_POSTGRESQL_INSTALL_LOCK})"),
    schema_of="(SELECT n.nspname FROM pg_catalog.pg_class AS c "
    "JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = to_regclass(?))",
    # What an INSERT waits for can be seen only by waiting: longer than a healthy COMMIT takes to be forced.
    waits_briefly="SET LOCAL lock_timeout = '20ms'",
    is_held=lambda error: sqlstate(error) == "55P03",
    ends_idle=f"set_config('{_POSTGRESQL_IDLE}', CAST(LEAST(GREATEST("
    "? - CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT), 1000), 2147483647) AS TEXT), true) IS NOT NULL",
    why_not_idle=_postgresql_why_not_idle,
    weakness=_postgresql_weakness,
    is_answer=lambda error: sqlstate(error) is not None,
    may_pass=_postgresql_may_pass,
)
DIALECTS = {dialect.name: dialect for dialect in (SQLITE, MYSQL, POSTGRESQL)}


def dialect_for(driver: ModuleType | None, name: str | None) -> Dialect:
    """The dialect of a driver's connections.

    Args:
        driver: the DB-API module; None if it is not known.
        name: ``sqlite``, ``mysql`` or ``postgresql``; None to choose by the driver.

    Raises:
        ConfigError: the driver is not known (name the dialect), or no such dialect.
    """
    if name is None:
        root = "" if driver is None else driver.__name__.partition(".")[0]
        if "sqlite" in root:
            return SQLITE
        if root in _MYSQL_DRIVERS:
            return MYSQL
        if root.startswith(_POSTGRESQL_DRIVERS):
            return POSTGRESQL
        which = f"of driver {root!r}" if root else "of this connection, whose wrapper hides the driver"
        raise ConfigError(f"cannot tell the dialect {which}: give dialect=, one of {', '.join(DIALECTS)}")
    if name not in DIALECTS:
        raise ConfigError(f"dialect={name!r}: expected one of {', '.join(DIALECTS)}")
    return DIALECTS[name]


def prepare_for_resolver(connection: Connection, dialect: Dialect) -> None:
    """Let a resolver wait for locks shortly, and lock only rows that it changes: no gaps between others' rows.

    What ``connect`` may have limited otherwise (``mysql --safe-updates``) does not hold for it.
    """
    for statement in (dialect.for_resolvers, dialect.read_committed(connection)):
        if statement:
            run(connection, statement)


@contextmanager
def waiting_shortly(connection: Connection, dialect: Dialect) -> Iterator[None]:
    """Let a session that goes on afterwards wait for locks shortly, where no transaction can set that for itself."""
    if dialect.name != MYSQL.name:
        yield
        return
    ((rows, tables),) = run(connection, "SELECT @@innodb_lock_wait_timeout, @@lock_wait_timeout")[0]
    run(connection, "SET SESSION innodb_lock_wait_timeout = 1, lock_wait_timeout = 1")
    yield  # not set back if this fails: nobody goes on with it
    run(connection, f"SET SESSION innodb_lock_wait_timeout = {int(rows)}, lock_wait_timeout = {int(tables)}")


def placeholder_of(driver: ModuleType | None, dialect: Dialect) -> str:
    """How the driver writes a parameter; if it is not known, as most drivers of the dialect do.

    Raises:
        ConfigError: its ``paramstyle`` is not qmark, format or pyformat.
    """
    style = getattr(driver, "paramstyle", None)
    if driver is None or style is None:
        return dialect.placeholder
    if style not in _PLACEHOLDERS:
        raise ConfigError(f"driver {driver.__name__!r} has paramstyle {style!r}; supported: {', '.join(_PLACEHOLDERS)}")
    return _PLACEHOLDERS[style]
