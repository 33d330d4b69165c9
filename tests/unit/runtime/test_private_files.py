"""Files that txmq leaves outside of a data directory are for their owner alone."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from txmq.errors import ConfigError
from txmq.runtime.private_files import make_private_directory, open_private, private_umask, read_private, write_private


@pytest.fixture(autouse=True)
def _generous() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def test_private_file_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    write_private(path, "pencil\n")
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_private(path) == "pencil\n"
    with pytest.raises(FileExistsError):
        write_private(path, "other")
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"not its owner alone may read it \(mode 0640\); chmod 600"):
        read_private(path)


@pytest.mark.parametrize("mode", ["x", "w", "a", "xb", "wb", "ab"])
def test_what_is_made_is_its_owners_alone(mode: str, tmp_path: Path) -> None:
    make_private_directory(tmp_path / "above" / "below")
    file = tmp_path / "above" / "below" / "file"
    open_private(file, mode).close()
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_programs_that_are_started_in_the_block_make_private_files(tmp_path: Path) -> None:
    with private_umask():
        subprocess.run(["touch", str(tmp_path / "inside")], check=True)
    subprocess.run(["touch", str(tmp_path / "outside")], check=True)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("inside", "outside")] == [0o600, 0o666]


def test_what_is_there_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "file").chmod(0o640)
    write_private(tmp_path / "file", "new", "w")
    make_private_directory(tmp_path)
    assert ((tmp_path / "file").read_text(), (tmp_path / "file").stat().st_mode & 0o777) == ("new", 0o640)
    with pytest.raises(FileExistsError):
        make_private_directory(tmp_path, exist_ok=False)
