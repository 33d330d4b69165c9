"""Events of the binlog, but for rows and table maps: header, checksum, and what each kind carries.

    timestamp 4 | type 1 | server id 4 | size 4 | position after 4 | flags 2 | body | CRC32 4, if the file has them

Sources: MariaDB, "Replication Protocol: Event Types"; MariaDB server 10.11, ``sql/log_event.h``; MySQL 8.0,
"Binlog Event".
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from struct import Struct
from typing import Final, Literal, NamedTuple
from uuid import UUID

from pymysqlreplication.constants import BINLOG

from txmq.binlog.source.status_variables import StatusVariables, status_variables
from txmq.xid import Xid

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
