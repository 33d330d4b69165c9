"""``txmq audit --database binlog:FILE``: the rows are a binlog's row changes, or with ``--table`` a table's rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from txmq.cli.audit.request import Request
from txmq.cli.binlog.options import settings_of
from txmq.errors import ConfigError

if TYPE_CHECKING:
    from txmq.binlog.config import BinlogSettings
    from txmq.binlog.decoded_changes import TableName

SCHEME = "binlog:"
_UNUSED = (
    "match", "compare", "order", "row_time", "row_txid", "transaction_size", "together", "since", "until",
    "from_offsets", "to_offsets", "interval", "latest",
)  # fmt: skip
_OPTIONS = {"since": "from", "until": "to", "interval": "follow"}


def binlog_of(request: Request) -> BinlogSettings | None:
    """The settings of the sync whose binlog is audited; None if it is a table.

    Raises:
        ConfigError: names the option that does not fit, or the file and the key.
    """
    if not request.database.startswith(SCHEME):
        return None
    for name in _UNUSED:
        if getattr(request, name):
            option = _OPTIONS.get(name, name).replace("_", "-")
            raise ConfigError(f"--{option}: a binlog says by itself what belongs together: leave it out")
    return settings_of(Path(request.database.removeprefix(SCHEME)), None, unused="apply")


def table_of(request: Request) -> TableName | None:
    """The table whose rows are audited; None: the row changes are.

    Raises:
        ConfigError: it is not named with its database.
    """
    from txmq.binlog.decoded_changes import TableName

    if request.table is None:
        return None
    database, dot, name = request.table.partition(".")
    if not (database and dot and name):
        raise ConfigError(f"--table {request.table[:80]!r}: expected DATABASE.TABLE, as the topic's events name it")
    return TableName(database, name)
