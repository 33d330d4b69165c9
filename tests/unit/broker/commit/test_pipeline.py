"""Liveness of the commit pipeline: under load that never pauses, what is due happens within so many steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tools.images.node import Node, small_settings
from tools.images.requests import batch
from tools.simulated.disk import SimDisk
from txmq.broker.commit.journal_schedule import UNSYNCED_BYTES_MAX
from txmq.broker.commit.pipeline import MARK_BUSY_S
from txmq.broker.commit.retention import retire
from txmq.broker.commit.steps import Apply, Checkpoint, JournalStep, Mark, Release, Remove, Step

STEP_S = 0.005  # simulated
STEPS = 600
BESIDE = 7  # steps that run while a checkpoint is written
KIB, MIB = 1 << 10, 1 << 20
SIZES = {"small": (300,), "large": (MIB + 1,), "mixed": (300, MIB + 1, 40_000, 300)}
SYNC_GAP = {"always": 6, "interval": 30, "never": 210}  # steps from one sync to the next; never syncs once a second


class Endless:
    """A node in whose queue there is another put at every step."""

    def __init__(self, sync: str, sizes: tuple[int, ...]) -> None:
        settings = small_settings(sync=sync, request_size_bytes_max=4 * MIB, batch_size_bytes_max=4 * MIB)
        object.__setattr__(settings, "journal_file_size_bytes", 4 * MIB)
        object.__setattr__(settings, "checkpoint_interval_bytes", 16 * KIB)
        self.node = Node(SimDisk(), settings)
        self._client = self.node.connect()
        words = {"segment_size_bytes": 64 * KIB, "retention_size_bytes": 64 * KIB}
        assert self._client.ask("topic", "create", "a", extensions=words).code == 200
        self._puts: Iterator[bytes] = itertools.cycle([batch(bytes(size)) for size in sizes])
        self._beside: list[tuple[int, Step]] = []
        self._count = 0

    def step(self) -> Step:
        """Run the next one; a checkpoint runs later, after others have overtaken it."""
        node, self._count = self.node, self._count + 1
        while node.core.next_group() is None or node.context.queued_bytes() < 64 * KIB:
            self._client.send("put", "a", 0, body=next(self._puts))
        node.clock.advance(STEP_S)
        if self._count % 10 == 0:
            retire(node.context.state, node.context.group_with_room, node.clock.now_ms())
        if self._beside and self._beside[0][0] <= self._count:
            return self._run(self._beside.pop()[1])
        step = node.next_step()
        assert step is not None, "nothing to do, although a group is queued"
        if isinstance(step, Checkpoint):
            self._beside.append((self._count + BESIDE, step))
            return step
        return self._run(step)

    def _run(self, step: Step) -> Step:
        step.run()
        self.node.step_done(step)
        self._client.received.clear()
        return step


def longest_gap(found: list[int]) -> int:
    """Steps from one to the next, from the beginning to the end."""
    return max(later - earlier for earlier, later in itertools.pairwise([0, *found, STEPS]))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("sync", SYNC_GAP)
def test_endless_load_starves_nothing(sync: str, size: str) -> None:
    load = Endless(sync, SIZES[size])
    steps = [load.step() for _ in range(STEPS)]
    syncs = [number for number, step in enumerate(steps) if isinstance(step, JournalStep) and step.syncs]
    marks = [number for number, step in enumerate(steps) if isinstance(step, Mark)]
    releases = [number for number, step in enumerate(steps) if isinstance(step, Release)]
    applied = [number for number, step in enumerate(steps) if isinstance(step, Apply)]
    removed = [number for number, step in enumerate(steps) if isinstance(step, Remove)]
    assert longest_gap(syncs) <= SYNC_GAP[sync]
    assert longest_gap(applied) <= SYNC_GAP[sync] + 2
    assert longest_gap(removed) <= 2 * SYNC_GAP[sync] + 80  # the log is four segments long before one goes
    assert longest_gap(marks) <= MARK_BUSY_S / STEP_S + 10
    # A checkpoint waits for the sync of what it holds; the first one begins after 16 KiB of journal.
    assert longest_gap(releases) <= SYNC_GAP[sync] + BESIDE + 80
    partition = load.node.partition("a")
    files = load.node.disk.list_directory(f"log/{partition.topic_id}/0")
    assert partition.high_watermark >= partition.log_start > 0
    assert len(files) <= len(partition.segments) + SYNC_GAP[sync] + 20


def test_relaxed_groups_are_synced_before_they_fill_the_memory() -> None:
    load = Endless("never", SIZES["large"])
    unsynced = worst = 0
    for _ in range(STEPS):
        step = load.step()
        if isinstance(step, JournalStep):
            unsynced = 0 if step.syncs else unsynced + MIB
            worst = max(worst, unsynced)
    assert 0 < worst <= UNSYNCED_BYTES_MAX + 4 * MIB


def settled(**changes: object) -> Node:
    """A node with a topic that has nothing to do until time passes."""
    node = Node(SimDisk(), small_settings(**changes))
    assert node.connect().ask("topic", "create", "a").code == 200
    node.checkpoint()
    node.mark()
    assert node.next_step() is None
    return node


def send(to: Node, size: int = 1) -> None:
    to.connect().send("put", "a", 0, body=batch(bytes(size)))
    to.pump()


def test_relaxed_put_is_synced_as_soon_as_it_is_due() -> None:
    node = settled(sync="interval", sync_interval_ms=20)
    for count in (1, 2):  # after a mark, and without one
        send(node)
        assert node.partition("a").high_watermark == count - 1
        node.clock.advance(0.021)
        node.run_steps()
        assert node.partition("a").high_watermark == count


def test_relaxed_puts_are_synced_when_there_are_so_many() -> None:
    node = settled(sync="interval", sync_interval_messages=3, sync_interval_ms=10_000)
    ends = []
    for _ in range(3):
        send(node)
        ends.append(node.partition("a").high_watermark)
    assert ends == [0, 0, 3]


def test_checkpoint_is_taken_at_once_when_the_journal_has_grown() -> None:
    node = settled()
    object.__setattr__(node.settings, "checkpoint_interval_bytes", 4 * KIB)
    send(node)
    before = node.store.checkpoint_lsn
    send(node, 8 * KIB)
    assert node.store.checkpoint_lsn > before


def test_mark_follows_last_write_as_soon_as_it_is_due() -> None:
    node = settled(mark_idle_ms=20)
    send(node)
    node.clock.advance(0.021)
    assert isinstance(node.next_step(), Mark)


def test_look_up_behind_relaxed_put_does_not_wait() -> None:
    node = settled(sync="never")
    send(node)
    assert node.connect().ask("meta", "a").code == 200
    assert node.partition("a").high_watermark == 1
