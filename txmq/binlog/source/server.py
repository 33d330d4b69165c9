"""The database of the binlog, asked by SQL: what it is, whether its binlog can be read, what its tables are now.

Each question has a connection of its own: they are rare, and none is left to time out. The database knows a table and
its columns only by the names that they have further on in the binlog: ``later_names`` finds these in the statements
between.

What must hold for the binlog to show each change (``check``): row format with full images and metadata; GTIDs; a server
id of our own; no foreign key of a captured table with an action where InnoDB carries those out, without row events.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from txmq.binlog.decoded_changes import SYSTEM_CLOCK, Ddl, DdlKind, Origin, TableName
from txmq.binlog.errors import BinlogError, SourceAwayError, SourceError
from txmq.binlog.position import Flavor, MariadbGtids, MysqlGtids, Position
from txmq.binlog.source.charsets import Charset, charset
from txmq.binlog.source.connection import replica_name
from txmq.binlog.source.options import SourceOptions
from txmq.binlog.source.rows import TableDescription
from txmq.binlog.statements import What, recognise, renamed_columns
from txmq.errors import ConfigError
from txmq.xa.database.dbapi import Connection, run, text
from txmq.xa.database.dialects import mysql_variables
from txmq.xa.database.mysql_server import listed_xids, mysql_driver
from txmq.xid import xid_sql

# SHOW BINLOG EVENTS does not tell a statement's mode. In either one, what stands in double quotes where a name does
# is a name.
_MODE = frozenset({"ANSI_QUOTES"})
_WANTED: Final = {"log_bin": "1", "binlog_format": "ROW", "binlog_row_image": "FULL", "binlog_row_metadata": "FULL"}
_WANTED_OF: Final[dict[Flavor, dict[str, str]]] = {
    "mariadb": _WANTED,
    "mysql": _WANTED | {"gtid_mode": "ON", "binlog_transaction_compression": "0"},
}
_NOT_AWAY: Final = frozenset({1044, 1045, 1049, 1142, 1143, 1227, 1698, 4031})
_MAY_NOT_SEE: Final = 1227
_PARSE_ERROR: Final = 1064
_BINARY_TYPES: Final = ("uuid", "inet4", "inet6")
_OFFSETS: Final = 1 << 32
_FILE_START: Final = 4
_EVENTS_PER_PAGE: Final = 10_000
_STATEMENT: Final = re.compile(r"(?:use `(?P<database>(?:[^`]|``)*)`; )?(?P<text>.*)", re.DOTALL)
_UTF8: Final = 45  # utf8mb4_general_ci
_ACTIONS: Final = ("CASCADE", "SET NULL", "SET DEFAULT")
_FINGERPRINT_SIZE_MAX: Final = 200
_TELLS_APART: Final = ("wsrep_on", "server_uuid", "server_uid", "hostname", "port", "datadir")
_SWITCHES: Final = frozenset({"log_bin", "log_slave_updates", "log_replica_updates", "binlog_transaction_compression"})


# --- names further on -------------------------------------------------------------------------------------------------


class LaterNames(NamedTuple):
    """``columns``: of each name of before the name that it has then."""

    table: TableName
    columns: dict[str, str]


def later_names(statements: Iterable[tuple[str, str]], table: TableName, columns: Sequence[str]) -> LaterNames | None:
    """Names after these statements; None if the table is dropped, or made anew.

    Args:
        statements: in order; before each the database in which it was run.
    """
    names = {name: name for name in columns}
    for database, statement in statements:
        found = recognise(statement, database, _MODE)
        if found.what is not What.DDL or found.ddl is None:
            continue
        ddl = found.ddl
        if ddl.kind is not DdlKind.TRUNCATE and (table in ddl.emptied or TableName(table.database, "") in ddl.emptied):
            return None
        if table in ddl.changed:
            changed = renamed_columns(statement, database, _MODE)
            names = {name: changed.get(now.lower(), now) for name, now in names.items()}
        for old, new in ddl.moved:
            table = new if table == old else table
    return LaterNames(table, names)


# --- the server -------------------------------------------------------------------------------------------------------


class Server:
    """The questions. ``origin`` is known after ``check``.

    Raises of every method:
        SourceError: the server refuses, or what must hold does not.
        SourceAwayError: it cannot be reached.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._charsets: dict[int, tuple[str, int, str]] = {}
        self._decoders: dict[str, Charset] = {}
        self._described: dict[TableName, TableDescription] = {}
        self.origin = Origin("mariadb", "")

    def check(self) -> None:
        """Whether each change of the captured tables will be in the binlog."""
        flavor: Flavor = "mariadb" if "mariadb" in self._variable("version").lower() else "mysql"
        driver = mysql_driver()
        try:
            with closing(driver.connect(**self._arguments())) as connection:
                self.origin = Origin(flavor, fingerprint(connection))
        except driver.Error as error:
            raise refusal(error) from error
        for name, wanted in _WANTED_OF[flavor].items():
            found = self._variable(name)
            if found.upper() != wanted:
                raise SourceError(
                    f"{name} is {found or 'empty'}, and the binlog then does not show each change: SET GLOBAL "
                    f"{name}={wanted or repr('')}"
                    + " (with log-bin in the server's configuration)"
                    * (name == "log_bin")
                )
        self.check_filters()
        self._check_server_id()
        self._check_cascades()

    def check_filters(self) -> None:
        """Whether the binlog has all that changes the tables, whoever does it."""
        for row in self._first_understood("SHOW MASTER STATUS", "SHOW BINARY LOG STATUS"):
            for name, found in (("binlog-do-db", row[2]), ("binlog-ignore-db", row[3])):
                if found:
                    raise SourceError(
                        f"{name} is {found}: the binlog leaves out changes, and statements by the database in which "
                        f"they are run: take {name} out of the server's configuration, and begin anew with a snapshot"
                    )
        for name in ("log_replica_updates", "log_slave_updates"):  # of newer MySQL; of all
            if self._variable(name) == "0" and self._is_replica():
                raise SourceError(
                    f"the server is a replica, and its binlog lacks what it replicates: set {name}=ON in the "
                    "server's configuration, and begin anew with a snapshot; or read the one that it replicates"
                )

    def _is_replica(self) -> bool:
        """Whether it is; whether it was, if the user may not see it (REPLICA MONITOR)."""
        try:
            return bool(self._first_understood("SHOW ALL SLAVES STATUS", "SHOW REPLICA STATUS", "SHOW SLAVE STATUS"))
        except SourceError as error:
            if _code(error.__cause__) != _MAY_NOT_SEE:
                raise
        return bool(self._variable("gtid_slave_pos"))

    def _first_understood(self, *statements: str) -> Sequence[Any]:
        """The rows of the first statement that this version of the server knows."""
        for statement in statements[:-1]:
            try:
                return self.rows(statement)
            except SourceError as error:
                if _code(error.__cause__) != _PARSE_ERROR:
                    raise
        return self.rows(statements[-1])

    def end_position(self, *, is_exact: bool = True) -> Position:
        """Where the binlog ends now.

        Args:
            is_exact: the GTIDs are those of file and offset: MariaDB looks through the file for them. Else they may be
                of a moment later.
        """
        file, offset = [*self._files().items()][-1]  # of the file that is written, its size is where the binlog ends
        if self.origin.flavor == "mysql":
            gtids = str(self._mysql_gtids("gtid_executed"))
        else:
            gtids = str(self.gtids_at(file, offset)) if is_exact else self._variable("gtid_binlog_pos")
        return Position(self.origin.flavor, gtids, 0, file, offset, self.origin.server)

    def oldest_position(self) -> Position:
        """Where the oldest binlog begins that the server has."""
        file = self.first_file()
        if self.origin.flavor == "mysql":
            gtids = str(self._mysql_gtids("gtid_purged"))
        else:
            gtids = str(self.gtids_at(file, 4))
        return Position(self.origin.flavor, gtids, 0, file, 4, self.origin.server)

    def file_borders(self) -> list[MariadbGtids]:
        """What stands before each file of MariaDB's binlog."""
        if self.origin.flavor == "mysql":
            return []
        return [self.gtids_at(file, 4) for file in self._files()]

    def gtids_at(self, file: str, offset: int) -> MariadbGtids:
        """What stands in MariaDB's binlog before a byte of a file."""
        found = self._found_at(file, offset)
        if found is None:
            raise SourceError(f"the server does not tell the GTIDs of {file}, byte {offset}")
        return found

    def _found_at(self, file: str, offset: int) -> MariadbGtids | None:
        found = self.rows("SELECT BINLOG_GTID_POS(%s, %s)", file, offset)[0][0]
        return None if found is None else MariadbGtids.parse(str(found))

    def prepared(self) -> list[str]:
        """XA transactions that are prepared now, as SQL names them."""
        driver = mysql_driver()
        try:
            with closing(driver.connect(**self._arguments())) as connection:
                xids = listed_xids(connection, is_mariadb=self.origin.flavor == "mariadb")
        except driver.Error as error:
            raise refusal(error) from error
        except ConfigError as error:
            raise SourceError(str(error)) from error
        return [xid_sql(xid) for xid in xids]

    def first_file(self) -> str:
        """The oldest binlog file."""
        return next(iter(self._files()))

    def _files(self) -> dict[str, int]:
        """The binlog's files in order, and their sizes. Every version has this statement; MySQL 8.4 no other."""
        return {str(row[0]): int(row[1]) for row in self.rows("SHOW BINARY LOGS")}

    def _mysql_gtids(self, variable: str) -> MysqlGtids:
        found = "".join(self._variable(variable).split())
        try:
            return MysqlGtids.parse(found)
        except ValueError as error:
            raise SourceError(f"{variable} is {found[:200]}, and GTIDs with tags are not supported: {error}") from error

    def bytes_behind(self, position: Position) -> int | None:
        """Bytes of the binlog after a position's file and offset; None if that file is gone, or another server's."""
        sizes = self._files()
        if position.file not in sizes or position.server != self.origin.server:
            return None
        return sum(size for file, size in sizes.items() if file >= position.file) - position.offset

    def check_position(self, position: Position) -> None:
        """Refuse a server that lacks the history up to ``position``, or anything after it."""
        if position.flavor != self.origin.flavor:
            raise SourceError(f"the position is one of {position.flavor}, the server is of {self.origin.flavor}")
        gtids = position.gtid_set
        if isinstance(gtids, MysqlGtids):
            self._check_mysql(gtids)
        elif position.file and position.server == self.origin.server:
            self._check_not_reset(position, gtids.including(position.partial) if position.partial else gtids)
        changed = bool(position.server) and position.server != self.origin.server
        if changed and not self._options.accept_server and not self._knows(gtids):
            raise SourceError(
                f"this is another server: the position is of {position.server}, the connection leads to "
                f"{self.origin.server}, and its binlog does not prove that it has replicated that one's transactions "
                f"({gtids}); if it has, accept it by name (source.accept_server), else begin anew with a snapshot"
            )

    def _check_not_reset(self, position: Position, read: MariadbGtids) -> None:
        """The binlog's numbers rise: what stands before the position's place is what was read, the last of it there."""
        name, _, number = position.file.rpartition(".")
        sizes = self._files()
        if sizes.get(position.file, 0) >= _OFFSETS:
            is_same = True  # events tell 32 bits of where they end
        elif position.file in sizes:
            found = self._found_at(position.file, position.offset)
            is_same = found is not None and read.covers(found) and (
                not read.last or bool(read.last.items() & found.last.items())
            )  # fmt: skip
        else:
            last_name, _, last = [*sizes][-1].rpartition(".")
            is_same = last_name != name or int(last) >= int(number)  # purged: the server tells whether that is a gap
        if not is_same:
            raise SourceError(
                f"the server's binlog does not have {read} at {position.file}, byte {position.offset}, where it was "
                "read: it was reset (RESET MASTER), or its end was lost; begin anew with a snapshot"
            )

    def _knows(self, gtids: MariadbGtids | MysqlGtids) -> bool:
        """Whether the binlog holds transactions of another server up to ``gtids``: it replicated that one.

        A transaction under this server's own id proves nothing: a server set up anew counts from 1 as well.
        """
        if isinstance(gtids, MysqlGtids):
            return self._mysql_gtids("gtid_executed").covers(gtids)
        mine = int(self._variable("server_id"))
        state = [gtid.strip().split("-") for gtid in self._variable("gtid_binlog_state").split(",") if gtid.strip()]
        known = {(int(domain), int(server)): int(sequence) for domain, server, sequence in state}
        return all(
            server != mine and known.get((domain, server), -1) >= sequence
            for domain, (server, sequence) in gtids.last.items()
        )

    def _check_mysql(self, gtids: MysqlGtids) -> None:
        purged = self._mysql_gtids("gtid_purged")
        if not gtids.covers(purged):
            raise SourceError(
                f"the server has purged transactions behind the position ({purged}): begin anew with a snapshot"
            )

    def _check_server_id(self) -> None:
        mine, theirs = self._options.server_id, int(self._variable("server_id"))
        if mine == theirs:
            raise SourceError(f"server id {mine} is that of the server itself: take another one")
        try:
            replicas = self.rows("SHOW SLAVE HOSTS" if self.origin.flavor == "mariadb" else "SHOW REPLICAS")
        except SourceError as error:
            if _code(error.__cause__) == _MAY_NOT_SEE:
                return
            raise
        for row in replicas:
            if int(row[0]) == mine and str(row[1]) != replica_name(self._options.name):
                raise SourceError(f"server id {mine} is that of the replica {row[1]}: take another one")

    def _check_cascades(self) -> None:
        # MySQL 9.6 has foreign keys carried out above InnoDB, with row events, unless this setting is on.
        if self._options.cascades == "pass" or self._variable("innodb_native_foreign_keys") == "OFF":
            return
        found = self.rows(
            "SELECT constraint_schema, table_name, constraint_name FROM information_schema.referential_constraints "
            "WHERE delete_rule IN %s OR update_rule IN %s",
            _ACTIONS, _ACTIONS,
        )  # fmt: skip
        hidden = [f"{row[0]}.{row[1]} ({row[2]})" for row in found if self._options.captures(TableName(row[0], row[1]))]
        if hidden:
            raise SourceError(
                f"foreign keys with CASCADE, SET NULL or SET DEFAULT: {', '.join(hidden[:10])}. InnoDB changes the "
                'rows of these tables without row events; drop them, or set source.cascades = "pass" if consumers do '
                "the same"
            )

    # --- what the reader of events asks (Catalog) ----------------------------------------------------------------

    def changed(self, ddl: Ddl) -> None:
        """A captured table may have a foreign key now."""
        if "REFERENCES" in ddl.statement.upper():
            self._check_cascades()

    def describe(self, table: TableName) -> TableDescription:
        """A table as it is now."""
        kinds = self.rows(
            "SELECT table_type FROM information_schema.tables WHERE table_schema = %s AND table_name = %s", *table
        )
        if kinds and kinds[0][0] not in ("BASE TABLE", "SYSTEM VERSIONED"):
            return TableDescription(is_table=False)
        if kinds and kinds[0][0] == "SYSTEM VERSIONED":
            raise SourceError(f"{table} is system-versioned: its history has rows of its own, which are not published")
        columns = self.rows(
            "SELECT column_name, column_type, generation_expression FROM information_schema.columns "
            "WHERE table_schema = %s AND table_name = %s", *table,
        )  # fmt: skip
        found = TableDescription(
            columns=frozenset(row[0] for row in columns),
            types={row[0]: row[1] for row in columns if row[1] in _BINARY_TYPES},
            generated=frozenset(row[0] for row in columns if row[2]),
            unique=self._unique(table),
        )
        if columns:
            self._described[table] = found
        return found

    def later(self, table: TableName, columns: Sequence[str], file: str, offset: int) -> TableDescription:
        """Columns that were renamed, or their table, after a place in the binlog, by their names there.

        A table that was dropped is as it was when it was last described; nothing is known if it never was.
        """
        found = later_names(self._statements(file, offset), table, columns)
        if found is None:
            return self._described.get(table, TableDescription())
        now = self.describe(found.table)
        return TableDescription(
            types={name: now.types[later] for name, later in found.columns.items() if later in now.types},
            generated=frozenset(name for name, later in found.columns.items() if later in now.generated),
        )

    def _statements(self, file: str, offset: int) -> Iterator[tuple[str, str]]:
        """The statements after a place in the binlog, each with its database."""
        for name in self._files():
            if name < file:
                continue
            at = offset if name == file else _FILE_START
            while rows := self.rows("SHOW BINLOG EVENTS IN %s FROM %s LIMIT %s", name, at, _EVENTS_PER_PAGE):
                for row in rows:
                    match = _STATEMENT.fullmatch(str(row[5])) if str(row[2]).startswith("Query") else None
                    if match is not None:
                        yield (match["database"] or "").replace("``", "`"), match["text"]
                at = int(rows[-1][4])
                if len(rows) < _EVENTS_PER_PAGE:
                    break

    def _unique(self, table: TableName) -> tuple[tuple[str, ...], ...]:
        rows = self.rows(
            "SELECT index_name, column_name, nullable, sub_part FROM information_schema.statistics "
            "WHERE table_schema = %s AND table_name = %s AND non_unique = 0 ORDER BY index_name, seq_in_index", *table,
        )  # fmt: skip
        found: dict[str, list[str]] = {}
        unfit = set()
        for name, column, nullable, part in rows:
            found.setdefault(name, []).append(column)
            if nullable == "YES" or part is not None or column is None:
                unfit.add(name)
        return tuple(tuple(found[name]) for name in found if name not in unfit)

    def charset(self, number: int) -> Charset:
        """The character set of a collation."""
        name, bytes_max, _ = self._collation(number)
        if name not in self._decoders:
            self._decoders[name] = charset(name, bytes_max, self.rows)
        return self._decoders[name]

    def charset_named(self, name: str) -> Charset:
        """A character set by its name."""
        self._collation(_UTF8)
        return self.charset(next(number for number, (called, _, _) in self._charsets.items() if called == name))

    def collation(self, number: int) -> str:
        """The name of a collation."""
        return self._collation(number)[2]

    def database_collation(self, database: str) -> str:
        """The collation that a database gives to a new table; empty if it is gone."""
        rows = self.rows(
            "SELECT default_collation_name FROM information_schema.schemata WHERE schema_name = %s", database
        )
        return str(rows[0][0]) if rows else ""

    def system_clock(self) -> str:
        """What the time zone SYSTEM says at two moments."""
        return str(self.rows(SYSTEM_CLOCK)[0][0])

    def _collation(self, number: int) -> tuple[str, int, str]:
        if not self._charsets:
            self._charsets = self._collations()
        if number not in self._charsets:
            raise SourceError(f"the binlog names collation {number}, which the server does not list")
        return self._charsets[number]

    def _collations(self) -> dict[int, tuple[str, int, str]]:
        lists, called = "collations AS c", "collation_name"
        if self.origin.flavor == "mariadb" and self.rows(
            "SELECT 1 FROM information_schema.columns WHERE table_schema = 'information_schema' "
            "AND table_name = 'COLLATION_CHARACTER_SET_APPLICABILITY' AND column_name = 'ID'"
        ):
            lists = "collation_character_set_applicability AS c"  # since 10.10 collations serve several sets
            called = "full_collation_name"
        rows = self.rows(
            f"SELECT c.id, s.character_set_name, s.maxlen, c.{called} FROM information_schema.{lists} "  # noqa: S608 - our own
            "JOIN information_schema.character_sets AS s ON s.character_set_name = c.character_set_name"
        )
        return {int(row[0]): (str(row[1]), int(row[2]), str(row[3])) for row in rows if row[0] is not None}

    # --- connections ---------------------------------------------------------------------------------------------

    def _variable(self, name: str) -> str:
        rows = self.rows("SHOW GLOBAL VARIABLES LIKE %s", name.replace("_", r"\_"))
        value = str(rows[0][1]) if rows else ""
        return {"ON": "1", "OFF": "0"}.get(value, value) if name in _SWITCHES else value

    def _arguments(self) -> dict[str, Any]:
        return self._options.connect_arguments()

    def rows(self, sql: str, *parameters: object) -> Sequence[Any]:
        """The rows of a statement."""
        driver = mysql_driver()
        try:
            with closing(driver.connect(**self._arguments())) as connection, closing(connection.cursor()) as cursor:
                cursor.execute(sql, parameters) if parameters else cursor.execute(sql)
                found: Sequence[Any] = cursor.fetchall()
                return found
        except driver.Error as error:
            raise refusal(error) from error


