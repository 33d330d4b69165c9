"""What a leader sends, cut anywhere or damaged anywhere: groups that continue the journal, or nothing of it."""

from __future__ import annotations

import random

import pytest

from tools.images.node import Node
from tools.simulated.disk import SimDisk
from tools.simulated.disk_model import Write
from txmq.broker.commit.commit_group import ReceivedGroup
from txmq.broker.replication.receiver import Receiver
from txmq.errors import RemoteProtocolError
from txmq.model import Lsn
from txmq.redo import recovery
from txmq.redo.journal import Journal
from txmq.redo.journal_files import Settings, list_bases
from txmq.redo.journal_reader import JournalReader
from txmq.redo.record_format import FILE_HEADER_SIZE, file_path, unpack_file_header


class Copied:
    """A leader with some journal files, and an empty copy."""

    def __init__(self) -> None:
        self.leader = Node(SimDisk())
        client = self.leader.session()
        assert client.ask("topic", "create", "a").code == 200
        for number in range(12):
            assert client.ask("put", "a", 0, extensions={"raw": None}, body=b"x" * 300 * number).code == 200
            if number % 4 == 3:
                self.leader.mark()
        self.reader = JournalReader(self.leader.disk)
        self.end_lsn = self.leader.store.journal.durable_lsn
        header = unpack_file_header(self.reader.read(0, self.end_lsn)[:FILE_HEADER_SIZE])
        assert header is not None
        self.journal: Journal = recovery.create(SimDisk(), header, Settings(header.file_size_bytes))

    def pieces(self, size_bytes: int) -> list[bytes]:
        """The whole journal."""
        found, receiver = list[bytes](), Receiver(self.journal, 0)
        while piece := self.reader.read(receiver.next_lsn, self.end_lsn, size_bytes):
            found.append(piece)
            receiver.take(piece)
        return found

    def write(self, groups: list[ReceivedGroup]) -> None:
        """As the commit pipeline does."""
        for group in groups:
            if group.begins is not None:
                self.journal.begin_verbatim(group.begins)
            if group.records:
                self.journal.append_verbatim(group.records, group.chain, group.epoch)
            self.journal.sync()


@pytest.mark.parametrize("size_bytes", [1, 7, 48, 1000, 1 << 20])
def test_copy_ends_where_the_journal_ends(size_bytes: int) -> None:
    made = Copied()
    receiver = Receiver(made.journal, 0)
    for piece in made.pieces(size_bytes):
        made.write(receiver.take(piece))
    leader = made.leader.store.journal
    assert (made.journal.next_lsn, made.journal.chain) == (leader.next_lsn, leader.chain)
    assert len(list_bases(made.leader.disk)) > 1, "one file would show nothing"


@pytest.mark.parametrize("seed", range(40))
def test_damage_anywhere_is_refused_or_still_incomplete(seed: int) -> None:
    made, chance = Copied(), random.Random(seed)
    pieces = made.pieces(chance.choice([500, 5000, 1 << 20]))
    number = chance.randrange(len(pieces))
    piece = bytearray(pieces[number])
    place = chance.randrange(len(piece))
    piece[place] ^= 1 << chance.randrange(8)
    receiver = Receiver(made.journal, 0)
    for each in pieces[:number]:
        made.write(receiver.take(each))
    whole_lsn = receiver.next_lsn
    try:
        groups = receiver.take(bytes(piece))
        for each in pieces[number + 1 :]:
            groups += receiver.take(each)
    except RemoteProtocolError:
        return
    assert receiver.next_lsn - len(piece) <= whole_lsn + len(piece)
    assert all(group.chain != made.leader.store.journal.chain for group in groups), "damage went through"


def test_marks_of_the_leader_vouch_for_nothing_at_a_copy() -> None:
    """A sync may have failed, and the cache show what the disk lacks: all since the checkpoint is written again."""
    made, disk = Copied(), SimDisk()
    header = unpack_file_header(made.reader.read(0, made.end_lsn)[:FILE_HEADER_SIZE])
    assert header is not None
    made.journal = recovery.create(disk, header, Settings(header.file_size_bytes))
    for group in Receiver(made.journal, 0).take(made.reader.read(FILE_HEADER_SIZE, made.end_lsn)):
        made.journal.append_verbatim(group.records, group.chain, group.epoch)
    made.journal.sync()
    disk = disk.kill()
    trace = disk.start_trace()
    journal = _recovered(disk)
    assert journal.next_lsn == made.journal.next_lsn
    written = [op.position for op in trace.ops if isinstance(op, Write) and op.path == file_path(0)]
    assert min(written) == FILE_HEADER_SIZE
    assert _recovered(disk.crash()).next_lsn == journal.next_lsn


def _recovered(disk: SimDisk) -> Journal:
    """As a copy, which has its checkpoint at the beginning."""
    return recovery.recover(
        disk, node_id=_owner(disk), from_lsn=Lsn(FILE_HEADER_SIZE), from_chain=0, epoch=1, settings=Settings(),
        on_record=lambda *_: None, has_own_marks=False,
    )  # fmt: skip


def _owner(disk: SimDisk) -> int:
    """Whose journal it is."""
    file, header = recovery.open_file(disk, 0, None, writable=False)
    file.close()
    return header.node_id


def test_piece_that_was_sent_before_is_refused() -> None:
    made = Copied()
    first, *_ = made.pieces(1 << 20)
    receiver = Receiver(made.journal, 0)
    receiver.take(first)
    with pytest.raises(RemoteProtocolError, match="no record that continues the journal"):
        receiver.take(first)


def test_record_under_way_is_asked_for_again_after_a_loss() -> None:
    made = Copied()
    receiver = Receiver(made.journal, 0)
    receiver.take(made.reader.read(FILE_HEADER_SIZE, made.end_lsn, 60))
    assert receiver.next_lsn == FILE_HEADER_SIZE + 60
    receiver.begin_anew()
    assert receiver.next_lsn < FILE_HEADER_SIZE + 60
    for piece in made.pieces(1 << 20):
        made.write(receiver.take(piece))
    assert made.journal.chain == made.leader.store.journal.chain
