"""One self-contained page of a run: drawings that put txmq, its bounds, the bare limits and the peers side by side.

No script, nothing loaded from anywhere; opens from the disk, in light and dark. A row that was not measured in this
run is left out of the drawings; one whose peer is not installed says how to install it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from textwrap import shorten

from bench import svg
from bench.model import Result
from bench.report import LEGEND
from bench.svg import Mark, with_unit
from txmq.testing.bench.limits import ECHO, SYNC, SYNCED_ECHO, busy
from txmq.testing.bench.model import LATENCY_UNITS, PERCENTILES, amount


@dataclass(frozen=True, slots=True)
class Line:
    """A figure of a row in a drawing; ``row`` may be the name of a bare limit."""

    row: str
    label: str
    figure: str = "rate"


@dataclass(frozen=True, slots=True)
class Chart:
    """One drawing."""

    title: str
    note: str
    lines: tuple[Line, ...]
    is_latency: bool = False


_DOTS = "Dots at p50, p90, p99, p99.9; figures are p50 / p99."
REASON_LENGTH_MAX = 75  # in a drawing; all of it stands in the table
_BESIDE = ("outbox", "bare XA")
CHARTS = (
    Chart("One caller who waits", f"Time until the answer. {_DOTS} The stroke is the bound on p50.", (
        Line("put-single-sync-on", "txmq put, synced", "p50"),
        Line("tx-local", "txmq transaction, synced", "p50"),
        Line("peer-rabbitmq-alone", "RabbitMQ quorum, confirm, synced", "p50"),
        Line("peer-rabbitmq-tx", "RabbitMQ classic, tx.commit of two, synced", "p50"),
        Line("peer-nats-sync-alone", "NATS JetStream, synced", "p50"),
        Line(SYNCED_ECHO, "bare: echo after a sync"),
        Line(SYNC, "bare: write and sync of 4 KiB"),
        Line("put-single-sync-interval", "txmq put, sync = interval", "p50"),
        Line("peer-nats-alone", "NATS JetStream, not synced", "p50"),
        Line(ECHO, "bare: echo"),
    ), is_latency=True),
    Chart("Many in flight", "Acknowledged messages a second, one message a request.", (
        Line("put-pipelined-sync-on", "txmq put, synced, raw generator"),
        Line("put-pipelined-sync-interval", "txmq put, interval, raw generator"),
        Line("tx-raw", "txmq transactions, synced, raw generator"),
        Line("tx-threads", "txmq transactions, synced, 64 threads, 1 processor"),
        Line("tx-threads", "txmq transactions, synced, 64 threads, spread", "rate, spread"),
        Line("peer-rabbitmq-in-flight", "RabbitMQ quorum, 512 unconfirmed, synced"),
        Line("peer-nats-in-flight", "NATS JetStream, 512 in flight, not synced"),
    )),
    Chart("In bulk, one Python process", "Messages of 100 B a second.", (
        Line("send-many", "txmq send_many, synced"),
        Line("consume", "txmq browse, decoded"),
        Line("consume-group", "txmq group, poll and ack", "poll"),
        Line("consume-group", "txmq group, listener", "run"),
        Line("backlog", "txmq catch-up with 20 million", "catch-up"),
    )),
    Chart("Order kept", "Messages of 100 B a second: the ordered producer, the plain one, the spool.", (
        Line("ordered", "txmq ordered send_async", "send_async: ordered"),
        Line("ordered", "bare: plain send_async", "send_async: plain"),
        Line("ordered", "txmq ordered send, 64 threads", "send, 64 thr: ordered"),
        Line("ordered", "bare: plain send, 64 threads", "send, 64 thr: plain"),
        Line("spool", "txmq spool filled, 64 threads", "spool"),
        Line("spool", "txmq spool drained", "drain"),
    )),
    Chart("A row and its message, SQLite", "Transactions a second, both durable. The stroke is the bound.", (
        Line("last-resource", "txmq last resource, 1 thread", "rate, 1 thr"),
        Line("last-resource", "bare: its steps without txmq, 1 thread", "steps, 1 thr"),
        Line("last-resource", "bare: row + outbox row, 1 thread", "outbox, 1 thr"),
        Line("last-resource", "txmq last resource, 8 threads", "rate, 8 thr"),
        Line("last-resource", "bare: its steps without txmq, 8 threads", "steps, 8 thr"),
        Line("last-resource", "bare: row + outbox row, 8 threads", "outbox, 8 thr"),
    )),
    Chart("A row and its message, MariaDB", "Transactions a second, both durable. The stroke is the bound.", (
        Line("last-resource-mariadb", "txmq last resource, 1 thread", "rate, 1 thr"),
        Line("last-resource-mariadb", "bare: its steps without txmq, 1 thread", "steps, 1 thr"),
        Line("last-resource-mariadb", "bare: row + outbox row, 1 thread", "outbox, 1 thr"),
        Line("mariadb-bare", "bare: row alone, 1 thread", "plain commit, 1 thr"),
        Line("xa-mariadb", "txmq XA, 1 thread", "rate, 1 thr"),
        Line("xa-mariadb", "bare: steps of that without txmq, 1 thread", "steps, 1 thr"),
        Line("xa-mariadb", "bare: XA of the row alone, 1 thread", "bare XA, 1 thr"),
        Line("last-resource-mariadb", "txmq last resource, 8 threads", "rate, 8 thr"),
        Line("last-resource-mariadb", "bare: its steps without txmq, 8 threads", "steps, 8 thr"),
        Line("last-resource-mariadb", "bare: row + outbox row, 8 threads", "outbox, 8 thr"),
        Line("mariadb-bare", "bare: row alone, 8 threads", "plain commit, 8 thr"),
        Line("xa-mariadb", "txmq XA, 8 threads", "rate, 8 thr"),
        Line("xa-mariadb", "bare: steps of that without txmq, 8 threads", "steps, 8 thr"),
        Line("xa-mariadb", "bare: XA of the row alone, 8 threads", "bare XA, 8 thr"),
    )),
    Chart("From the database's commit to the reader", f"{_DOTS} The stroke is the bound on p99.", (
        Line("visible", "txmq last resource, SQLite", "p50"),
        Line("visible-mariadb", "txmq last resource, MariaDB", "p50"),
        Line("visible-xa-mariadb", "txmq XA, MariaDB", "p50"),
        Line("peer-outbox", "outbox in SQLite, relay each second", "p50"),
        Line("peer-outbox-mariadb", "outbox in MariaDB, relay each second", "p50"),
    ), is_latency=True),
)  # fmt: skip

_KEY = {"own": "txmq", "peer": "others", "bare": "bare limit of this machine", "bound": "bound"}
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2530; --faint: #66727f; --paper: #fff; --line: #dde3e9;
  --own: #2563c9; --peer: #c98a2b; --bare: #9aa7b4; --bound: #c2304a; --good: #1e7f4f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9ee; --faint: #93a0ad; --paper: #14181d; --line: #2c343d;
  --own: #6ea3f5; --peer: #e0ad5e; --bare: #6b7884; --bound: #f2728a; --good: #5cc690; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 1000px; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 0; }
p { margin: .2rem 0 .6rem; color: var(--faint); } svg { width: 100%; height: auto; display: block; }
text { font: 14px system-ui, sans-serif; fill: var(--ink); } .name { text-anchor: end; }
.tick { text-anchor: middle; fill: var(--faint); font-size: 12px; } .missing { fill: var(--faint); font-style: italic; }
.own { fill: var(--own); } .peer { fill: var(--peer); } .bare { fill: var(--bare); }
.range { stroke-width: 3; fill: none; } .own.range { stroke: var(--own); } .peer.range { stroke: var(--peer); }
.bare.range { stroke: var(--bare); } .axis { stroke: var(--line); } .whisker { stroke: var(--ink); stroke-width: 1.5; }
.bound { stroke: var(--bound); stroke-width: 3; }
.key span { display: inline-block; margin-right: 1.2rem; } .key i { display: inline-block; width: .8rem; height: .8rem;
  margin-right: .35rem; border-radius: 2px; vertical-align: -1px; }
div { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13px; } th { text-align: left; }
td, th { padding: .2rem .6rem .2rem 0; border-bottom: 1px solid var(--line); vertical-align: top;
  overflow-wrap: anywhere; }
td:first-child { min-width: 16rem; }
.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.pass, .within, .LIMIT, .MISS, .failed { white-space: nowrap; overflow-wrap: normal; }
.pass { color: var(--good); } .MISS, .failed { color: var(--bound); font-weight: 600; }
"""


