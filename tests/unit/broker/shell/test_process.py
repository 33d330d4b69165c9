"""A broker that starts while space or descriptors lack waits for them; other errors end it."""

from __future__ import annotations

import errno
import random

import pytest

from tools.images.node import Node
from tools.simulated.clock import SimClock, SimRandom
from tools.simulated.disk import SimDisk
from tools.simulated.file import Kind, SimFile
from txmq.broker.commit.data_directory import open_store
from txmq.broker.shell.process import ROOM_RETRY_S, _when_there_is_room

from ..support import node, put, values


class Waits(SimClock):
    """Notes how often the broker sleeps, and makes room the third time."""

    def __init__(self, disk: SimDisk) -> None:
        super().__init__()
        self.slept: list[float] = []
        self._disk, self._files, self._open = disk, list[SimFile](), disk.open
        disk.open = self._opened  # type: ignore[method-assign]

    def _opened(self, path: str, **how: bool) -> SimFile:
        self._files.append(self._open(path, **how))
        return self._files[-1]

    def sleep(self, seconds: float) -> None:
        """Look that the try before has left no file open."""
        assert [file.path for file in self._files if not file._closed] == []
        self.slept.append(seconds)
        if len(self.slept) == 3:
            self._disk.clear_faults()


@pytest.mark.parametrize(
    ("number", "kind", "where"),
    [
        (errno.ENOSPC, "write", "log/"), (errno.EDQUOT, "write", "log/"), (errno.EMFILE, "open", "log/"),
        (errno.ENOSPC, "write", "journal/"), (errno.EMFILE, "open", "journal/"),
    ],
)  # fmt: skip
def test_start_without_room_waits_for_it(number: int, kind: Kind, where: str) -> None:
    broker = node()
    put(broker.connect(), b"1")
    disk = broker.kill()
    clock = Waits(disk)
    disk.fail_at(1, number, kind, forever=True, path_prefix=where)
    recovered = _when_there_is_room(
        clock, lambda: open_store(disk, clock, SimRandom(random.Random(1)), broker.settings)
    )
    assert clock.slept == [ROOM_RETRY_S] * 3
    recovered.store.close()
    assert values(Node(disk.kill(), broker.settings)) == [b"1"]


def test_start_on_a_broken_disk_ends() -> None:
    broker = node()
    put(broker.connect(), b"1")
    disk = broker.kill()
    disk.fail_at(1, errno.EIO, "write", forever=True, path_prefix="log/")
    with pytest.raises(OSError, match="Input/output"):
        _when_there_is_room(
            SimClock(), lambda: open_store(disk, SimClock(), SimRandom(random.Random(1)), broker.settings)
        )
