"""Opening the data directory of a stopped broker, to look at it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, Protocol

import typer

from txmq.cli import output

if TYPE_CHECKING:
    from txmq.runtime.os_disk import OSDisk

LOCK_PATH = "lock"  # as txmq.redo.directory_identity takes it
Data = Annotated[Path, typer.Option("--data", metavar="DIR", help="Data directory of a stopped broker.")]
DEFAULT_DATA = Path("var/txmq")


class Finding(Protocol):
    """A line of ``verify``, of the journal or of the log."""

    @property
    def path(self) -> str:
        """File, relative to the data directory."""

    @property
    def position(self) -> int:
        """Byte in the file."""

    @property
    def text(self) -> str:
        """What is wrong."""

    @property
    def is_damage(self) -> bool:
        """Whether anything may be lost; otherwise the next start puts it right."""


def say_findings(
    findings: Iterable[Finding], totals: Mapping[str, object], *, is_sound: bool, as_json: bool
) -> NoReturn:
    """Print what was found and end the command: status 1 if something is damaged."""
    if as_json:
        listed = [
            {"path": item.path, "position": item.position, "text": item.text, "is_damage": item.is_damage}
            for item in findings
        ]
        output.print_json({"sound": is_sound, **totals, "findings": listed})
    else:
        for item in findings:
            word = "damage" if item.is_damage else "note"
            typer.echo(output.escaped(f"{word}: {item.path} at byte {item.position}: {item.text}"))
        typer.echo(", ".join(f"{value} {name.replace('_', ' ')}" for name, value in totals.items()))
        typer.echo("sound" if is_sound else "DAMAGED")
    raise SystemExit(0 if is_sound else output.STATUS_FAILED)


@contextmanager
def stopped(path: Path) -> Iterator[OSDisk]:
    """The directory, locked meanwhile so that no broker starts on it; a read-only copy is taken as it is.

    Raises:
        DirectoryInUseError: a broker runs on it.
    """
    from txmq.runtime.os_disk import OSDisk

    if not (path / "journal").is_dir():
        output.fail(f"{path} is not a data directory of a broker; name it with --data DIR", output.STATUS_USAGE)
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
