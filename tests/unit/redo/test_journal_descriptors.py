"""The journal without descriptors: what begins or lets go of a file is done once more, and nothing has failed."""

from __future__ import annotations

import errno
from contextlib import suppress

import pytest

from tools.simulated.disk import SimDisk
from tools.simulated.file import Kind
from txmq.errors import JournalFailedError

from .support import open_journal


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
@pytest.mark.parametrize("is_prepared", [True, False])
def test_file_that_lacks_descriptors_begins_once_they_are_there(is_prepared: bool, number: int) -> None:
    """Whichever operation lacks them first, and each after it in turn."""
    kinds: list[Kind] = ["open", "entry", "sync", "write"]
    for kind, nth in [(kind, nth) for kind in kinds for nth in range(1, 5)]:
        disk = SimDisk()
        journal, _ = open_journal(disk)
        journal.append(b"before")
        journal.sync()
        if is_prepared:
            journal.prepare_next()
        large = bytes(journal.payload_size_bytes_max)
        disk.fail_at(nth, number, kind)
        try:
            for item in (large, b"after"):
                try:
                    journal.append(item)
                except OSError:
                    assert not journal.failed
                    journal.append(item)
        except JournalFailedError:
            assert kind in {"sync", "write"}  # of the journal's own bytes: no descriptor is asked for there
            continue
        disk.clear_faults()
        journal.sync()
        assert open_journal(disk.crash())[1] == [b"before", large, b"after"]


def test_files_released_without_descriptors_go_with_the_next_attempt() -> None:
    for nth in range(1, 8):
        disk = SimDisk()
        journal, _ = open_journal(disk)
        for _ in range(4):
            journal.append(bytes(journal.payload_size_bytes_max))
        journal.sync()
        end, chain = journal.next_lsn, journal.chain
        disk.fail_at(nth, errno.EMFILE, "open" if nth < 3 else "entry")
        with suppress(OSError):
            journal.release(end)
        assert not journal.failed
        disk.clear_faults()
        journal.release(end)
        assert len([name for name in disk.list_directory("journal") if name.endswith(".redo")]) == 1
        journal.append(b"after")
        journal.sync()
        assert open_journal(disk.crash(), from_lsn=end, from_chain=chain)[1] == [b"after"]
