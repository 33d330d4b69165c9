"""``JournalThread``: the loop writes and syncs what is small and fast, the writer thread everything else."""

from __future__ import annotations

import pytest

from txmq.broker.commit.journal_schedule import LOOP_WRITE_SIZE_BYTES, JournalThread
from txmq.broker.commit.steps import StepThread

from ..support import node

LOOP, WRITER = StepThread.LOOP, StepThread.WRITER


def threads(**settings: object) -> JournalThread:
    """The choice of a broker with a journal of its own."""
    made = node(**settings)
    return JournalThread(made.store.journal, made.settings)


@pytest.mark.parametrize(
    ("size_bytes", "syncs", "is_beside_checkpoint", "thread"),
    [
        (100, True, False, LOOP),
        (101, True, False, WRITER),
        (100, True, True, WRITER),
        (101, False, False, LOOP),
        (101, False, True, LOOP),
        (LOOP_WRITE_SIZE_BYTES + 1, False, False, WRITER),
    ],
)
def test_thread_depends_on_size_sync_and_checkpoint(
    size_bytes: int, syncs: bool, is_beside_checkpoint: bool, thread: StepThread
) -> None:
    chosen = threads(inline_sync_size_bytes=100).choose(size_bytes, syncs, is_beside_checkpoint)
    assert chosen is thread


def test_slow_syncs_move_syncing_to_the_writer_thread_and_back() -> None:
    journal = threads(inline_sync_ms=1.0)
    journal.synced(6.0)
    assert journal.choose(1, True, False) is WRITER
    assert journal.choose(1, False, False) is LOOP
    while journal.sync_ms > 1.0:
        journal.synced(0.1)
    assert journal.choose(1, True, False) is LOOP


def test_group_that_begins_another_journal_file_goes_to_the_writer() -> None:
    made = node(inline_sync_size_bytes=1 << 24)
    journal = JournalThread(made.store.journal, made.settings)
    size_bytes = made.settings.journal_file_size_bytes
    assert not made.store.journal.has_room(size_bytes)
    assert [journal.choose(size_bytes, syncs, False) for syncs in (True, False)] == [WRITER, WRITER]
