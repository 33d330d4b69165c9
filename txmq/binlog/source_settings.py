"""The settings as the source takes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from txmq.binlog.config import BinlogSettings, named_by
from txmq.binlog.decoded_changes import TableName
from txmq.binlog.source import SourceOptions

SYSTEM_DATABASES = frozenset({"mysql", "information_schema", "performance_schema", "sys"})


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
