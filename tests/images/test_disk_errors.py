"""EIO and ENOSPC at every write, sync and entry operation of a script, in each of its lives, once and for ever.

What must hold: nothing that was told is lost, a store whose journal failed refuses further work, and the next life
recovers, whether the process was killed (its cache lives on) or the power was lost (the disk has what the operations
left). That nothing is told after a failure follows from the same: what was told then would be missing.
"""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Iterator

import pytest

from tools.images.check import Player, check_image
from tools.images.scripts import SCRIPTS
from tools.simulated.disk import SimDisk
from tools.simulated.file import Kind
from txmq.errors import JournalFailedError, StorageError

CHOSEN = ("puts_around_checkpoints", "prepared_over_checkpoints", "journal_files", "retention_archives", "everything")
KINDS: tuple[Kind, ...] = ("write", "sync", "entry")
END_OF_LIFE = 1 << 30


class Fault:
    """One operation that fails: the nth of its kind, counted over all lives."""

    def __init__(self, nth: int, kind: Kind, number: int, *, forever: bool) -> None:
        self.nth, self.kind, self.number, self.forever = nth, kind, number, forever
        self._disks: list[SimDisk] = []

    def before_life(self, disk: SimDisk) -> None:
        """Install it for the life that begins on this disk."""
        passed = self.operations
        self._disks.append(disk)
        if passed < self.nth or self.forever:
            disk.fail_at(max(1, self.nth - passed), self.number, self.kind, forever=self.forever)

    @property
    def operations(self) -> int:
        """How many of the kind there have been."""
        return sum(disk.counts[self.kind] for disk in self._disks)

    def __str__(self) -> str:
        return f"{errno.errorcode[self.number]} at {self.kind} {self.nth}{' and after' if self.forever else ''}"


def _faults(name: str, kind: Kind, number: int, *, forever: bool) -> Iterator[Fault]:
    unharmed = Fault(END_OF_LIFE, kind, number, forever=False)
    Player(SCRIPTS[name], SimDisk(), before_life=unharmed.before_life).run()
    for nth in range(1, unharmed.operations + 1):
        yield Fault(nth, kind, number, forever=forever)


def _play(name: str, fault: Fault) -> tuple[SimDisk, str]:
    """Play the script up to the failure; the disk, and how it went: goes on, no start, journal failed, stopped."""
    player = Player(SCRIPTS[name], SimDisk(random.Random(fault.nth)), before_life=fault.before_life)
    try:
        player.run()
        return player.disk, "goes on"
    except (OSError, StorageError):
        pass
    if not hasattr(player, "node") or player.node.disk is not player.disk:
        return player.disk, "no start"
    if not player.node.store.journal.failed:
        return player.disk, "stopped"
    _refuses(player)
    return player.disk, "journal failed"


def _refuses(player: Player) -> None:
    journal = player.node.store.journal
    with pytest.raises(JournalFailedError):
        journal.sync()
    with pytest.raises(JournalFailedError):
        journal.append(b"more")


@pytest.mark.parametrize("forever", [False, True], ids=["once", "for ever"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=errno.errorcode.get)
@pytest.mark.parametrize("name", CHOSEN)
def test_an_error_of_the_disk_loses_nothing_that_was_told(name: str, number: int, forever: bool) -> None:
    seen: Counter[str] = Counter()
    for kind in KINDS:
        for fault in _faults(name, kind, number, forever=forever):
            for power_lost in (False, True):
                disk, how = _play(name, fault)
                seen[how] += 1
                after = disk.crash() if power_lost else disk.kill()
                try:
                    check_image(SCRIPTS[name], after)
                except Exception as error:
                    raise AssertionError(f"{name}, {fault}, {how}, {power_lost=}: {error!r}") from error
    print(f"{name}: {dict(seen)}")
    assert min(seen["journal failed"], seen["no start"], seen["stopped"]) > 0
