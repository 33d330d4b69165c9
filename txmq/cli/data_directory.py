"""Opening the data directory of a stopped broker, to look at it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from txmq.cli import output

if TYPE_CHECKING:
    from txmq.runtime.os_disk import OSDisk

LOCK_PATH = "lock"  # as txmq.redo.identity takes it
Data = Annotated[Path, typer.Option("--data", metavar="DIR", help="Data directory of a stopped broker.")]
DEFAULT_DATA = Path("var/txmq")


@contextmanager
def stopped(path: Path) -> Iterator[OSDisk]:
    """The directory, locked meanwhile so that no broker starts on it; a read-only copy is taken as it is.

    Raises:
        DirectoryInUseError: a broker runs on it.
    """
    from txmq.runtime.os_disk import OSDisk

    if not (path / "journal").is_dir():
        output.fail(f"{path} is not a data directory of a broker; name it with --data DIR")
    with ExitStack() as stack:
        disk = OSDisk(path)
        stack.callback(disk.close)
        try:
            lock = disk.lock(LOCK_PATH)
        except OSError as error:
            output.note(f"{path} is not locked while it is read ({error.strerror})")
        else:
            stack.callback(lock.release)
        yield disk
