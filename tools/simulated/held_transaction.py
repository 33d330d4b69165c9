"""A simulated broker's record of one transaction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from txmq.client.transaction.messages import Streamed


@dataclass
class HeldTransaction:
    """See the module's docstring."""

    state: str = "open"
    parts: list[tuple[str, int, bytearray]] = field(default_factory=list)
    streamed: Streamed = field(default_factory=Streamed)
    meta: dict[str, Any] = field(default_factory=dict)
    lines: bytes = b""
    branches: list[dict[str, Any]] = field(default_factory=list)
    heuristics: list[tuple[str, str]] = field(default_factory=list)
    checks: int = 0
    homes: dict[str, bool] = field(default_factory=dict)  # branches at other homes, and which have reported
