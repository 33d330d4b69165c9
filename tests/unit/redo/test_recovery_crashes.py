"""Every crash image of small lives of a journal, of its recovery, and of the recovery after that; and every I/O error.

What must hold in each image: what was acknowledged (noted after a sync) is recovered, in order, nothing else than what
was appended, without holes; and what one recovery has returned, the next one returns too.
"""

from __future__ import annotations

import errno
import itertools
import json
import random
from collections.abc import Callable, Iterator

import pytest

from tools.simulated.crash_images import enumerate_images
from tools.simulated.disk import SimDisk
from txmq.errors import JournalFailedError, JournalFullError, StorageError
from txmq.redo import checkpoint

from .support import NODE, open_journal, payload

FIRST, SECOND = 90, 20  # records of a life, and of the life after it


class Life:
    """One process: opens, appends numbered payloads, takes checkpoints; notes on the disk what it has acknowledged."""

    def __init__(self, disk: SimDisk) -> None:
        newest, _ = checkpoint.load_newest(disk, node_id=NODE)
        base = json.loads(newest.state) if newest else 0
        lsn, chain = (newest.lsn, newest.chain) if newest else (0, 0)
        self.disk = disk
        self.journal, payloads = open_journal(disk, from_lsn=lsn, from_chain=chain)
        self.count = base + len(payloads)
        assert payloads == [payload(number, _length(number)) for number in range(base, self.count)]

    def run(self, count: int) -> None:
        """Append, with a sync, a mark, a prepared file, a checkpoint now and then."""
        for _ in range(count):
            self.journal.append(payload(self.count, _length(self.count)))
            self.count += 1
            if self.count % (3 if self.count < 40 else 8) == 0:  # short groups, then long ones
                self.sync()
            if self.count % 11 == 0:
                self.journal.mark()
                self.acknowledge()
            if self.count % 17 == 0:
                self.journal.prepare_next()
            if self.count % 13 == 0:
                self.take_checkpoint()

    def sync(self) -> None:
        self.journal.sync()
        self.acknowledge()

    def acknowledge(self) -> None:
        self.disk.note(self.count)

    def take_checkpoint(self) -> None:
        self.sync()
        state = json.dumps(self.count).encode()
        made = checkpoint.Checkpoint(self.journal.next_lsn, self.journal.chain, self.journal.epoch, state)
        checkpoint.write(self.disk, made, node_id=NODE)
        self.journal.release(checkpoint.oldest_kept_lsn(self.disk))


def _length(number: int) -> int:
    return (300, 90, 700, 1, 1100)[number % 5]


def _acknowledged(disk: SimDisk) -> int:
    return max((note for note in disk.notes if isinstance(note, int)), default=0)


def _recover(disk: SimDisk, label: str, at_most: int) -> Life:
    try:
        life = Life(disk)
    except BaseException as error:
        raise AssertionError(f"image {label} does not recover") from error
    assert _acknowledged(disk) <= life.count <= at_most, label
    return life


def _every_nth(images: Iterator[tuple[str, SimDisk]], nth: int) -> Iterator[tuple[str, SimDisk]]:
    return itertools.islice(images, 0, None, nth)


def test_every_image_of_a_life_recovers_what_was_acknowledged() -> None:
    disk = SimDisk(record=True)
    Life(disk).run(FIRST)
    trace = disk.trace
    assert trace is not None
    count = 0
    for label, image in enumerate_images(trace):
        count += 1
        life = _recover(image, label, FIRST)
        life.run(2)
        life.sync()
        again = _recover(image.crash(), f"{label}, after going on", life.count)
        assert again.count == life.count, label
    assert count > 1000


def test_every_image_of_nested_recoveries_keeps_what_was_recovered() -> None:
    """Crash in the life, in the recovery, in the recovery of that: three deep, sampled evenly."""
    disk = SimDisk(record=True)
    Life(disk).run(SECOND)
    assert disk.trace is not None
    counts = [0, 0, 0]
    for label, first in _every_nth(enumerate_images(disk.trace), 2):
        counts[0] += 1
        for second_label, second in _every_nth(_images_of_recovery(first, label), 2):
            counts[1] += 1
            for third_label, third in _every_nth(_images_of_recovery(second, f"{label} / {second_label}"), 3):
                counts[2] += 1
                _recover(third, f"{label} / {second_label} / {third_label}", SECOND)
    assert min(counts) > 80, counts


def _images_of_recovery(disk: SimDisk, label: str) -> Iterator[tuple[str, SimDisk]]:
    """Crash images of recovering ``disk``; what it returned counts as acknowledged from then on."""
    trace = disk.start_trace()
    before = list(disk.notes)
    disk.note(_recover(disk, label, SECOND).count)
    for name, image in enumerate_images(trace):
        image.notes = [*before, *image.notes]
        yield name, image


