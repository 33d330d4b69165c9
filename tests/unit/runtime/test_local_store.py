"""Local stores: a file of another version."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from txmq.errors import StorageError
from txmq.runtime.local_store import open_store


@pytest.mark.parametrize("read_only", [False, True])
def test_file_of_another_version_is_refused_and_not_changed(tmp_path: Path, read_only: bool) -> None:
    file = tmp_path / "store"
    with closing(sqlite3.connect(file, isolation_level=None)) as database:
        database.execute("PRAGMA user_version = 9")
    before = file.read_bytes()
    with pytest.raises(StorageError, match="version 9 of a shelf, this txmq reads 2"):
        open_store(file, "CREATE TABLE one (id INTEGER)", 2, "shelf", read_only=read_only)
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
