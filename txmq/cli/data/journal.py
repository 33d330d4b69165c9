"""``txmq journal``: look at the redo journal of a stopped broker. Nothing is changed."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from txmq.cli import output
from txmq.cli.data.directory import DEFAULT_DATA, Data, say_findings, stopped

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help="Look at the redo journal of a stopped broker.")


@app.command()
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


@app.command()
def verify(data: Data = DEFAULT_DATA, as_json: output.Json = False) -> None:
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
