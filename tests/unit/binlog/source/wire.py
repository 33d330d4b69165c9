"""Events as a server writes them, made by hand, and a reader over them that asks no database.

MySQL's are made after its documentation ("Binlog Event", MySQL 8.0): no server of it can be installed where txmq is
built. MariaDB's own are in ``recorded.py``.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import Any
from uuid import UUID

from txmq.binlog.decoded_changes import Ddl, Origin, TableName, TransactionPart
from txmq.binlog.position import Position
from txmq.binlog.source.charsets import Charset
from txmq.binlog.source.options import SourceOptions
from txmq.binlog.source.rows import TableDescription
from txmq.binlog.source.transactions import TransactionReader

SERVER = UUID("3e11fa47-71ca-11e1-9e33-c80aa9429562")
LATIN1, UTF8MB4, BINARY = 8, 45, 63
DESCRIPTION, QUERY, ROTATE, XID, TABLE_MAP, MYSQL_GTID, XA_PREPARE = 15, 2, 4, 16, 19, 33, 38
WRITE, UPDATE, DELETE = 30, 31, 32  # version 2, as MySQL writes them


def event(kind: int, body: bytes, *, flags: int = 0, position: int = 1000) -> bytes:
    """An event with header and checksum."""
    size = 19 + len(body) + 4
    head = struct.pack("<IBIIIH", 1_795_424_700, kind, 1, size, position, flags)
    return head + body + zlib.crc32(head + body).to_bytes(4, "little")


def gtid(number: int) -> bytes:
    """What opens a transaction of MySQL."""
    commit = b"\x02" + struct.pack("<QQ", number - 1, number)  # for parallel replicas
    return event(MYSQL_GTID, b"\x01" + SERVER.bytes + struct.pack("<Q", number) + commit)


def query(statement: str, database: str = "shop") -> bytes:
    """A statement; its status says flags, SQL mode, catalog and character set, as a server's does."""
    status = b"\0" + bytes(4) + b"\x01" + bytes(8) + b"\x06\x03std" + b"\x04" + struct.pack("<HHH", *[UTF8MB4] * 3)
    name = database.encode()
    head = struct.pack("<IIBHH", 7, 0, len(name), 0, len(status))
    return event(QUERY, head + status + name + b"\0" + statement.encode())


def xid() -> bytes:
    """The end of a transaction."""
    return event(XID, (99).to_bytes(8, "little"))


def table_map(number: int = 5, database: str = "shop", table: str = "t") -> bytes:
    """``(id BIGINT UNSIGNED PRIMARY KEY, v VARCHAR(10), doc JSON)`` with full metadata."""
    names = b"".join(sized(name) for name in (b"id", b"v", b"doc"))
    optional = field(1, b"\x80") + field(2, bytes([UTF8MB4])) + field(4, names) + field(8, b"\x00")
    types = bytes([8, 15, 245])
    metadata = (40).to_bytes(2, "little") + b"\x04"
    named = sized(database.encode()) + b"\0" + sized(table.encode()) + b"\0"
    described = named + sized(types) + sized(metadata) + b"\x06" + optional
    return event(TABLE_MAP, number.to_bytes(6, "little") + b"\x01\0" + described)


def rows(kind: int, *images: bytes, number: int = 5) -> bytes:
    """A rows event of version 2: after the flags come two bytes that say there is no more."""
    present = b"\x07" * (2 if kind == UPDATE else 1)
    return event(kind, number.to_bytes(6, "little") + b"\x01\0" + b"\x02\0" + b"\x03" + present + b"".join(images))


def image(id_: int, v: str, doc: bytes | None = None) -> bytes:
    """A row of ``table_map``."""
    nulls = b"\x04" if doc is None else b"\0"
    tail = b"" if doc is None else len(doc).to_bytes(4, "little") + doc
    return nulls + id_.to_bytes(8, "little") + sized(v.encode()) + tail


def field(kind: int, value: bytes) -> bytes:
    """A field of a table map's optional metadata."""
    return bytes([kind]) + sized(value)


def sized(value: bytes) -> bytes:
    """A value after its length, below 251."""
    return bytes([len(value)]) + value


class NoDatabase:
    """What the reader asks of a database: nothing more than the binlog tells."""

    def __init__(self) -> None:
        self.asked: list[TableName] = []
        self.statements: list[str] = []

    def describe(self, table: TableName) -> TableDescription:
        """See ``Catalog``."""
        self.asked.append(table)
        return TableDescription()

    def later(self, table: TableName, columns: Sequence[str], file: str, offset: int) -> TableDescription:
        """See ``Catalog``."""
        return TableDescription()

    def charset(self, number: int) -> Charset:
        """See ``Catalog``."""
        if number == LATIN1:
            return Charset("latin1", 1, lambda raw: raw.decode("latin-1"))
        return Charset("utf8mb4", 4, bytes.decode)

    def collation(self, number: int) -> str:
        """See ``Catalog``."""
        return {LATIN1: "latin1_swedish_ci", UTF8MB4: "utf8mb4_general_ci"}[number]

    def database_collation(self, database: str) -> str:
        """See ``Catalog``."""
        return f"of {database}"

    def system_clock(self) -> str:
        """See ``Catalog``."""
        return "UTC"

    def changed(self, ddl: Ddl) -> None:
        """See ``Catalog``."""
        self.statements.append(ddl.statement)


def reader(position: Position, **options: Any) -> TransactionReader:
    """A reader that begins after a position, and captures the database ``shop``."""
    given: dict[str, Any] = {"name": "test", "server_id": 9, "captures": lambda table: table.database == "shop"}
    return TransactionReader(
        SourceOptions(**(given | options)), Origin(position.flavor, "server"), position, NoDatabase()
    )


def read(events: Iterable[bytes], position: Position, **options: Any) -> list[TransactionPart]:
    """The parts that events make."""
    made = reader(position, **options)
    for one in events:
        made.feed(one)
    return list(made.ready)
