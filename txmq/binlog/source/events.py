"""Events of the binlog, but for rows and table maps: header, checksum, and what each kind carries.

    timestamp 4 | type 1 | server id 4 | size 4 | position after 4 | flags 2 | body | CRC32 4, if the file has them

A statement's event has status variables, the session in which the statement was run:

    code 1 | value, of a size that the code says | ...

A replica sets them before it runs the statement: what CURRENT_TIMESTAMP is, which modes hold, what a text's characters
are. So the event that is published carries them (``session``, by the names of the server's variables), and the applier
sets them. A code that is not known has no size that is known: what comes after it cannot be read.

foreign_key_checks is left out: the rows of other tables are of other topics, and may come later in a copy. So is
autocommit, which a replica does not set either.

Sources: MariaDB, "Replication Protocol: Event Types", "Replication Protocol: QUERY_EVENT"; MariaDB server 10.11 and
11.8, ``sql/log_event.h``, ``sql/sql_priv.h``; MySQL 8.0, "Binlog Event"; MySQL 9,
``mysql::binlog::event::Query_event``.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from struct import Struct
from typing import Final, Literal, NamedTuple
from uuid import UUID

from pymysqlreplication.constants import BINLOG

from txmq.binlog.decoded_changes import SessionValue
from txmq.binlog.position import Flavor
from txmq.xid import Xid

_FLAGS, _SQL_MODE, _AUTO_INCREMENT, _CHARSET, _TIME_ZONE, _LC_TIME_NAMES, _CHARSET_DATABASE = 0, 1, 3, 4, 5, 7, 8
_MICROSECONDS, _EXPLICIT_DEFAULTS, _UTF8MB4, _NEEDS_KEY, _ENCRYPTION = 13, 16, 18, 19, 20  # MySQL
_HRNOW, _GTID_FLAGS, _COLLATIONS = 128, 130, 131  # MariaDB
_SIZES: Final = {
    _FLAGS: 4, _SQL_MODE: 8, _AUTO_INCREMENT: 4, _CHARSET: 6, _LC_TIME_NAMES: 2, _CHARSET_DATABASE: 2,
    9: 8,  # tables that are updated
    10: 4,  # size at the source
    _MICROSECONDS: 3, _EXPLICIT_DEFAULTS: 1,
    17: 8,  # number of the transaction
    _UTF8MB4: 2, _NEEDS_KEY: 1, _ENCRYPTION: 1, _HRNOW: 3,
    129: 8,  # number of the transaction
    255: 0,  # fills a place
}  # fmt: skip
_MANY_DATABASES: Final = 254
_ALTER_ENDS: Final = 12  # FL_COMMIT_ALTER, FL_ROLLBACK_ALTER: the number of its beginning follows
_AUTO_IS_NULL, _NO_CONSTRAINTS, _NO_AUTOCOMMIT, _EXPLICIT = 1 << 14, 1 << 15, 1 << 19, 1 << 24
_NO_FOREIGN_KEYS, _NO_UNIQUE, _IF_EXISTS = 1 << 26, 1 << 27, 1 << 28
_KNOWN_FLAGS: Final[dict[Flavor, int]] = {
    "mysql": _AUTO_IS_NULL | _NO_AUTOCOMMIT | _NO_FOREIGN_KEYS | _NO_UNIQUE,
    "mariadb": (
        _AUTO_IS_NULL | _NO_CONSTRAINTS | _NO_AUTOCOMMIT | _EXPLICIT | _NO_FOREIGN_KEYS | _NO_UNIQUE | _IF_EXISTS
    ),
}
_MODES: Final = (
    "REAL_AS_FLOAT", "PIPES_AS_CONCAT", "ANSI_QUOTES", "IGNORE_SPACE", "IGNORE_BAD_TABLE_OPTIONS", "ONLY_FULL_GROUP_BY",
    "NO_UNSIGNED_SUBTRACTION", "NO_DIR_IN_CREATE", "POSTGRESQL", "ORACLE", "MSSQL", "DB2", "MAXDB", "NO_KEY_OPTIONS",
    "NO_TABLE_OPTIONS", "NO_FIELD_OPTIONS", "MYSQL323", "MYSQL40", "ANSI", "NO_AUTO_VALUE_ON_ZERO",
    "NO_BACKSLASH_ESCAPES", "STRICT_TRANS_TABLES", "STRICT_ALL_TABLES", "NO_ZERO_IN_DATE", "NO_ZERO_DATE",
    "ALLOW_INVALID_DATES", "ERROR_FOR_DIVISION_BY_ZERO", "TRADITIONAL", "NO_AUTO_CREATE_USER", "HIGH_NOT_PRECEDENCE",
    "NO_ENGINE_SUBSTITUTION", "PAD_CHAR_TO_FULL_LENGTH",
)  # fmt: skip
_MODES_OF: Final[dict[Flavor, tuple[str, ...]]] = {
    "mysql": (*_MODES, "TIME_TRUNCATE_FRACTIONAL"),
    "mariadb": (*_MODES, "EMPTY_STRING_IS_NULL", "SIMULTANEOUS_ASSIGNMENT", "TIME_ROUND_FRACTIONAL"),
}
SYSTEM: Final = "SYSTEM"  # the time zone of the machine
RowOp = Literal["c", "u", "d"]
HEADER: Final = Struct("<IBIIIH")
HEADER_SIZE: Final = 19
CHECKSUM_SIZE: Final = 4
QUERY_COMPRESSED: Final = 165
EVENT_BYTES_MAX: Final = 64 << 20
UNREADABLE: Final = (ValueError, LookupError, OverflowError, struct.error, zlib.error)  # bytes that are no such event
IGNORABLE_FLAG: Final = 0x80  # LOG_EVENT_IGNORABLE_F: a reader that does not know it may pass over it
ROWS: Final[dict[int, tuple[RowOp, bool, bool]]] = {  # type of a rows event: (op, version 2, compressed)
    BINLOG.WRITE_ROWS_EVENT_V1: ("c", False, False), BINLOG.WRITE_ROWS_EVENT_V2: ("c", True, False),
    BINLOG.UPDATE_ROWS_EVENT_V1: ("u", False, False), BINLOG.UPDATE_ROWS_EVENT_V2: ("u", True, False),
    BINLOG.DELETE_ROWS_EVENT_V1: ("d", False, False), BINLOG.DELETE_ROWS_EVENT_V2: ("d", True, False),
    166: ("c", False, True), 169: ("c", True, True), 167: ("u", False, True), 170: ("u", True, True),
    168: ("d", False, True), 171: ("d", True, True),
    BINLOG.PARTIAL_UPDATE_ROWS_EVENT: ("u", True, False),
}  # fmt: skip
PASSED_OVER: Final = frozenset(
    {
        BINLOG.STOP_EVENT, BINLOG.INTVAR_EVENT, BINLOG.RAND_EVENT, BINLOG.USER_VAR_EVENT, BINLOG.IGNORABLE_LOG_EVENT,
        BINLOG.HEARTBEAT_LOG_EVENT, BINLOG.ROWS_QUERY_LOG_EVENT, BINLOG.PREVIOUS_GTIDS_LOG_EVENT,
        BINLOG.MARIADB_ANNOTATE_ROWS_EVENT, BINLOG.MARIADB_BINLOG_CHECKPOINT_EVENT,
        BINLOG.MARIADB_GTID_GTID_LIST_EVENT,
        BINLOG.MARIADB_START_ENCRYPTION_EVENT,  # of the file: the server decrypts what it sends
        36, 37, 41,  # MySQL: transaction context, view change, heartbeat of the second kind
    }
)  # fmt: skip
LOAD_DATA: Final = frozenset(
    {BINLOG.BEGIN_LOAD_QUERY_EVENT, BINLOG.EXECUTE_LOAD_QUERY_EVENT, BINLOG.APPEND_BLOCK_EVENT}
)
REFUSED: Final = {
    BINLOG.INCIDENT_EVENT: "the server lost events (an incident): begin anew with a snapshot",
    BINLOG.ANONYMOUS_GTID_LOG_EVENT: "it has no GTID: SET GLOBAL gtid_mode=ON",
    40: "its transactions are compressed: SET GLOBAL binlog_transaction_compression=OFF",
    42: "it has a GTID with a tag, which is not supported",
}
_STANDALONE, _GROUP_COMMIT_ID, _PREPARED_XA, _COMPLETED_XA = 1, 2, 64, 128
_START_ALTER, _ROLLBACK_ALTER = 2, 8
_MARIADB_GTID = Struct("<QIB")
_MYSQL_GTID = Struct("<B16sQ")
_QUERY = Struct("<IIBHH")
_XA_PREPARE = Struct("<BIII")


# --- status variables -------------------------------------------------------------------------------------------------


class StatusVariables:
    """The status variables of one statement's event.

    Args:
        values: each variable's bytes by its code.
        unknown: a code that ended the reading.
    """

    def __init__(self, values: Mapping[int, bytes], unknown: int | None) -> None:
        self._values, self._unknown = values, unknown
        self._modes: dict[Flavor, frozenset[str]] = {}

    @cached_property
    def charset(self) -> int | None:
        """The collation whose character set the statement's text has; None if it is not told."""
        found = self._values.get(_CHARSET)
        return None if found is None else int.from_bytes(found[:2], "little")

    def sql_mode(self, flavor: Flavor) -> frozenset[str]:
        """The modes that hold, of those that are known."""
        found = self._modes.get(flavor)
        if found is None:
            bits = self._number(_SQL_MODE)
            named = (name for place, name in enumerate(_MODES_OF[flavor]) if bits >> place & 1)
            found = self._modes[flavor] = frozenset(named)
        return found

    def session(
        self, flavor: Flavor, seconds: int, collation: Callable[[int], str], system_clock: Callable[[], str]
    ) -> dict[str, SessionValue]:
        """The session as the server's variables say it.

        Args:
            seconds: when the statement was run, since 1970.
            collation: a collation's name by its number.
            system_clock: what says which time zone SYSTEM is.

        Raises:
            ValueError: a variable is not known.
        """
        if self._unknown is not None:
            raise ValueError(
                f"it was run in a session of which a variable is not known (status variable {self._unknown})"
            )
        if self._number(_SQL_MODE) >> len(_MODES_OF[flavor]):
            raise ValueError(f"it was run in a sql_mode that is not known ({self._number(_SQL_MODE):#x})")
        found: dict[str, SessionValue] = {
            "timestamp": seconds + (self._number(_HRNOW) + self._number(_MICROSECONDS)) / 1_000_000,
            "sql_mode": ",".join(sorted(self.sql_mode(flavor))),
            "lc_time_names": self._number(_LC_TIME_NAMES),
        }
        increments = self._values.get(_AUTO_INCREMENT, b"\1\0\1\0")
        found["auto_increment_increment"] = int.from_bytes(increments[:2], "little")
        found["auto_increment_offset"] = int.from_bytes(increments[2:], "little")
        found |= self._flags(flavor) | self._collations(collation)
        if _TIME_ZONE in self._values:
            found["time_zone"] = zone = self._values[_TIME_ZONE].decode()
            if zone == SYSTEM:
                found["system_clock"] = system_clock()
        return found

    def _flags(self, flavor: Flavor) -> dict[str, SessionValue]:
        flags = self._number(_FLAGS)
        if flags & ~_KNOWN_FLAGS[flavor]:
            raise ValueError(f"it was run in a session with an option that is not known ({flags:#x})")
        found: dict[str, SessionValue] = {
            "unique_checks": int(not flags & _NO_UNIQUE), "sql_auto_is_null": int(bool(flags & _AUTO_IS_NULL)),
        }  # fmt: skip
        if flavor == "mariadb":
            found["check_constraint_checks"] = int(not flags & _NO_CONSTRAINTS)
            found["explicit_defaults_for_timestamp"] = int(bool(flags & _EXPLICIT))
            found["sql_if_exists"] = int(bool(flags & _IF_EXISTS))
        for name, code in (
            ("explicit_defaults_for_timestamp", _EXPLICIT_DEFAULTS), ("sql_require_primary_key", _NEEDS_KEY),
            ("default_table_encryption", _ENCRYPTION),
        ):  # fmt: skip
            if code in self._values:
                found[name] = self._number(code)
        return found

    def _collations(self, collation: Callable[[int], str]) -> dict[str, SessionValue]:
        found: dict[str, SessionValue] = {}
        charset = self._values.get(_CHARSET)
        if charset is not None:
            found["collation_connection"] = collation(int.from_bytes(charset[2:4], "little"))
            found["collation_server"] = collation(int.from_bytes(charset[4:], "little"))
        for name, code in (("collation_database", _CHARSET_DATABASE), ("default_collation_for_utf8mb4", _UTF8MB4)):
            if code in self._values:
                found[name] = collation(self._number(code))
        if _COLLATIONS in self._values:
            numbers = self._values[_COLLATIONS][1:]
            names = [collation(int.from_bytes(numbers[at : at + 2], "little")) for at in range(0, len(numbers), 2)]
            pairs = zip(names[::2], names[1::2], strict=True)
            found["character_set_collations"] = ",".join(f"{of.split('_')[0]}={name}" for of, name in pairs)
        return found

    def _number(self, code: int) -> int:
        return int.from_bytes(self._values.get(code, b""), "little")


