"""Pieces of a journal that is written: their places, what is not told, what was released meanwhile."""

from __future__ import annotations

import pytest

from tools.images.node import Node
from tools.simulated.disk import SimDisk
from txmq.errors import JournalReleasedError, StorageError
from txmq.redo.journal_files import list_bases
from txmq.redo.journal_reader import JournalReader, Place
from txmq.redo.record_format import FILE_HEADER_SIZE, FILE_MAGIC, file_path


def _leader(puts: int = 40) -> Node:
    node = Node(SimDisk())
    client = node.session()
    assert client.ask("topic", "create", "a").code == 200
    for _ in range(puts):
        assert client.ask("put", "a", 0, extensions={"raw": None}, body=b"x" * 1000).code == 200
    return node


def _end(node: Node) -> Place:
    return Place(node.store.journal.next_lsn, node.store.journal.chain)


def test_nothing_is_told_that_is_not_forced() -> None:
    node = _leader(1)
    end = node.store.journal.durable_lsn
    reader = JournalReader(node.disk)
    assert reader.read(FILE_HEADER_SIZE, end) == reader.read(FILE_HEADER_SIZE, end + 100)[: end - FILE_HEADER_SIZE]
    assert reader.read(end, end) == b""


def test_next_file_begins_where_records_end() -> None:
    node = _leader()
    first, second, *_ = list_bases(node.disk)
    reader, end = JournalReader(node.disk), node.store.journal.durable_lsn
    lsn = first + FILE_HEADER_SIZE
    while not (piece := reader.read(lsn, end)).startswith(FILE_MAGIC):
        lsn += len(piece)
    assert first < lsn <= second
    assert piece == reader.read(second, end)[: len(piece)]
    with pytest.raises(StorageError, match=f"records of {file_path(first)} end at {lsn}"):
        reader.read(lsn + 8, end)


def test_released_journal_is_said_to_be() -> None:
    node = _leader()
    node.checkpoint()
    node.checkpoint()
    assert node.session().ask("put", "a", 0, extensions={"raw": None}, body=b"x").code == 200
    node.checkpoint()
    reader = JournalReader(node.disk)
    with pytest.raises(JournalReleasedError, match="begins at lsn"):
        reader.read(FILE_HEADER_SIZE, node.store.journal.durable_lsn)
    with pytest.raises(JournalReleasedError, match="begins at lsn"):
        reader.follows(Place(FILE_HEADER_SIZE, 0), _end(node))


def test_file_that_is_used_again_meanwhile_tells_nothing() -> None:
    node = _leader()
    reader, end = JournalReader(node.disk), node.store.journal.durable_lsn
    first, second, *_ = list_bases(node.disk)
    assert reader.read(first + FILE_HEADER_SIZE, end, 100)  # the file is open
    file = node.disk.open(file_path(second), writable=False)
    block = file.pread(FILE_HEADER_SIZE, 0)
    file.close()
    node.disk.damage(file_path(first), 0, block)
    with pytest.raises(JournalReleasedError):
        reader.read(first + FILE_HEADER_SIZE, end, 100)


def test_journal_follows_its_own_places_alone() -> None:
    node = _leader(3)
    reader, end = JournalReader(node.disk), _end(node)
    assert reader.follows(end, end)
    assert reader.follows(Place(FILE_HEADER_SIZE, 0), end)
    assert not reader.follows(Place(end.lsn, end.chain ^ 1), end)
    assert not reader.follows(Place(end.lsn + 8, end.chain), end)
    assert not reader.follows(Place(FILE_HEADER_SIZE + 8, end.chain), end)
