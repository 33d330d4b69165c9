"""A local store: an SQLite file of txmq's own, for what must survive a kill (spools, retry stores).

Write-ahead log and ``synchronous=FULL``: what was committed is on disk. A store is of one version, which its file
names; a file of another version is refused, and nothing in it is changed.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from txmq.errors import StorageError
from txmq.runtime.private_files import open_private

BUSY_S = 5.0  # that another process may hold the file


def open_store(file: Path, schema: str, version: int, what: str, *, read_only: bool = False) -> sqlite3.Connection:
    """Open a store, which is made if it is missing and may be written; for any thread, in autocommit.

    Args:
        schema: the statements that make its tables.
        what: what kind of store it is, for the error.

    Raises:
        StorageError: the disk or SQLite refused, or it is of another version.
    """
    with storage_errors(file):
        if not read_only:
            open_private(file, "ab").close()  # SQLite gives its other files the mode of this one
        target = f"{file.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}"
        database = sqlite3.connect(target, uri=True, isolation_level=None, check_same_thread=False, timeout=BUSY_S)
        try:
            found: int = database.execute("PRAGMA user_version").fetchone()[0]
            if found not in ((version,) if read_only else (0, version)):
                raise StorageError(f"{file}: version {found} of a {what}, this txmq reads {version}")
            if not read_only:
                _prepare(database, file, schema, version)
        except BaseException:
            database.close()
            raise
    return database


def _prepare(database: sqlite3.Connection, file: Path, schema: str, version: int) -> None:
    """Force each commit, and make the tables if there are none."""
    mode = database.execute("PRAGMA journal_mode=WAL").fetchone()[0]
    database.execute("PRAGMA synchronous=FULL")
    if mode != "wal":
        raise StorageError(f"{file}: SQLite cannot use its write-ahead log here (journal_mode {mode})")
    database.execute("BEGIN IMMEDIATE")  # two that make it at once: the second finds it made
    if database.execute("PRAGMA user_version").fetchone()[0] == 0:
        for statement in schema.split(";"):
            database.execute(statement)
        database.execute(f"PRAGMA user_version={version}")
    database.execute("COMMIT")


@contextmanager
def storage_errors(file: Path) -> Iterator[None]:
    """Errors of the disk and of SQLite are ``StorageError``."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise StorageError(f"{file}: {error}") from error
