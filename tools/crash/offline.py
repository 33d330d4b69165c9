"""The second reader: the segment files of a stopped broker, without broker, journal or client."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.crash.reader import text_of
from txmq.log.records import decode
from txmq.log.verify import verify_log
from txmq.runtime.os_disk import OSDisk

Partition = list[tuple[int, str]]


def complaints(data: Path | Sequence[Path], drained: list[list[Any]]) -> list[str]:
    """What the files hold that the client did not read, the reverse, and damage.

    Args:
        data: the data directory, or those of all brokers.
        drained: what the client read, as ``final_reads.drain`` answers it.
    """
    directories = [data] if isinstance(data, Path) else data
    found = [str(finding) for one in directories for finding in verify_log(OSDisk(str(one))).findings]
    # Which directory is which topic is written nowhere but in the broker's state; every value is unique, so the
    # partitions are compared as a set.
    logs = [log for directory in directories for log in (directory / "log").glob("*/*")]
    in_files = sorted(partition for log in logs if (partition := _read(log)))
    by_client = sorted(
        partition for _, _, _, _, lines in drained if (partition := [(line[0], line[1]) for line in lines])
    )
    if in_files != by_client:
        counts = sum(map(len, in_files)), sum(map(len, by_client))
        found.append(f"the segment files hold other messages than the client read: {counts[0]} and {counts[1]}")
    return found


def _read(directory: Path) -> Partition:
    messages: Partition = []
    for file in sorted(directory.glob("*.log")):
        messages += [(message.offset, text_of(message.value)) for message in decode(file.read_bytes(), "t", 0)]
    return messages