@pytest.mark.parametrize("seed", range(150))
def test_lives_with_power_losses_drawn_at_random_lose_nothing(seed: int) -> None:
    rng = random.Random(seed)
    disk, acknowledged = SimDisk(rng), 0
    for _ in range(8):
        life = Life(disk)
        assert life.count >= acknowledged
        life.run(rng.randint(0, 25))
        acknowledged = max(acknowledged, _acknowledged(disk))
        disk = disk.kill() if rng.random() < 0.3 else disk.crash()


# --- errors of the disk ----------------------------------------------------------------------------------------------

Ending = Callable[[SimDisk], SimDisk]
ENDINGS = {"power loss": SimDisk.crash, "killed": SimDisk.kill}


def _operations(kind: str) -> int:
    disk = SimDisk()
    Life(disk).run(FIRST)
    return disk.counts[kind]


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS.keys())
@pytest.mark.parametrize("kind", ["write", "sync", "entry", "open"])
def test_an_eio_anywhere_stops_the_journal_and_loses_nothing_acknowledged(kind: str, ending: Ending) -> None:
    failures = 0
    for nth in range(1, _operations(kind) + 1):
        disk = SimDisk(random.Random(nth))
        disk.fail_at(nth, errno.EIO, kind)  # type: ignore[arg-type]
        life: Life | None = None
        try:
            life = Life(disk)
            life.run(FIRST)
        except (JournalFailedError, OSError):
            failures += 1
        if life is not None and life.journal.failed:
            with pytest.raises(JournalFailedError):
                life.journal.sync()
        after = ending(disk)
        after.clear_faults()
        recovered = _recover(after, f"{kind} {nth}", FIRST)
        recovered.run(3)
        recovered.sync()
        assert _recover(after.crash(), f"{kind} {nth}, again", FIRST + 3).count == recovered.count
    assert failures > 5


def test_recovery_notices_a_failed_sync_and_a_lying_cache() -> None:
    """fsyncgate: the pages are clean and show what the disk lacks; what recovery returns is on the disk."""
    for nth in range(1, _operations("sync") + 1):
        disk = SimDisk(fsyncgate=True)
        disk.fail_at(nth, errno.EIO, "sync")
        try:
            Life(disk).run(FIRST)
        except (JournalFailedError, OSError):
            pass
        killed = disk.kill()
        killed.clear_faults()
        recovered = _recover(killed, f"sync {nth}", FIRST)
        assert _recover(killed.crash(), f"sync {nth}, after a power loss", FIRST).count == recovered.count


@pytest.mark.parametrize("kind", ["write", "sync", "entry"])
def test_enospc_anywhere_is_full_or_failed_and_loses_nothing_acknowledged(kind: str) -> None:
    seen: set[type[Exception]] = set()
    for nth in range(1, _operations(kind) + 1):
        disk = SimDisk(random.Random(nth))
        disk.fail_at(nth, errno.ENOSPC, kind)  # type: ignore[arg-type]
        life: Life | None = None
        try:
            life = Life(disk)
            life.run(FIRST)
        except JournalFullError as error:
            seen.add(type(error))
            if life is not None:
                _goes_on(life)
        except (StorageError, OSError) as error:
            seen.add(type(error))
        after = disk.crash()
        _recover(after, f"{kind} {nth}", FIRST + 1)
    assert JournalFailedError in seen or OSError in seen
    assert kind == "entry" or JournalFullError in seen


def _goes_on(life: Life) -> None:
    """After JournalFullError the same journal takes what fits, and with space again everything."""
    assert not life.journal.failed
    life.journal.append(payload(life.count, _length(life.count)))
    life.count += 1
    life.sync()


def test_life_on_disk_that_fills_up_at_any_point_recovers() -> None:
    full = 0
    for free in range(0, 120_000, 1_500):
        disk = SimDisk(random.Random(free), capacity_bytes=free)
        try:
            Life(disk).run(FIRST)
        except (StorageError, OSError):
            full += 1
        after = disk.crash()
        after.capacity_bytes = 1 << 30
        _recover(after, f"{free} bytes free", FIRST)
    assert full > 10


def test_recovery_on_a_full_disk_needs_no_room() -> None:
    disk = SimDisk()
    life = Life(disk)
    life.run(10)
    life.sync()
    life.journal.append(b"not forced")
    after = disk.kill()
    after.set_free_bytes(0)
    journal, payloads = open_journal(after)
    assert len(payloads) == 11
    journal.append(b"decided")
    journal.sync()
