"""Segments that redo writes once more: each is opened once, however many there are and in whatever order records name
them.

Theory of operation. As long as the descriptor cache takes more files without closing a written one, bytes go straight
to their file: the page cache is the best place for them. Beyond that, each record would open a file and sync another
one to close it. So bytes for further segments are gathered, and written segment by segment when enough are there, or
when redo is over.

Invariants:
    * the bytes of a segment are written in the order in which they came;
    * at most ``GATHERED_BYTES_MAX`` and one run are gathered.
"""

from __future__ import annotations

from typing import Final

from txmq.log.file_cache import FileCache
from txmq.runtime.ports import Buffer

GATHERED_BYTES_MAX: Final = 64 << 20  # as much as there is journal between two checkpoints, by default


class RedoSegments:
    """See the module's docstring. ``finish`` must be called at the end."""

    def __init__(self, files: FileCache) -> None:
        self._files = files
        self._gathered: dict[str, list[tuple[int, Buffer]]] = {}
        self._bytes = 0

    def write(self, path: str, position: int, data: Buffer) -> None:
        """Write, now or later; ``data`` must not change until then."""
        gathered = self._gathered.get(path)
        if gathered is None:
            if self._files.is_open(path) or self._files.takes(1):
                self._files.write(path, position, data)
                return
            gathered = self._gathered[path] = []
        gathered.append((position, data))
        self._bytes += len(data)
        if self._bytes >= GATHERED_BYTES_MAX:
            self.finish()

    def finish(self) -> None:
        """Write what is gathered."""
        for path, pieces in self._gathered.items():
            for position, data in _joined(pieces):
                self._files.write(path, position, data)
        self._gathered, self._bytes = {}, 0


def _joined(pieces: list[tuple[int, Buffer]]) -> list[tuple[int, Buffer]]:
    """Those that follow each other in the file in one."""
    found: list[tuple[int, list[Buffer]]] = []
    end = -1
    for position, data in pieces:
        if position == end:
            found[-1][1].append(data)
        else:
            found.append((position, [data]))
        end = position + len(data)
    return [(position, b"".join(buffers)) for position, buffers in found]
