"""The same journal on the operating system's disk."""

from __future__ import annotations

from pathlib import Path

from txmq.redo import checkpoint, inspect
from txmq.redo.directory_identity import LOCK_PATH, load_or_create
from txmq.redo.journal_files import list_bases
from txmq.runtime.clocks import OSClock
from txmq.runtime.os_disk import OSDisk

from .support import NODE, open_journal, payload
from .test_directory_identity import SeededRandom


def test_a_life_with_rotation_checkpoint_release_and_restart(tmp_path: Path) -> None:
    disk = OSDisk(tmp_path / "node")
    lock = disk.lock(LOCK_PATH)
    load_or_create(disk, SeededRandom(1), OSClock())
    journal, _ = open_journal(disk, file_size_bytes=65536)
    assert journal.prepare_next()
    for number in range(300):
        journal.append(payload(number, 1000))
        if number % 50 == 49:
            journal.sync()
            made = checkpoint.Checkpoint(journal.next_lsn, journal.chain, journal.epoch, b"%d" % (number + 1))
            checkpoint.write(disk, made, node_id=NODE)
            journal.release(checkpoint.oldest_kept_lsn(disk))
    journal.append(b"the last one")
    journal.mark()
    journal.close()
    lock.release()
    assert list_bases(disk)[0] > 0

    newest, note = checkpoint.load_newest(disk, node_id=NODE)
    assert newest is not None
    assert (note, newest.state) == (None, b"300")
    again, payloads = open_journal(disk, from_lsn=newest.lsn, from_chain=newest.chain, file_size_bytes=65536)
    assert payloads == [b"the last one"]
    assert again.epoch == journal.epoch + 1
    assert again.next_lsn == journal.next_lsn
    again.close()
    assert inspect.verify(disk).end_lsn == journal.next_lsn
