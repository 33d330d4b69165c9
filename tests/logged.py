"""What the library has logged, as an application's handlers see it."""

from __future__ import annotations

from typing import Any

import pytest


def said(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """Levels, events and fields since it was last asked for."""
    found = [
        {"level": record.levelname.lower(), **vars(record)["txmq"]}
        for record in caplog.records
        if "txmq" in vars(record)
    ]
    caplog.clear()
    return found