def save(
    results: Sequence[Result], facts: Mapping[str, str], bare: Mapping[str, float], path: Path,
    charts: Sequence[Chart] = CHARTS,
) -> Path:  # fmt: skip
    """Write the page."""
    path.write_text(page(results, facts, bare, charts), "utf-8")
    return path


def page(
    results: Sequence[Result], facts: Mapping[str, str], bare: Mapping[str, float], charts: Sequence[Chart] = CHARTS
) -> str:  # fmt: skip
    """The whole page."""
    by_name = {result.row.name: result for result in results}
    drawings = [_drawing(chart, by_name, bare) for chart in charts]
    machine = " · ".join(f"{escape(name)} {escape(text)}" for name, text in facts.items())
    limits = " · ".join(f"{escape(name)} {amount(value)}" for name, value in bare.items())
    key = "".join(
        f'<span><i style="background:var(--{name})"></i>{text}</span>'
        for name, text in (
            ("own", "txmq"),
            ("peer", "others"),
            ("bare", "bare limit of this machine"),
            ("bound", "bound"),
        )
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>txmq benchmarks</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
        f"<h1>txmq benchmarks</h1><p>{machine}</p><p>Bare limits: {limits}</p>"
        f"<p><strong>{busy(facts) or ''}</strong></p>"
        f'<p class="key">{key}</p>{"".join(drawings)}{_table(results)}</body></html>\n'
    )