@lru_cache(maxsize=1000)  # a session's statements have them alike
def status_variables(status: bytes) -> StatusVariables:
    """Read the variables of an event.

    Raises:
        ValueError: the last one is cut off.
    """
    values: dict[int, bytes] = {}
    at = 0
    while at < len(status):
        code, at = status[at], at + 1
        size = _size(status, code, at)
        if size is None:
            return StatusVariables(values, code)
        if at + size > len(status):
            raise ValueError(f"its status variable {code} is cut off")
        values[code] = status[at + 1 : at + size] if code == _TIME_ZONE else status[at : at + size]
        at += size
    return StatusVariables(values, None)


def _size(status: bytes, code: int, at: int) -> int | None:
    """How many bytes a variable's value has; None if the code is not known."""
    if code in _SIZES:
        return _SIZES[code]
    first = status[at] if at < len(status) else 0
    match code:
        case 2:  # catalog, with a zero
            return 2 + first
        case 5 | 6:  # time zone, catalog
            return 1 + first
        case 11:  # the user and host that have run it
            return 2 + first + (status[at + 1 + first] if at + 1 + first < len(status) else 0)
        case 12:  # databases, each with a zero
            return 1 if first == _MANY_DATABASES else _size_of_names(status, at + 1, first) + 1
        case 130:
            return 9 if first & _ALTER_ENDS else 1
        case 131:  # pairs of a character set, as its default collation, and a collation
            return 1 + 4 * first
    return None


