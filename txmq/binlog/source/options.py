"""What the reader of a binlog is told, and how the settings say it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from txmq.addresses import TlsFiles
from txmq.binlog.config import BinlogSettings, named_by
from txmq.binlog.decoded_changes import TRANSACTION_BYTES_MAX, TRANSACTION_ROWS_MAX, TableName
from txmq.xa.database.mysql_server import tls_arguments

SERVER_ID_MAX = (1 << 32) - 1
SYSTEM_DATABASES = frozenset({"mysql", "information_schema", "performance_schema", "sys"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """Which server is read, as which replica, and which tables.

    Args:
        name: of the sync: under it the server lists this replica.
        server_id: of this replica; no other replica of the server, nor the server itself, has it.
        captures: whether a table's changes are wanted. Shadow tables of online-alter tools are not asked for.
        user: needs REPLICATION SLAVE, BINLOG MONITOR (MySQL: REPLICATION CLIENT), and SELECT on the captured tables.
        tls: how it is spoken; None: it is not.
        rows_max: changes of a part.
        bytes_max: bytes of a part's events.
        silence_s_max: the server counts as away after so many seconds without an event or heartbeat.
        connect_timeout_s: how long a connection may take.
        answer_s_max: the server counts as away if a question has no answer for so long.
        accept_server: go on from the position on another server although nothing proves that it has the same history.
        skipped: ids of transactions whose changes without row events are passed over.
        cascades: whether captured tables may have foreign keys whose actions the binlog does not show.
    """

    name: str
    server_id: int
    captures: Callable[[TableName], bool]
    host: str = "127.0.0.1"
    port: int = 3306
    unix_socket: str | None = None
    user: str = "root"
    password: str = ""
    tls: TlsFiles | None = None
    rows_max: int = TRANSACTION_ROWS_MAX
    bytes_max: int = TRANSACTION_BYTES_MAX
    silence_s_max: float = 10.0
    connect_timeout_s: int = 10
    answer_s_max: int = 60
    accept_server: bool = False
    cascades: Literal["stop", "pass"] = "stop"
    skipped: frozenset[str] = frozenset()

    def connect_arguments(self) -> dict[str, Any]:
        """What MySQLdb and PyMySQL take."""
        where: dict[str, Any] = {"host": self.host, "port": self.port} | tls_arguments(self.tls)
        if self.unix_socket:
            where = {"unix_socket": self.unix_socket}
        who = {"user": self.user, "password": self.password}
        timeouts = {"connect_timeout": self.connect_timeout_s}
        timeouts |= dict.fromkeys(("read_timeout", "write_timeout"), self.answer_s_max)
        return where | who | timeouts | {"charset": "utf8mb4", "autocommit": True}


def source_options(settings: BinlogSettings) -> SourceOptions:
    """What the source is told."""
    source, publish = settings.source, settings.publish
    return SourceOptions(
        name=settings.name, server_id=settings.server_id, captures=captures(source.tables, source.exclude),
        host=source.host, port=source.port, unix_socket=source.unix_socket or None, user=source.user,
        password=source.password, tls=source.tls,
        rows_max=publish.transaction_rows_max, bytes_max=publish.transaction_bytes_max,
        silence_s_max=source.silence_ms_max / 1000, connect_timeout_s=source.connect_timeout_ms // 1000,
        accept_server=source.accept_server, cascades="pass" if source.cascades == "pass" else "stop",
    )  # fmt: skip


def captures(tables: Sequence[str], exclude: Sequence[str]) -> Callable[[TableName], bool]:
    """Which tables the patterns name. The server's own databases are not among those of ``*``."""
    wanted, others = _matcher(tables), _matcher(exclude)
    own = SYSTEM_DATABASES - {named_by(pattern)[0] for pattern in tables}
    return lambda table: (
        table.database not in own and bool(wanted.fullmatch("\0".join(table)))
        and not others.fullmatch("\0".join(table))
    )  # fmt: skip


def _matcher(patterns: Sequence[str]) -> re.Pattern[str]:
    """Of names with a zero between database and table: no name has one, while it may have dots."""
    found = [re.escape("\0".join(named_by(pattern))).replace(r"\*", "[^\0]*") for pattern in patterns]
    return re.compile("|".join(found) or "(?!)", re.DOTALL)