def fingerprint(connection: Connection) -> str:
    """Which server a connection leads to, by what no copy of its data has. At most 200 ASCII characters.

    =========  ==========================================================================================
    Galera     the uuid of the cluster's state: any node may answer
    MySQL      ``server_uuid`` and the data directory (a copy of the directory must go without its ``auto.cnf``)
    MariaDB    ``server_uid`` (a hash of network address and port), or host and port if it has none; data directory
    =========  ==========================================================================================

    Sources: MariaDB, "server_uid", "wsrep_cluster_state_uuid"; MySQL 8.0, 19.1.6 "server_uuid".

    Raises:
        ConfigError: the server does not tell.
        Exception: the driver's own.
    """
    found = " ".join(quote(word, safe="/.:-_=+") for word in _words_of(connection))
    if len(found) <= _FINGERPRINT_SIZE_MAX:
        return found
    kind = found.partition(" ")[0]
    return f"{kind} sha256:{hashlib.sha256(found.encode()).hexdigest()}"


def _words_of(connection: Connection) -> list[str]:
    found = mysql_variables(connection, *_TELLS_APART)
    if found.get("wsrep_on") == "ON":
        state = dict(run(connection, "SHOW STATUS LIKE 'wsrep_cluster_state_uuid'")[0])
        uuid = next((text(value) for value in state.values()), "")
        if not uuid.strip("0-"):
            raise ConfigError("this node is in no Galera cluster now")
        return ["galera", uuid]
    if found.get("server_uuid"):
        return ["mysql", found["server_uuid"], found.get("datadir", "")]
    server = found.get("server_uid") or f"{found.get('hostname', '')}:{found.get('port', '')}"
    return ["mariadb", server, found.get("datadir", "")]


def _code(error: BaseException | None) -> int:
    return error.args[0] if error is not None and error.args and isinstance(error.args[0], int) else 0


def refusal(error: Exception) -> BinlogError:
    """The driver's error as ours: asking again may help, but not if the server has understood the question."""
    driver = mysql_driver()
    if isinstance(error, driver.OperationalError) and _code(error) not in _NOT_AWAY:
        return SourceAwayError(f"the database cannot be asked: {error}")
    return SourceError(f"the database refuses to tell what it is asked: {error}")
