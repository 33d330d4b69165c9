"""``txmq journal``, ``txmq log``: look into the data directory of a stopped broker. Nothing is changed."""

from __future__ import annotations

import json
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
journal_app = output.command_group("Look at the redo journal of a stopped broker.")
log_app = output.command_group("Look at the messages' files of a stopped broker.")


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


# --- the journal ------------------------------------------------------------------------------------------------------


@journal_app.command()
def dump(
    data: Data = DEFAULT_DATA,
    from_lsn: Annotated[int, typer.Option("--from", metavar="LSN", min=0, help="Begin there.")] = 0,
    count_max: Annotated[int | None, typer.Option("--max", "-n", min=1, help="End after so many records.")] = None,
    as_json: output.Json = False,
) -> None:
    """Print the journal's records, oldest first: where each stands and what it says; never payloads.

    The broker must be stopped; nothing is changed.

    [bold]Examples[/bold]

      txmq journal dump --data var/txmq --max 20
      txmq journal dump --data var/txmq --json | jq .entries
    """
    from itertools import islice

    from txmq.redo import inspect

    with stopped(data) as disk:
        for record in islice(inspect.dump(disk, from_lsn=from_lsn), count_max):
            fields = record.describe()
            if as_json:
                output.print_json(fields)
                continue
            entries = fields.pop("entries")
            typer.echo(" ".join(f"{name}={value}" for name, value in fields.items()))
            assert isinstance(entries, list)
            for entry in entries:
                typer.echo(output.escaped("    " + json.dumps(entry, ensure_ascii=False, default=str)))


@journal_app.command("verify")
def verify_journal(data: Data = DEFAULT_DATA, as_json: output.Json = False) -> None:
    """Check identity, checkpoints and every record of the journal.

    Exit status 1 if something is damaged. The broker must be stopped; nothing is changed.

    [bold]Example[/bold]

      txmq journal verify --data var/txmq
    """
    from txmq.redo import inspect

    with stopped(data) as disk:
        verdict = inspect.verify(disk)
    totals = {"records": verdict.records, "end_lsn": verdict.end_lsn}
    say_findings(verdict.findings, totals, is_sound=verdict.is_sound, as_json=as_json)


# --- the log ----------------------------------------------------------------------------------------------------------


@log_app.callback()
def _group() -> None:
    """Keeps ``verify`` a word of its own: typer folds a group of one command otherwise."""


@log_app.command("verify")
def verify_log(data: Data = DEFAULT_DATA, as_json: output.Json = False) -> None:
    """Read every byte of every partition: checksums, places, offsets without holes.

    Exit status 1 if something is damaged. The broker must be stopped; nothing is changed.

    [bold]Example[/bold]

      txmq log verify --data var/txmq
    """
    from txmq.log.verify import verify_log

    size = sum(segment.stat().st_size for segment in (data / "log").rglob("*.log"))
    with stopped(data) as disk, output.progress(size) as advance:
        verdict = verify_log(disk, advance)
    totals = {
        "partitions": verdict.partitions, "segments": verdict.segments, "batches": verdict.batches,
        "messages": verdict.messages, "size_bytes": verdict.size_bytes,
    }  # fmt: skip
    say_findings(verdict.findings, totals, is_sound=verdict.is_sound, as_json=as_json)
