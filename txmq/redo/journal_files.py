"""The journal's files: how one comes into being, is recycled and goes.

Theory of operation. A *spare* (``journal/spare-<n>``) is a file of full size whose blocks are written and forced, so
that overwriting it changes no metadata, which makes a sync faster. It is made ahead of need, in another thread, and in
steps, so that the journal's own syncs wait for one of them at most. A file begins its life as a spare: header written,
forced, renamed to ``journal/<base lsn>.redo``, directory forced; then it takes its first record. If no spare is
ready, one is made on the spot whose blocks are only reserved: that is faster than writing zeros, and costs slower syncs
until the next file. A released file becomes a spare again, old content and all: what is in
it states addresses of another file (``redo.format``).

The *ballast* (``journal/ballast``) is a small file kept for a full disk. Given up, it does not free space for others to
take: it is itself the next, smaller journal file, so that decisions go on where nothing else does.

Invariants:

* a ``.redo`` name belongs to a file whose header and size were forced before, and whose predecessor was forced to its
  end: a header that fails its check is damage, no crash makes it;
* a full disk (ENOSPC, EDQUOT) before the rename leaves the journal as it was and raises ``JournalFullError``;
* want of descriptors (EMFILE, ENFILE) raises OSError, and the same call may be repeated, wherever it stopped;
* spares and ballast hold no data; any of them may vanish in a crash.

Thread safety: ``make_spare`` and ``keep_ballast`` may run concurrently with everything else; the table of spares is
changed and copied by single operations of a dict only.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Final

from txmq.errors import ConfigError, JournalFullError
from txmq.redo.record_format import (
    DIRECTORY,
    FILE_HEADER_SIZE,
    FileHeader,
    base_of_name,
    file_path,
    pack_file_header,
    payload_size_max,
)
from txmq.runtime.ports import Disk, File

BALLAST: Final = f"{DIRECTORY}/ballast"
_SPARE_PREFIX: Final = "spare-"
_TEMPORARY: Final = ".tmp"
_DISK_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_NO_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE})
_BLOCK: Final = 4096
FILE_SIZE_BYTES: Final = 64 << 20
_STEP_BYTES: Final = 4 << 20  # of zeros between two syncs
_ZEROS_BYTES: Final = 256 << 10  # in memory for it
_BALLAST_SIZE_BYTES_MAX: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class Settings:
    """The sizes that shape a journal's files.

    Args:
        file_size_bytes: of a file from here on; a multiple of 4096, at least 8192. Files of other sizes stay readable.
        spare_files_max: released files kept for recycling.
    """

    file_size_bytes: int = FILE_SIZE_BYTES
    spare_files_max: int = 2

    def __post_init__(self) -> None:
        if self.file_size_bytes % _BLOCK or self.file_size_bytes < 2 * _BLOCK:
            raise ConfigError(
                f"journal file size {self.file_size_bytes}: a multiple of {_BLOCK}, at least {2 * _BLOCK}"
            )

    @property
    def ballast_size_bytes(self) -> int:
        """Size of the emergency file: 16 MiB, or one file where files are smaller."""
        return min(_BALLAST_SIZE_BYTES_MAX, self.file_size_bytes)


def is_disk_full(error: OSError) -> bool:
    """Whether the system refused for want of space."""
    return error.errno in _DISK_FULL


def lacks_descriptors(error: OSError) -> bool:
    """Whether the process, or the machine, has too many open files."""
    return error.errno in _NO_DESCRIPTORS


def size_bytes(disk: Disk, path: str) -> int:
    """Of a file by its path."""
    file = disk.open(path, writable=False)
    try:
        return file.size()
    finally:
        file.close()


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()  # what is not is none of ours, and left alone


def list_bases(disk: Disk) -> list[int]:
    """The base LSNs of all journal files, ascending."""
    bases = (base_of_name(name) for name in disk.list_directory(DIRECTORY))
    return sorted(base for base in bases if base is not None)


class JournalFiles:
    """Spares, ballast and released files of one journal. Methods raise OSError where the disk fails."""

    def __init__(self, disk: Disk, node_id: int, settings: Settings) -> None:
        self._disk, self.node_id, self.settings = disk, node_id, settings
        self._spares: dict[str, int] = {}  # path -> size, oldest first
        self._begun: tuple[File, int] | None = None  # the next file, renamed, while its name is not forced
        self._numbers = count(1)
        disk.make_directories(DIRECTORY)
        self._take_stock()

    def _take_stock(self) -> None:
        """Find the spares of the last process; drop what it left half made, and spares of another size."""
        highest = 0
        for name in self._disk.list_directory(DIRECTORY):
            path = f"{DIRECTORY}/{name}"
            if name.endswith(_TEMPORARY) and name.startswith((_SPARE_PREFIX, "ballast")):
                self._disk.unlink(path)
            elif name.startswith(_SPARE_PREFIX) and _is_number(name.removeprefix(_SPARE_PREFIX)):
                highest = max(highest, int(name.removeprefix(_SPARE_PREFIX)))
                self._adopt(path)
        self._numbers = count(highest + 1)

    def _adopt(self, path: str) -> None:
        if self._may_be_spare(path):
            self._spares[path] = self.settings.file_size_bytes
        else:
            self._disk.unlink(path)

    def _may_be_spare(self, path: str) -> bool:
        wanted = self.settings
        return len(self._spares) < wanted.spare_files_max and size_bytes(self._disk, path) == wanted.file_size_bytes

    def _next_spare_path(self) -> str:
        return f"{DIRECTORY}/{_SPARE_PREFIX}{next(self._numbers)}"

    # --- the next file -----------------------------------------------------------------------------------------------

    def has_spare(self, payload_length: int, size_bytes: int = 0) -> bool:
        """Whether a prepared file takes a payload of that length; with ``size_bytes``, one that is as long as that."""
        return self._fitting(payload_length, size_bytes) is not None

    def _fitting(self, payload_length: int, wanted_bytes: int) -> str | None:
        for path, size in list(self._spares.items()):
            if payload_length <= payload_size_max(size) and wanted_bytes in (0, size):
                return path
        return None

    def make_spare(self, size_bytes: int = 0, *, is_written: bool = True) -> None:
        """Make a file of full size, or of ``size_bytes``, written with zeros (or only reserved) and forced.

        Raises:
            JournalFullError: there is no room; nothing is left of it.
        """
        path, size = self._next_spare_path(), size_bytes or self.settings.file_size_bytes
        self._make(path, size, is_written=is_written)
        self._spares[path] = size

    def _make(self, path: str, size: int, *, is_written: bool) -> None:
        temporary = path + _TEMPORARY
        try:
            if self._disk.exists(temporary):
                self._disk.unlink(temporary)
            self._fill(temporary, size, is_written=is_written)
            self._disk.rename(temporary, path)
        except OSError as error:
            if not is_disk_full(error):
                raise
            with suppress(OSError):
                self._disk.unlink(temporary)
            raise JournalFullError(f"no room for {path} ({size} bytes): free disk space") from error

    def _fill(self, path: str, size: int, *, is_written: bool) -> None:
        file = self._disk.open(path, create=True)
        try:
            file.reserve(size)  # first, so that a full disk shows at once
            file.fsync()
            zeros = bytes(min(_ZEROS_BYTES, size))
            for position in range(0, size if is_written else 0, len(zeros)):
                file.pwrite(zeros[: size - position], position)
                if (position + len(zeros)) % _STEP_BYTES == 0 or position + len(zeros) >= size:
                    file.fdatasync()
        finally:
            file.close()

    def begin(self, header: FileHeader, payload_length: int) -> tuple[File, int]:
        """Turn a spare that takes ``payload_length`` into the journal's next file.

        Args:
            header: a ``file_size_bytes`` of 0 is replaced by the spare's; else the spare must have that size.

        Returns:
            the open file and its size. Durability: header, size and name are forced.

        Raises:
            JournalFullError: the disk has no room for the header; the journal is as it was.
        """
        if self._begun is None:
            self._begun = self._rename_spare(header, payload_length)
        self._disk.sync_directory(DIRECTORY)
        begun, self._begun = self._begun, None
        return begun

    def _rename_spare(self, header: FileHeader, payload_length: int) -> tuple[File, int]:
        path = self._fitting(payload_length, header.file_size_bytes)
        if path is None:
            raise JournalFullError("no prepared journal file takes this record: free disk space")
        size = self._spares[path]
        file = self._disk.open(path)
        try:
            self._write_header(file, path, pack_file_header(header._replace(file_size_bytes=size)))
            self._disk.rename(path, file_path(header.base_lsn))
        except BaseException:
            file.close()
            raise
        del self._spares[path]
        return file, size

    def close(self) -> None:
        """Let go of a file that was begun, and not handed out."""
        if self._begun is not None:
            self._begun[0].close()

    def _write_header(self, file: File, path: str, block: bytes) -> None:
        try:
            file.pwrite(block, 0)
            file.fdatasync()
        except OSError as error:
            if not is_disk_full(error):
                raise
            del self._spares[path]
            with suppress(OSError):  # its content is unknown now: not used, and removed by the next start at the latest
                self._disk.unlink(path)
            raise JournalFullError(f"no room to begin {path}: free disk space") from error

    # --- going -------------------------------------------------------------------------------------------------------

    def release(self, bases: Iterable[int]) -> None:
        """Recycle or unlink journal files that are not needed. Durability: the names are gone when this returns."""
        bases = list(bases)
        for base in bases:
            path = file_path(base)
            if not self._disk.exists(path):
                continue  # an attempt before this one has come further
            if self._may_be_spare(path):
                spare = self._next_spare_path()
                self._disk.rename(path, spare)
                self._spares[spare] = self.settings.file_size_bytes
            else:
                self._disk.unlink(path)
        if bases:
            self._disk.sync_directory(DIRECTORY)

    # --- ballast -----------------------------------------------------------------------------------------------------

    @property
    def has_ballast(self) -> bool:
        """Whether it is there."""
        return self._disk.exists(BALLAST)

    def keep_ballast(self) -> bool:
        """Make the ballast if it is missing and there is ample room; says whether it is there."""
        if self.has_ballast:
            return True
        size = self.settings.ballast_size_bytes
        if self._disk.free_bytes() < 2 * size + self.settings.file_size_bytes:
            return False
        try:
            self._make(BALLAST, size, is_written=True)
        except JournalFullError:
            return False
        return True

    def use_ballast(self) -> bool:
        """Turn the ballast into a spare; False if it is already given up."""
        if not self.has_ballast:
            return False
        size = size_bytes(self._disk, BALLAST)
        path = self._next_spare_path()
        self._disk.rename(BALLAST, path)
        if size >= FILE_HEADER_SIZE + _BLOCK:
            self._spares[path] = size
        return path in self._spares
