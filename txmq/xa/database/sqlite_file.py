"""The file of an SQLite database: which it is; and opened by a resolver, it is never made anew."""

from __future__ import annotations

import sqlite3
from types import ModuleType
from typing import Any
from urllib.parse import quote

from txmq.xa.database.dbapi import Connection, run


def main_file(connection: Connection) -> str:
    """The absolute path of the connection's file; empty for a database in memory."""
    return next((str(path) for _, name, path in run(connection, "PRAGMA database_list")[0] if name == "main"), "")


def open_existing(driver: ModuleType | None, path: str, timeout_s: float) -> Any:
    """Open a file that is there.

    Args:
        driver: of the application's own connections; None if it is not known.

    Raises:
        the driver's error: it is not there, or cannot be opened.
    """
    connect = sqlite3.connect if driver is None else driver.connect
    return connect(f"file:{quote(path)}?mode=rw", uri=True, timeout=timeout_s)