def _drawing(chart: Chart, results: Mapping[str, Result], bare: Mapping[str, float]) -> str:
    marks = [mark for line in chart.lines if (mark := _mark(line, results, bare)) is not None]
    if not any(mark.style == "own" for mark in marks):
        return ""
    drawn = svg.latencies(marks) if chart.is_latency else svg.bars(marks)
    return f"<h2>{escape(chart.title)}</h2><p>{escape(chart.note)}</p>{drawn}"


def _mark(line: Line, results: Mapping[str, Result], bare: Mapping[str, float]) -> Mark | None:
    """None if this run did not measure it."""
    if line.row in bare:
        return Mark(line.label, "bare", bare[line.row], with_unit(bare[line.row], "ms"))
    result = results.get(line.row)
    if result is None:
        return None
    style = "bare" if line.label.startswith("bare") else "peer" if line.row.startswith("peer") else "own"
    value = result.median(line.figure)
    if value is None:
        reason = result.missing or result.failure or "not measured"
        return Mark(line.label, style, None, shorten(reason, REASON_LENGTH_MAX, placeholder=" ..."))
    spread = {name: median for name in PERCENTILES if (median := result.median(name)) is not None}
    text = with_unit(value, result.row.units[line.figure])
    if line.figure in LATENCY_UNITS and "p99" in spread:
        text = f"{amount(value)} / {amount(spread['p99'])} ms"
    samples = result.samples[line.figure]
    return Mark(line.label, style, value, text, min(samples), max(samples), _bound_of(line, result), spread)


def _bound_of(line: Line, result: Result) -> float | None:
    """A bound on this figure, on another percentile of it, or on its share of the bare one."""
    bounds = {bound.figure: bound.limit for bound in result.row.bounds}
    if line.figure in bounds:
        return bounds[line.figure]
    if line.figure in LATENCY_UNITS:
        return next((bounds[name] for name in LATENCY_UNITS if name in bounds), None)
    kind, comma, threads = line.figure.partition(",")
    others = [name for name in result.row.units if name.endswith(f",{threads}") and name.partition(",")[0] in _BESIDE]
    beside = result.median(others[0]) if others else None
    if kind == "rate" and beside is not None and f"share{comma}{threads}" in bounds:
        return beside * bounds[f"share{comma}{threads}"] / 100
    return None


def _table(results: Sequence[Result]) -> str:
    lines = "".join(_rows(result) for result in results)
    heads = "".join(f"<th>{text}</th>" for text in ("Work", "Figure", "Bound", "Measured", "Lowest - highest", ""))
    return f"<h2>Everything</h2><p>{LEGEND}.</p><div><table><tr>{heads}</tr>{lines}</table></div>"


def _rows(result: Result) -> str:
    bounds = {bound.figure: bound for bound in result.row.bounds}
    title, verdict = escape(result.row.title), result.verdict
    shown = f'<td class="{verdict.partition(" ")[0]}">{verdict}</td>'
    if not result.samples:
        why = escape(result.missing or result.failure or "")
        return f'<tr><td>{title}</td><td colspan="4">{why}</td>{shown}</tr>'
    lines: list[str] = []
    for figure, unit in result.row.units.items():
        samples, bound = result.samples.get(figure), bounds.get(figure)
        if not samples:
            continue
        limit = f"{'≥' if bound.at_least else '≤'} {amount(bound.limit)} {bound.unit}" if bound else ""
        if bound and (best := result.best(bound)) is not None:
            limit += f" (at best {amount(best)})"
        lines.append(
            f'<tr><td>{"" if lines else title}</td><td>{escape(figure)}</td><td class="n">{limit}</td>'
            f'<td class="n">{with_unit(result.median(figure) or 0, unit)}</td>'
            f'<td class="n">{amount(min(samples))} - {amount(max(samples))}</td>{"<td></td>" if lines else shown}</tr>'
        )
    return "".join(lines)
