"""The file of an SQLite database, as one who settles finds it: never made anew."""

from __future__ import annotations

import sqlite3
from types import ModuleType
from typing import Any
from urllib.parse import quote


def open_existing(driver: ModuleType | None, path: str, timeout_s: float) -> Any:
    """Open a file that is there.

    Args:
        driver: of the application's own connections; None where nobody can tell.

    Raises:
        the driver's error: it is not there, or cannot be opened.
    """
    connect = sqlite3.connect if driver is None else driver.connect
    return connect(f"file:{quote(path)}?mode=rw", uri=True, timeout=timeout_s)
