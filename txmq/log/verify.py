"""``txmq log verify``: read every byte of partitions and say what is not as it should be. Changes nothing.

Checked: each batch's CRC, its placement CRC (it was written for this place in this partition), offsets without holes
inside and between segments, file names, and files that do not belong.

Damage or tail? Bytes after the last checkpoint are not synced in the partition files; the journal writes them again
at the next start. So what is wrong at the end of a partition's last segment may be a torn tail, which is no damage, as
long as the caller names no end and no whole batch of this partition follows it. Everything else is damage. (A
power loss may tear two segments; start the broker before you ask.)

For a running broker name an end (a high watermark): nothing at or above it is looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from txmq.log.batch import HEADER, HEADER_SIZE, fault, place_checksum
from txmq.log.partition import segment_base
from txmq.runtime.ports import Disk, File

STEP_BYTES = 1 << 20
_LENGTH_FIELD = slice(8, 12)


class Finding(NamedTuple):
    """Something that is not as it should be; no damage where the journal puts it right by itself."""

    path: str
    position: int
    text: str
    is_damage: bool


@dataclass(slots=True)
class Verdict:
    """Counts of what was verified, and the damage found."""

    partitions: int = 0
    segments: int = 0
    batches: int = 0
    messages: int = 0
    size_bytes: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        """Whether there is no damage."""
        return not any(finding.is_damage for finding in self.findings)


def verify_log(disk: Disk, advance: Callable[[int], None] = lambda _: None) -> Verdict:
    """Verify every partition of a stopped broker's data directory; ``advance`` gets the number of bytes read."""
    verdict = Verdict()
    for topic in disk.list_directory("log"):
        for number in disk.list_directory(f"log/{topic}") if topic.isdigit() else ():
            if number.isdigit():
                verify_partition(disk, int(topic), int(number), verdict=verdict, advance=advance)
            else:
                verdict.findings.append(Finding(f"log/{topic}/{number}", 0, "not a partition", is_damage=True))
        if not topic.isdigit():
            verdict.findings.append(Finding(f"log/{topic}", 0, "not a topic's directory", is_damage=True))
    return verdict


def verify_partition(
    disk: Disk, topic_id: int, partition: int, *, end_offset: int | None = None, verdict: Verdict | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> Verdict:  # fmt: skip
    """Verify one partition.

    Args:
        end_offset: offset up to which it must be whole; nothing after it is read. None: as far as the files go.
        verdict: is added to.
        advance: called with the number of bytes that were read.
    """
    verdict = Verdict() if verdict is None else verdict
    verdict.partitions += 1
    _Scan(disk, topic_id, partition, end_offset, verdict, advance).run()
    return verdict


class _Scan:
    """One pass over one partition; ``expected`` is the offset that follows, None if that is not known."""

    def __init__(
        self, disk: Disk, topic_id: int, partition: int, end_offset: int | None, verdict: Verdict,
        advance: Callable[[int], None],
    ) -> None:  # fmt: skip
        self._advance = advance
        self._disk, self._place, self._end, self._verdict = disk, (topic_id, partition), end_offset, verdict
        self._directory = f"log/{topic_id}/{partition}"
        self._expected: int | None = None

    def run(self) -> None:
        bases = self._bases()
        for number, base in enumerate(bases):
            path = f"{self._directory}/{base:020d}.log"
            if self._expected not in (None, base):
                self._damaged(path, 0, f"begins at offset {base}, {self._expected} follows")
            self._expected = base
            file = self._disk.open(path, writable=False)
            try:
                self._segment(file, is_last=number == len(bases) - 1)
            finally:
                file.close()
        reached = self._expected if bases else 0
        if self._end is not None and reached is not None and reached < self._end:
            self._damaged(self._directory, 0, f"the partition ends at offset {reached}, {self._end} was written")

    def _bases(self) -> list[int]:
        """Base offsets of the segments that must be read, ascending."""
        bases = []
        for name in self._disk.list_directory(self._directory):
            base = segment_base(name)
            if base is None:
                self._damaged(f"{self._directory}/{name}", 0, "not a segment")
            elif self._end is None or base < self._end:
                bases.append(base)
        return bases

    def _segment(self, file: File, *, is_last: bool) -> None:
        self._verdict.segments += 1
        position, size = 0, file.size()
        while position < size and not self._at_end():
            content = self._load(file, position, size)
            taken, reason = self._batches(content)
            if reason is not None and taken == 0:
                self._report(file, position, reason, is_last=is_last)
                self._expected = None
                return
            position += taken
            self._advance(taken)

    def _at_end(self) -> bool:
        return self._end is not None and self._expected is not None and self._expected >= self._end

    @staticmethod
    def _load(file: File, position: int, size: int) -> bytes:
        """A step's worth of bytes, or the whole first batch if that is longer and lies within the file."""
        content = file.pread(STEP_BYTES, position)
        if len(content) >= HEADER_SIZE:
            length = 12 + int.from_bytes(content[_LENGTH_FIELD], "big")
            if len(content) < length <= size - position:
                return file.pread(length, position)
        return content

    def _batches(self, content: bytes) -> tuple[int, str | None]:
        """Check what is whole. Returns bytes taken, and why it stopped there."""
        position, verdict = 0, self._verdict
        while position < len(content) and not self._at_end():
            reason = fault(content, position, self._place, self._expected, full=True)
            if reason is not None:
                return position, reason
            fields = HEADER.unpack_from(content, position)
            verdict.batches += 1
            verdict.messages += fields[12]
            verdict.size_bytes += fields[1] + 12
            self._expected = fields[0] + fields[12]
            position += fields[1] + 12
        return position, None

    def _report(self, file: File, position: int, reason: str, *, is_last: bool) -> None:
        if not is_last or self._end is not None:
            self._damaged(file.path, position, reason)
        elif whole_batch_follows(file, self._place, position + 1):
            self._damaged(file.path, position, f"{reason}; whole batches follow")
        else:
            text = f"{reason}; a tail that the journal writes again at the next start, if the broker was not stopped"
            self._verdict.findings.append(Finding(file.path, position, text, is_damage=False))

    def _damaged(self, path: str, position: int, text: str) -> None:
        self._verdict.findings.append(Finding(path, position, text, is_damage=True))


def whole_batch_follows(file: File, place: tuple[int, int], position: int) -> bool:
    """Whether some header after ``position`` has the placement CRC of this partition.

    By chance one of 2^32 candidates does.

    Args:
        place: topic id, partition.
    """
    while len(content := file.pread(STEP_BYTES, position)) >= HEADER_SIZE:
        magic = content.find(b"\x02", 16)
        while 0 <= magic <= len(content) - HEADER_SIZE + 16:
            base, length, placed, _, crc = HEADER.unpack_from(content, magic - 16)[:5]
            if length >= HEADER_SIZE - 12 and placed & 0xFFFFFFFF == place_checksum(*place, base, length, crc):
                return True
            magic = content.find(b"\x02", magic + 1)
        position += len(content) - HEADER_SIZE + 1
    return False