def _size_of_names(status: bytes, at: int, count: int) -> int:
    end = at
    for _ in range(count):
        end = status.index(b"\0", end) + 1
    return end - at


# --- events -----------------------------------------------------------------------------------------------------------


def is_checked(event: bytes) -> bool:
    """Whether the event ends with its own checksum."""
    return zlib.crc32(event[:-4]) == int.from_bytes(event[-4:], "little")


def has_checksums(description: bytes) -> bool:
    """Whether this format description and the events after it have checksums."""
    return description[-5] == 1


class MariadbGtid(NamedTuple):
    """The event that opens a transaction of MariaDB."""

    domain: int
    sequence: int
    is_standalone: bool  # one statement follows, and ends it
    xid: Xid | None  # of an XA PREPARE: its rows follow
    is_unfinished_alter: bool  # an ALTER TABLE that has begun or was undone: its text follows, and changes nothing


def mariadb_gtid(body: bytes) -> MariadbGtid:
    """Read it from the bytes after the event's header, without checksum."""
    sequence, domain, flags = _MARIADB_GTID.unpack_from(body)
    at, xid = 13 + 8 * bool(flags & _GROUP_COMMIT_ID), None
    if flags & (_PREPARED_XA | _COMPLETED_XA):
        named = _xid(body, at + 6, int.from_bytes(body[at : at + 4], "little"), body[at + 4], body[at + 5])
        at += 6 + len(named.gtrid) + len(named.bqual)
        xid = named if flags & _PREPARED_XA else None
    extra = body[at] if at < len(body) else 0
    is_unfinished = bool(extra & (_START_ALTER | _ROLLBACK_ALTER))
    return MariadbGtid(domain, sequence, bool(flags & _STANDALONE), xid, is_unfinished)


