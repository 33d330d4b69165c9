"""Segment files below a directory: which there are, whose they are, in which order they follow.

Layouts that are known, by the directory that is named::

    <data directory>      with log/<topic id>/<partition>/*.log and archive/ likewise
    <log or archive>      <topic id>/<partition>/*.log
    <topic id>            <partition>/*.log
    <partition>           *.log, in a directory whose parent is named by the topic id

Topic id and partition are needed: they are under every batch's placement CRC. A segment that is in both archive/ and
log/ is taken from the archive: a crash between moving it there and forgetting it may have left a part of it in log/.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from txmq.errors import ConfigError
from txmq.runtime.ports import Disk

LOG: Final = "log"
ARCHIVE: Final = "archive"
_SEGMENT: Final = re.compile(r"([0-9]{20})\.log\Z", re.ASCII)
PartitionId = tuple[int, int]  # topic id, partition


class Segment(NamedTuple):
    """A segment's file, relative to the root, and its size."""

    path: str
    base_offset: int
    size_bytes: int


def segments_below(disk: Disk, root: str) -> dict[PartitionId, list[Segment]]:
    """All segments, by partition, ascending.

    Args:
        root: the directory's absolute name.

    Raises:
        ConfigError: nothing below it is laid out as segments are.
    """
    found: dict[PartitionId, dict[int, Segment]] = {}
    for partition_id, directory in _directories(disk, root):
        for segment in _segments_in(disk, directory):
            found.setdefault(partition_id, {}).setdefault(segment.base_offset, segment)
    if not found and not (disk.exists(LOG) or disk.exists("journal")):
        raise ConfigError(
            f"option path: no segments below {root}; it must be a broker's data directory, or hold "
            "<topic id>/<partition>/<base offset>.log as its directories log/ and archive/ do"
        )
    return {partition_id: [known[base] for base in sorted(known)] for partition_id, known in sorted(found.items())}


def _directories(disk: Disk, root: str) -> Iterator[tuple[PartitionId, str]]:
    trees = [name for name in (ARCHIVE, LOG) if disk.exists(name)]
    if trees:
        for tree in trees:
            yield from _tree(disk, tree)
        return
    names = root.rstrip("/").split("/")
    own, parent = names[-1], names[-2] if len(names) > 1 else ""
    if own.isdecimal() and parent.isdecimal() and any(_SEGMENT.match(name) for name in disk.list_directory("")):
        yield (int(parent), int(own)), ""
    elif own.isdecimal() and any(list(_segments_in(disk, name)) for name in _numbers(disk, "")):
        for number in _numbers(disk, ""):
            yield (int(own), int(number)), number
    else:
        yield from _tree(disk, "")


def _tree(disk: Disk, directory: str) -> Iterator[tuple[PartitionId, str]]:
    for topic in _numbers(disk, directory):
        below = f"{directory}/{topic}" if directory else topic
        for number in _numbers(disk, below):
            yield (int(topic), int(number)), f"{below}/{number}"


def _numbers(disk: Disk, directory: str) -> list[str]:
    return [name for name in disk.list_directory(directory) if name.isascii() and name.isdecimal()]


def _segments_in(disk: Disk, directory: str) -> Iterator[Segment]:
    for name in disk.list_directory(directory):
        match = _SEGMENT.match(name)
        if match is not None:
            path = f"{directory}/{name}" if directory else name
            file = disk.open(path, writable=False)
            try:
                yield Segment(path, int(match[1]), file.size())
            finally:
                file.close()
