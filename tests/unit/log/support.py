"""Batches, disks and partitions for the tests of the log."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from tools.simulated.disk import SimDisk
from tools.simulated.file import SimFile
from txmq.log import batch, records
from txmq.log.file_cache import FileCache
from txmq.log.partition import Partition
from txmq.model import TopicConfig

TIME_MS = 1_700_000_000_000
TOPIC_ID, NUMBER = 7, 3


def pure_default_records() -> ModuleType:
    """``aiokafka.record.default_records`` as it is where no compiled wheel is: another copy, imported once."""
    names = ("aiokafka.util", "aiokafka.record.util", "aiokafka.record.default_records")
    compiled = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    os.environ["AIOKAFKA_NO_EXTENSIONS"] = "1"
    try:
        return importlib.import_module(names[-1])
    finally:
        del os.environ["AIOKAFKA_NO_EXTENSIONS"]
        sys.modules.update(compiled)


PURE = pure_default_records()


def make_batch(count: int = 1, value: bytes = b"value", timestamp_ms: int = TIME_MS) -> bytearray:
    """A plain batch of equal values, the last of which is ``timestamp_ms`` old."""
    return records.encode([(b"key", value, (), timestamp_ms)] * count)


def make_placed(base_offset: int, count: int = 1, value: bytes = b"value", timestamp_ms: int = TIME_MS) -> bytearray:
    """A batch that stands at its place in partition 3 of topic 7."""
    made = make_batch(count, value, timestamp_ms)
    batch.stamp(made, TOPIC_ID, NUMBER, base_offset, batch.stored_crc(made))
    return made


def with_fields(source: bytes | bytearray, **changed: int) -> bytearray:
    """A copy with header fields changed and the CRC right again."""
    names = (
        "base", "length", "placed", "magic", "crc", "attributes", "delta", "first_ms", "max_ms", "producer", "epoch",
        "sequence", "count",
    )  # fmt: skip
    result = bytearray(source)
    fields = dict(zip(names, batch.HEADER.unpack_from(result), strict=True)) | changed
    batch.HEADER.pack_into(result, 0, *fields.values())
    if "crc" not in changed:
        result[17:21] = batch.checksum(memoryview(result)[21:]).to_bytes(4, "big")
    return result


def with_section(source: bytes | bytearray, section: bytes, codec: int = 0) -> bytearray:
    """A batch with the header of ``source`` and another record section."""
    whole = bytearray(source[: batch.HEADER_SIZE]) + section
    return with_fields(whole, length=len(whole) - 12, attributes=codec)


class Log:
    """A partition on a simulated disk, driven as the broker drives it: place, write, publish."""

    def __init__(self, config: TopicConfig | None = None, disk: SimDisk | None = None) -> None:
        self.disk = disk if disk is not None else SimDisk()
        self.files = FileCache(self.disk)
        self.partition = Partition(TOPIC_ID, "orders", NUMBER, config or TopicConfig("orders"))
        self.batches: list[bytes] = []

    def append(self, made: bytearray, *, now_ms: int = TIME_MS, publish: bool = True) -> int:
        """One batch; returns its base offset."""
        count, max_ms, _, _, _, crc = batch.check(made)
        base, position, offset = self.partition.place(count, len(made), max_ms, now_ms)
        batch.stamp(made, TOPIC_ID, NUMBER, offset, crc)
        self.files.write(self.partition.segment_path(base), position, made)
        self.batches.append(bytes(made))
        if publish:
            self.partition.publish(self.partition.next_offset)
        return offset

    def fill(self, counts: Sequence[int], value: bytes = b"value") -> None:
        """One batch for each count."""
        for count in counts:
            self.append(make_batch(count, value))

    def read(self, offset: int, size_bytes_max: int = 1 << 20) -> bytes:
        """Read, waiting if need be."""
        content = self.partition.read(self.files, offset, size_bytes_max)
        assert content is not None
        return content


class CountingDisk(SimDisk):
    """Remembers the files it opened."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[SimFile] = []

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> SimFile:
        file = super().open(path, create=create, writable=writable)
        self.opened.append(file)
        return file

    @property
    def open_count(self) -> int:
        """How many are open now."""
        return sum(not file._closed for file in self.opened)