def mysql_gtid(body: bytes) -> str:
    """``uuid:number`` of the event that opens a transaction of MySQL."""
    _flags, server, number = _MYSQL_GTID.unpack_from(body)
    return f"{UUID(bytes=server)}:{number}"


@dataclass(frozen=True, slots=True)
class Query:
    """A statement: its text in the client's character set, and its session."""

    database: str
    statement: bytes
    status: StatusVariables


def query(body: bytes, *, compressed: bool) -> Query:
    """Read a query event from the bytes after its header, without checksum."""
    _thread, _seconds, database_size, _error, status_size = _QUERY.unpack_from(body)
    behind = _QUERY.size + status_size
    database = body[behind : behind + database_size].decode()
    statement = body[behind + database_size + 1 :]
    if not statement:
        raise ValueError("it holds no statement")
    return Query(
        database, uncompressed(statement) if compressed else statement, status_variables(body[_QUERY.size : behind])
    )


def uncompressed(data: bytes) -> bytes:
    """What MariaDB's ``log_bin_compress`` has compressed: header, length, zlib.

    Raises:
        ValueError: it is compressed in another way, damaged, or too large.
        zlib.error: it is damaged.
    """
    header = data[0]
    behind = 1 + (header & 7)
    size = int.from_bytes(data[1:behind], "big")
    if header & 0xF8 != 0x80:
        raise ValueError(f"compressed in a way that is not known (header {header:#x})")
    if size > EVENT_BYTES_MAX:
        raise ValueError(f"an event of {size} bytes, over the limit of {EVENT_BYTES_MAX}")
    inflate = zlib.decompressobj()
    found = inflate.decompress(data[behind:], size + 1)
    if len(found) != size:
        raise ValueError(f"{size} compressed bytes have become {len(found)}")
    return found


def xa_prepare(body: bytes) -> tuple[Xid, bool]:
    """The xid of an XA PREPARE, and whether it was committed in the same breath (ONE PHASE)."""
    one_phase, format_id, gtrid_size, bqual_size = _XA_PREPARE.unpack_from(body)
    return _xid(body, _XA_PREPARE.size, format_id, gtrid_size, bqual_size), bool(one_phase)


def _xid(body: bytes, at: int, format_id: int, gtrid_size: int, bqual_size: int) -> Xid:
    middle = at + gtrid_size
    behind = middle + bqual_size
    if behind > len(body):
        raise ValueError(f"an xid of {gtrid_size} and {bqual_size} bytes has {len(body) - at}")
    return Xid(format_id, body[at:middle], body[middle:behind])


def rotation(body: bytes) -> str:
    """The name of the file that follows."""
    return body[8:].decode()
