"""What ``txmq audit`` was asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Request:
    """The options, as they were typed. ``interval``: keep auditing."""

    topic: str
    database: str
    table: str | None
    match: tuple[str, ...]
    compare: tuple[str, ...]
    order: str | None
    row_time: str | None
    row_txid: str | None
    transaction_size: str | None
    together: tuple[str, ...]
    since: str | None
    until: str | None
    from_offsets: str | None
    to_offsets: str | None
    settle: str
    interval: str | None
    directory: Path
    master: str
    memory: str
    bootstrap: str
    latest: bool = False
    late: str = "1h"
