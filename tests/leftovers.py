"""What the tests leave on disk, and when it goes."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from pathlib import Path

import pytest

LASTING = "session"  # folders whose names begin like this are of fixtures that outlive a file
_STAY = (LASTING, ".")  # and pytest's .lock: without it another run takes the whole for abandoned, and deletes it


class Leftovers:
    """A plugin: when the tests of a file have passed, the folders of its fixtures go; else they stay for the reader.

    pytest itself removes the ``tmp_path`` of a test that passed, and keeps what ``tmp_path_factory`` makes.

    Args:
        base: where all of them are.
    """

    def __init__(self, base: Path) -> None:
        self._base = base
        self._kept: set[Path] = set()
        self._failed = 0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        """Look at the disk after the last test of a file: its fixtures are gone, and all has been reported."""
        done = yield
        if nextitem is None or nextitem.path != item.path:
            self._end_file(item.session.testsfailed)
        return done

    def _end_file(self, failed: int) -> None:
        left = [path for path in self._base.iterdir() if not path.name.startswith(_STAY) and path not in self._kept]
        if failed > self._failed:
            self._failed = failed
            self._kept.update(left)
            return
        for path in left:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:  # a broker's log is beside its folder
                path.unlink(missing_ok=True)
