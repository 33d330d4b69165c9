"""The doors to the outside, as ports: clock, random numbers, disk, network. Everything above depends on these, never on
``os``.

Two versions of each exist: the operating system's (``runtime/os_*.py``) and the simulated one (``tools/simulated``),
held to the same contract tests.

Paths are relative POSIX strings below the data directory (``"journal/00000000000000000000.redo"``): no path from
outside ever reaches a Disk, and a Disk refuses symbolic links. Every Disk checks a path in the same way
(``path_parts``): no absolute path, no ``.``, ``..`` or empty component, no NUL, no backslash. The data directory itself
is ``""`` (``"."`` is accepted for it).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

Buffer = bytes | bytearray | memoryview
ROOT_PATH = ""


class Clock(Protocol):
    """Wall and monotonic time."""

    def now_ms(self) -> int:
        """Wall clock, ms since 1970-01-01 UTC; may jump."""

    def monotonic(self) -> float:
        """Seconds; never goes back."""

    def sleep(self, seconds: float) -> None:
        """Let time pass; never on the event loop."""


class Random(Protocol):
    """Unguessable numbers (ids); seeded in the simulation."""

    def bits(self, count: int) -> int:
        """A uniformly drawn unsigned integer of ``count`` bits."""


class File(Protocol):
    """An open file. Every method raises OSError; after a failed write or sync the file's content is unknown."""

    @property
    def path(self) -> str:
        """Relative path it was opened by."""

    def pread(self, size: int, position: int) -> bytes:
        """Up to ``size`` bytes at ``position``; shorter only at the end of the file."""

    def try_pread(self, size: int, position: int) -> bytes | None:
        """As ``pread`` but only from the page cache; None if it would have to wait for the disk."""

    def pwrite(self, data: Buffer, position: int) -> None:
        """Write all of ``data`` (short writes are continued). Not durable before ``fdatasync``."""

    def fdatasync(self) -> None:
        """Force data, and the size if it grew."""

    def fsync(self) -> None:
        """Force data and all metadata."""

    def reserve(self, size: int) -> None:
        """Make it ``size`` bytes long, the new ones zeros with blocks of their own: writing them lacks no space later.

        A longer file stays as it is. Durable after ``fsync``.
        """

    def drop_cache(self) -> None:
        """Ask the system to forget clean cached pages, so that the next read shows what the disk holds."""

    def size(self) -> int:
        """Current size in bytes."""

    def close(self) -> None:
        """Close; does not sync."""


class Lock(Protocol):
    """A held lock file."""

    def release(self) -> None:
        """Let go."""


class Disk(Protocol):
    """One data directory."""

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> File:
        """Open an existing file, or create it empty (``create=True``: fails with FileExistsError if it is there).

        A created entry is durable only after ``sync_directory`` of its directory.
        """

    def exists(self, path: str) -> bool:
        """Whether a file or directory is there."""

    def list_directory(self, path: str) -> list[str]:
        """Sorted names; an absent directory lists as empty."""

    def make_directories(self, path: str) -> None:
        """Create a directory and its parents (mode 0700), each entry synced; no error if it exists."""

    def add_directories(self, path: str) -> list[str]:
        """Create a directory and its parents (mode 0700) where they are missing; none of it is durable yet.

        Returns:
            the directories that got an entry: ``sync_directory`` of each makes it durable.
        """

    def rename(self, source: str, target: str) -> None:
        """Replace ``target`` atomically; durable only after ``sync_directory``."""

    def unlink(self, path: str) -> None:
        """Remove a file; FileNotFoundError if absent; durable only after ``sync_directory``."""

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory."""

    def sync_directory(self, path: str) -> None:
        """Force a directory's entries."""

    def free_bytes(self) -> int:
        """Free space for an unprivileged writer."""

    def lock(self, path: str) -> Lock:
        """Take an exclusive lock file, or raise DirectoryInUseError."""


class Stream(Protocol):
    """One connected TCP stream; see ``runtime.net.TcpStream``."""

    @property
    def server_certificate(self) -> bytes | None:
        """With TLS, the certificate that the other side has shown, in DER; None without."""

    def send(self, buffers: Sequence[Buffer]) -> int:
        """Hand over what the system takes at once; how many bytes that was. Raises OSError."""

    def receive(self, timeout: float = 0.0) -> memoryview | None:
        """The bytes that arrive within ``timeout`` seconds; None if none did, empty at the end. Raises OSError."""

    def wait(self, timeout: float, *, writable: bool) -> bool:
        """Sleep until there is something to read (or room to write); False if ``timeout`` seconds passed first."""

    def wait_writable(self, timeout: float) -> bool:
        """Sleep until there is room to write; False if ``timeout`` seconds passed first."""

    def is_quiet(self) -> bool:
        """Whether nothing has arrived, neither bytes nor an end nor an error."""

    def shut_down(self) -> None:
        """End the conversation; a waiting thread wakes up."""

    def close(self) -> None:
        """Give back the descriptor."""


# --- paths -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def path_parts(path: str) -> tuple[str, ...]:
    """The components of ``path``; empty for the data directory.

    Raises:
        ValueError: the path could leave the data directory, or has more than one form.
    """
    if path in (ROOT_PATH, "."):
        return ()
    parts = tuple(path.split("/"))
    if any(part in ("", ".", "..") for part in parts) or "\0" in path or "\\" in path:
        raise ValueError(f"not a relative path below the data directory: {path!r}")
    return parts


def normal_path(path: str) -> str:
    """The one form of ``path``."""
    return "/".join(path_parts(path))


def parent_path(path: str) -> str:
    """The directory that holds ``path``."""
    return "/".join(path_parts(path)[:-1])
