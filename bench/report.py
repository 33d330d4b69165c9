"""The table on the terminal, and the same as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.model import Bound, Result
from txmq.testing.bench.limits import busy
from txmq.testing.bench.model import amount

_STYLES = {"pass": "green", "within 20 %": "yellow", "LIMIT": "magenta", "MISS": "bold red", "failed": "bold red"}


LEGEND = (
    "median of five; a row is missed beyond 20 % of its bound. LIMIT: its forced writes and round trips alone, as bare "
    "as this machine does them (at best), miss the bound too"
)


def show(results: Sequence[Result], facts: Mapping[str, str], bare: Mapping[str, float], console: Console) -> None:
    """Print the table."""
    console.print("  ".join(f"[dim]{name}[/] {text}" for name, text in facts.items()))
    table = Table(title=LEGEND, title_justify="left")
    for heading in ("work", "figure"):
        table.add_column(heading)
    for heading in ("bound", "measured", "lowest - highest"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("bare limit here", no_wrap=True)
    table.add_column("")
    for result in results:
        _add(table, result, {**bare, **result.bare})
        table.add_section()
    console.print(table)
    if (others := busy(facts)) is not None:
        console.print(f"[bold]{others}[/]")


def _add(table: Table, result: Result, bare: Mapping[str, float]) -> None:
    row = result.row
    verdict = result.verdict
    shown = f"[{_STYLES[verdict]}]{verdict}[/]" if verdict else ""
    limits = "\n".join([*(f"{name}: {amount(bare[name])}" for name in row.bare if name in bare), *_bests(result)])
    reason = result.missing or result.failure
    if reason is not None:
        # Below the work: a long line is folded there, and does not push the figures of all rows off the screen.
        why = Text(f"  {reason}", style="dim" if result.missing else "red")
        table.add_row(Text.assemble(row.title, "\n", why), "", "", "", "", limits, shown)
    bounds = {bound.figure: bound for bound in row.bounds}
    for number, (figure, unit) in enumerate(row.units.items()):
        values = result.samples.get(figure)
        if not values:
            continue
        first = number == 0
        table.add_row(
            row.title if first else "",
            figure,
            _bound(bounds.get(figure)),
            f"{amount(result.median(figure) or 0)} {unit}",
            f"{amount(min(values))} - {amount(max(values))}",
            limits if first else "",
            shown if first else "",
        )


def _bests(result: Result) -> list[str]:
    """The best that the machine allowed, for each bound for which that is known."""
    bests = [(bound, result.best(bound)) for bound in result.row.bounds]
    return [f"at best {bound.figure}: {amount(best)} {bound.unit}" for bound, best in bests if best is not None]


def _bound(bound: Bound | None) -> str:
    return "" if bound is None else f"{'>=' if bound.at_least else '<='} {amount(bound.limit)} {bound.unit}"


def to_json(results: Sequence[Result], facts: Mapping[str, str], bare: Mapping[str, float]) -> dict[str, Any]:
    """Everything measured, for programs."""
    return {"machine": dict(facts), "bare": dict(bare), "rows": [_row_json(result) for result in results]}


def _row_json(result: Result) -> dict[str, Any]:
    row = result.row
    return {
        "name": row.name, "title": row.title, "verdict": result.verdict, "failure": result.failure,
        "missing": result.missing,
        "figures": {
            figure: {"unit": unit, "median": result.median(figure), "samples": result.samples.get(figure, [])}
            for figure, unit in row.units.items()
        },
        "bounds": [
            {"figure": b.figure, "limit": b.limit, "unit": b.unit, "at_least": b.at_least, "best": result.best(b)}
            for b in row.bounds
        ],
        "bare": result.bare,
    }  # fmt: skip


def save(content: Mapping[str, Any], directory: Path, stamp: str) -> Path:
    """Keep the JSON of this run."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{stamp}.json"
    path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    return path
