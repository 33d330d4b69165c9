"""``txmq bench`` on the terminal and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from txmq.cli import output
from txmq.cli.bench.run import NOT_A_DISK
from txmq.testing.bench.limits import LOOPBACK_BYTES, LOOPBACK_MESSAGES, busy
from txmq.testing.bench.model import PERCENTILES, amount

BARE_RATES = frozenset({LOOPBACK_BYTES})
HIDDEN = frozenset({LOOPBACK_MESSAGES})  # the other one, for the budget's messages

if TYPE_CHECKING:
    from txmq.cli.bench.run import Measured, Report


def as_fields(report: Report) -> dict[str, Any]:
    """Everything measured, for programs."""
    return {
        "server": report.server, "own_broker": report.is_own, "interrupted": report.interrupted,
        "broker": report.broker, "machine": report.machine, "bare": report.bare,
        "rows": [
            {
                "name": row.load.name, "title": row.load.title, "count": row.count, "failure": row.failure,
                "figures": {
                    name: {"value": value, "unit": row.load.units[name]} for name, value in row.figures.items()
                },
            }
            for row in report.rows
        ],
    }  # fmt: skip


def show(report: Report) -> None:
    """Facts, the table, what to know about it."""
    output.print_fields("", _facts(report))
    # Narrow enough for 80 columns: the names are explained by --help.
    output.print_table("", ("row", "rate", *(f"{name} ms" for name in PERCENTILES)), _rows(report))
    for row in report.rows:
        if row.failure is not None:
            output.print_paragraph(f"{row.load.name} failed: {row.failure}")
    for line in _notes(report):
        output.print_paragraph(line)


def _facts(report: Report) -> dict[str, str]:
    machine = report.machine
    return {
        "broker": f"{report.server} ({'its own' if report.is_own else 'yours'}), sync {report.broker['sync']}",
        "machine": f"{machine['processor']}, {machine['cores']} cores, {machine['memory']}, "
        f"load {machine['load before']} before",
        "system": f"{machine['system']}, file system {machine['file system']}, Python {machine['python']}, "
        f"hot modules: {machine.get('hot modules', 'source')}",
    }


def _rows(report: Report) -> list[list[str]]:
    rows = [cells for row in report.rows for cells in _lines(row)]
    for name, value in report.bare.items():
        is_rate = name in BARE_RATES
        rate = f"{amount(value / 1e9)} GB/s" if is_rate else ""
        if name not in HIDDEN:
            rows.append([name.removesuffix(" p50 ms").removesuffix(" bytes/s"), rate, "" if is_rate else amount(value)])
    return [cells + [""] * (2 + len(PERCENTILES) - len(cells)) for cells in rows]


def _lines(row: Measured) -> list[list[str]]:
    if row.failure is not None:
        return [[row.load.name, "failed"]]
    units = row.load.units
    latencies = [amount(row.figures[name]) if name in row.figures else "" for name in PERCENTILES]
    others = {name: value for name, value in row.figures.items() if name != "rate" and name not in PERCENTILES}
    first = [row.load.name, f"{amount(row.figures['rate'])} {units['rate']}", *latencies]
    return [first, *([f"  {name}", f"{amount(value)} {units[name]}"] for name, value in others.items())]


def _notes(report: Report) -> list[str]:
    notes = []
    if report.interrupted:
        notes.append("Interrupted: what is missing was not measured.")
    if (others := busy(report.machine)) is not None:
        notes.append(others)
    if report.machine["file system"] in NOT_A_DISK:
        notes.append("This file system is memory: no disk was measured. Name a directory on one with --directory.")
    if report.is_remote:
        notes.append("The broker is elsewhere: the bare limits are of this machine, its ping includes the network.")
    return notes
