"""``txmq log``: look at the messages' files of a stopped broker. Nothing is changed."""

from __future__ import annotations

import typer

from txmq.cli import output
from txmq.cli.data.directory import DEFAULT_DATA, Data, say_findings, stopped

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode="rich", help="Look at the messages' files of a stopped broker."
)


@app.callback()
def _group() -> None:
    """Keeps ``verify`` a word of its own: typer folds a group of one command otherwise."""


@app.command()
def verify(data: Data = DEFAULT_DATA, as_json: output.Json = False) -> None:
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
