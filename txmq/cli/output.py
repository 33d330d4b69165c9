"""How commands speak: JSON on standard output with ``--json``, tables for people otherwise, errors on standard error.

Exit statuses: 0 done, 1 it did not work (one line says what to do next), 2 the command line or a setting is wrong,
130 interrupted.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import count
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from txmq.cli import text_table
from txmq.runtime.os_process import take_standard_descriptors

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

STATUS_FAILED = 1
STATUS_USAGE = 2
STATUS_INTERRUPTED = 130
SHOWN_BYTES_MAX = 200
DEFAULT_BOOTSTRAP = "txmq://127.0.0.1:8123"
PROGRESS_FROM_BYTES, PROGRESS_FROM_ROWS = 1 << 20, 10_000

Bootstrap = Annotated[
    str,
    typer.Option(
        "--bootstrap",
        "-b",
        envvar="TXMQ_BOOTSTRAP",
        help="Address of a broker, or zk://... of a cluster.",
        metavar="txmq://HOST:PORT",
    ),
]
BootstrapBeforeFile = Annotated[
    str | None,
    typer.Option(
        "--bootstrap", "-b", envvar="TXMQ_BOOTSTRAP", metavar="txmq://HOST:PORT", help="Goes before the file's."
    ),
]
Topic = Annotated[str, typer.Option("--topic", "-t", help="The topic.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds to wait for the broker.", min=0.001, max=3600.0)]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def command_group(text: str) -> typer.Typer:
    """Commands of one subject, as ``txmq topic``; named without a command, it shows its help."""
    return typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help=text)


def confirm(yes: bool, question: str) -> None:
    """Ask before what cannot be taken back, unless ``--yes`` has answered; a no ends the command."""
    if not yes:
        typer.confirm(question, abort=True, err=True)


class _ClosedStream(io.RawIOBase):
    """Standard input or output of a process that was started without: who uses it is told."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        raise OSError(f"standard {self._name} is closed; redirect it, if only to {os.devnull}")

    write = readinto

    def fileno(self) -> int:
        return self.readinto(None)


def open_streams() -> None:
    """Let no file get the number of a stream that is closed, and let who uses that stream say so in one line.

    What is said on standard error is for people: nobody is there, and it is dropped.
    """
    take_standard_descriptors()
    if sys.stdin is None:
        sys.stdin = io.TextIOWrapper(io.BufferedReader(_ClosedStream("input")), "utf-8")
    if sys.stdout is None:
        sys.stdout = io.TextIOWrapper(_ClosedStream("output"), "utf-8", write_through=True)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115  until the end


def print_json(value: object) -> None:
    """One JSON value on one line."""
    sys.stdout.write(json.dumps(value, ensure_ascii=True, default=str) + "\n")


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table: for people on a terminal, plain lines under the columns' names through a pipe; numbers stand right."""
    kept = [list(row) for row in rows]
    numeric = [
        bool(kept) and all(isinstance(row[index], int | float) and not isinstance(row[index], bool) for row in kept)
        for index in range(len(columns))
    ]
    _print(
        title, text_table.table_lines(columns, [[cell(value) for value in row] for row in kept], numeric, line_width())
    )


def print_fields(title: str, fields: Mapping[str, object]) -> None:
    """One thing's fields, a line each."""
    _print(title, text_table.field_lines([(name, cell(value)) for name, value in fields.items()], line_width()))


def show_rows(title: str, columns: Sequence[str], rows: Sequence[Mapping[str, object]], *, as_json: bool) -> None:
    """Rows as JSON with all their fields, or as a table of some columns."""
    if as_json:
        print_json(rows)
    else:
        print_table(title, columns, [[row[column] for column in columns] for row in rows])


def show_fields(title: str, fields: Mapping[str, object], *, as_json: bool) -> None:
    """One thing's fields, as JSON or a line each."""
    if as_json:
        print_json(fields)
    else:
        print_fields(title, fields)


def report(fields: Mapping[str, object], text: str, *, as_json: bool) -> None:
    """Say what a command has done: fields on standard output for programs, or a line for people on standard error."""
    if as_json:
        print_json(fields)
    else:
        note(text)


def print_paragraph(text: str, indent: str = "", first: str = "") -> None:
    """A sentence; on a terminal folded between words. The first line follows ``first``, if that is given."""
    typer.echo("\n".join(text_table.paragraph(escaped(text), line_width(), indent, first)))


def line_width() -> int | None:
    """Columns of the terminal; None through a pipe, whose lines are as long as they are."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


_printed = count()  # tables of this command


def _print(title: str, lines: Sequence[str]) -> None:
    if next(_printed):
        typer.echo("")
    if title and sys.stdout.isatty():
        typer.echo(typer.style(escaped(title), bold=True))
    typer.echo("\n".join(lines))


def cell(value: object) -> str:
    """A value as people read it; control characters are escaped."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, bytes):
        value = value.decode("utf-8", "backslashreplace")
    return escaped(str(value))


def content(found: bytes | None) -> str | None:
    """The beginning of a key or a value, as text."""
    if found is None:
        return None
    rest = "..." if len(found) > SHOWN_BYTES_MAX else ""
    return found[:SHOWN_BYTES_MAX].decode("utf-8", "backslashreplace") + rest


def moment(time_ms: int) -> str:
    """A time, in UTC."""
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds")


def escaped(text: str) -> str:
    """``text`` without the means to drive a terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def note(text: str) -> None:
    """A line for people on standard error."""
    sys.stderr.write(escaped(text) + "\n")


def note_json(value: object) -> None:
    """The same for programs: one JSON value on standard error, beside the lines of standard output."""
    sys.stderr.write(json.dumps(value, ensure_ascii=True) + "\n")


def fail(text: str, status: int = STATUS_FAILED) -> NoReturn:
    """End the command with one line on standard error."""
    sys.stdout.flush()
    sys.stderr.write(f"txmq: {escaped(text)}\n")
    raise SystemExit(status)


@contextmanager
def progress(size: int | None) -> Iterator[Callable[[float], None]]:
    """A bar on standard error, if that is a terminal and the work is long."""
    if not sys.stderr.isatty() or (size is not None and size < PROGRESS_FROM_BYTES):
        yield lambda _: None
        return
    from rich.progress import BarColumn, DownloadColumn, TransferSpeedColumn

    with _bar(size, BarColumn(), DownloadColumn(), TransferSpeedColumn()) as advance:
        yield advance


@contextmanager
def progress_of_rows(rows: int | None) -> Iterator[Callable[[float], None]]:
    """The same of a number of rows, which may be a guess."""
    if not sys.stderr.isatty() or (rows is not None and rows < PROGRESS_FROM_ROWS):
        yield lambda _: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn

    with _bar(rows, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as advance:
        yield advance


@contextmanager
def progress_of_lines() -> Iterator[Callable[[Sequence[str]], None]]:
    """Lines on standard error that are replaced by the next ones, if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(stderr=True), transient=True, auto_refresh=False) as live:
        yield lambda lines: live.update(Text("\n".join(map(escaped, lines))), refresh=True)


@contextmanager
def _bar(size: int | None, *columns: ProgressColumn) -> Iterator[Callable[[float], None]]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=size)
        yield lambda amount: bar.advance(task, amount)
