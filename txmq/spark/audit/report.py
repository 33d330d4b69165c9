"""What an audit leaves: a dataset of all findings, one JSON object, and one self-contained page.

The object, or *summary*, is for programs and for the terminal, and the page is made of it alone: the verdict, a tile
for each check, where and when, and the findings. The page has no script and loads nothing from anywhere; it opens from
the disk, in light and dark.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from txmq.runtime.private_files import make_private_directory, write_private
from txmq.spark.audit.audit import AuditResult
from txmq.spark.audit.drawing import Mark, Series, along_the_log, over_time, time_axis
from txmq.spark.audit.spec import Kind

SAMPLE_SIZE = 100  # findings of each kind in the object and on the page; the dataset has them all
Summary = dict[str, Any]

MEANING: Mapping[Kind, str] = {
    Kind.MISSING: "rows without a message",
    Kind.PHANTOM: "messages without a row",
    Kind.DUPLICATE: "messages whose row has one already",
    Kind.LATE: "messages long after their row: late, or sent again",
    Kind.DIFFERS: "row and message say different things",
    Kind.OUT_OF_ORDER: "messages behind a later one of their key",
    Kind.GAP: "offsets that cannot be read",
    Kind.TORN: "transactions of which a part is not visible",
    Kind.IN_DOUBT: "transactions that wait for their outcome, or of which a home was given up",
}
PARTITIONS_DRAWN_MAX = 48
CELL_LENGTH = 48  # what is longer is broken
# What was found first: the rest of a wide table is out of sight on a small screen.
_COLUMNS = ("detail", "identity", "partition", "offset", "key", "txid", "row_time", "message_time")
_NAMES = ("what", "identity", "partition", "offset", "key", "transaction", "row", "message")
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2530; --faint: #5d6975; --paper: #fff; --line: #dde3e9; --tile: #f5f7f9;
  --rows: #9bbcf0; --messages: #1f55b5; --p99: #b06a12; --bad: #b8243f; --badpaper: #fdf0f2; --good: #1a7046;
  --goodpaper: #eef8f2; --log: #c3ccd5; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9ee; --faint: #9aa7b4; --paper: #14181d; --line: #2c343d;
  --tile: #1b2127; --rows: #35558a; --messages: #86b4fa; --p99: #e6b465; --bad: #ff7d94; --badpaper: #331a20;
  --good: #62cd98; --goodpaper: #16291f; --log: #46515c; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 1000px; padding: 0 1rem; }
h1 { font-size: 1.1rem; margin: 0; color: var(--faint); font-weight: 600; }
h2 { font-size: 1.1rem; margin: 2rem 0 0; } p { margin: .2rem 0 .6rem; color: var(--faint); }
.verdict { font-size: 1.45rem; line-height: 1.3; font-weight: 650; padding: .9rem 1.1rem; margin: .6rem 0 1rem;
  border-radius: 8px; border-left: 8px solid; }
.verdict.good { color: var(--good); background: var(--goodpaper); } .verdict.bad { color: var(--bad);
  background: var(--badpaper); }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(182px, 1fr)); gap: .6rem; }
.tile { background: var(--tile); border-radius: 8px; padding: .6rem .8rem; border-top: 4px solid var(--line); }
.tile b { display: block; font-size: 1.5rem; line-height: 1.2; font-variant-numeric: tabular-nums; }
.tile span { font-weight: 600; } .tile small { display: block; color: var(--faint); }
.tile.good { border-color: var(--good); } .tile.good b { color: var(--good); }
.tile.bad { border-color: var(--bad); background: var(--badpaper); } .tile.bad b { color: var(--bad); }
.tile.none b { color: var(--faint); }
svg { width: 100%; min-width: 640px; height: auto; display: block; }
text { font: 13px system-ui, sans-serif; fill: var(--ink); }
.tick { fill: var(--faint); font-size: 12px; } .band { text-anchor: end; fill: var(--faint); font-size: 11px; }
.start { text-anchor: start; } .middle { text-anchor: middle; } .end { text-anchor: end; }
.axis { stroke: var(--line); } .line { fill: none; stroke-width: 2; } .rows.area { fill: var(--rows); }
.messages.line { stroke: var(--messages); } .p99.line { stroke: var(--p99); }
.break { stroke: var(--faint); stroke-dasharray: 2 4; }
.idle { text-anchor: middle; fill: var(--faint); font-size: 11px; }
.found { fill: var(--bad); } .log { fill: var(--log); }
.key span { display: inline-block; margin-right: 1.2rem; } .key i { display: inline-block; width: .8rem; height: .8rem;
  margin-right: .35rem; border-radius: 2px; vertical-align: -1px; }
div.wide { overflow-x: auto; }
@media (max-width: 640px) { body { margin: 1rem auto; } .verdict { font-size: 1.15rem; } }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th { text-align: left; }
td, th { padding: .2rem .7rem .2rem 0; border-bottom: 1px solid var(--line); vertical-align: top;
  white-space: nowrap; } td.long { white-space: normal; overflow-wrap: anywhere; min-width: 14rem; }
td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
"""
DATASET, OBJECT, PAGE = "findings", "audit.json", "audit.html"


def summary_of(result: AuditResult, facts: Mapping[str, object]) -> Summary:
    """The object.

    Args:
        facts: of the surroundings, put first: what was read from where, when, how long it took.
    """
    spec, window = result.spec, result.window
    found = [kind for kind, count in result.counts.items() if count]
    return {
        "clean": result.is_clean,
        **facts,
        "topic": spec.topic,
        "match": [str(term) for term in spec.match],
        "compare": [str(term) for term in spec.compare],
        "order": spec.order,
        "window": {"from": iso(window.from_ms), "to": iso(window.to_ms), "settle_s": spec.settle_ms / 1000},
        "counts": {kind.value: count for kind, count in result.counts.items()},
        "unjudged": dict(result.unjudged),
        "blind": list(result.blind),
        "unchecked": {kind.value: why for kind, why in result.unchecked.items()},
        "totals": asdict(result.totals),
        "bucket_s": result.bucket_s,
        "moments": [asdict(moment) for moment in result.moments],
        "partitions": [asdict(line) for line in result.partitions],
        "findings": {kind.value: [_plain(line) for line in result.sample(kind, SAMPLE_SIZE)] for kind in found},
    }


def verdict(summary: Summary) -> str:
    """The result in one sentence."""
    totals, counts = summary["totals"], summary["counts"]
    rows, messages = _counted(totals["rows"], "row"), _counted(totals["messages"], "message")
    if summary["clean"]:
        limits = "" if len(summary["unchecked"]) == 0 else " in all that was checked"
        left = "".join(f"; not judged: {count:,} {what}" for what, count in summary["unjudged"].items())
        return f"Clean: {rows} and {messages} agree{limits}{left}."
    if not any(counts.values()):
        return f"Not clean, and no findings: {'; '.join(summary['blind'])}."
    found = ", ".join(f"{count:,} {kind}" for kind, count in counts.items() if count)
    return f"{_counted(sum(counts.values()), 'finding')} in {rows} and {messages}: {found}."


def iso(ms: int | None) -> str | None:
    """A time as text, in UTC."""
    if ms is None:
        return None
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def rounded(ms: float | None) -> str:
    """A latency for people."""
    if ms is None:
        return "-"
    if abs(ms) >= 10_000:
        return f"{ms / 1000:,.1f} s"
    digits = max(0, 2 - int(math.log10(abs(ms)))) if abs(ms) >= 1 else 2
    return f"{ms:.{digits}f} ms"


def _plain(line: Mapping[str, object]) -> dict[str, object]:
    """Without what is not known; times as text."""
    return {
        name: iso(_ms(value)) if isinstance(value, datetime) else value
        for name, value in line.items()
        if value is not None and name != "kind"
    }


def _ms(moment: datetime) -> int:
    """Spark hands times out in the machine's zone, without saying so."""
    return int(moment.timestamp() * 1000)


def _counted(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


# --- the page ---------------------------------------------------------------------------------------------------------


def page(summary: Summary) -> str:
    """The page, as HTML."""
    mood = "good" if summary["clean"] else "bad"
    title = f"txmq audit: {_text(summary['topic'])} against {_text(summary.get('table') or 'rows')}"
    sign = "&#10003;" if summary["clean"] else "&#10007;"
    parts = [
        f"<h1>{title}</h1>",
        f'<div class="verdict {mood}">{sign} {_text(verdict(summary))}</div>',
        f"<p>{_text(_window(summary))}</p>",
        f'<div class="tiles">{"".join(_tile(summary, kind) for kind in Kind)}</div>',
        _amounts(summary),
        _log(summary),
        _latencies(summary),
        _findings(summary),
        _facts(summary),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{title}</title>"
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>'
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _text(value: object) -> str:
    return escape(str(value))


def _window(summary: Summary) -> str:
    window = summary["window"]
    begin, end = window["from"] or "the beginning of the log", window["to"] or "now"
    return (
        f"Rows and messages from {begin} to {end}; a message may take {window['settle_s']:g} s "
        "before its row counts as missing."
    )


def _tile(summary: Summary, kind: Kind) -> str:
    why = summary["unchecked"].get(kind.value)
    if why is not None:
        name = f"<b>&ndash;</b><span>{kind.value}</span>"
        return f'<div class="tile none">{name}<small>not checked: {_text(why)}</small></div>'
    count = summary["counts"][kind.value]
    mood = "bad" if count else "good"
    return f'<div class="tile {mood}"><b>{count:,}</b><span>{kind.value}</span><small>{MEANING[kind]}</small></div>'


def _amounts(summary: Summary) -> str:
    if not summary["moments"]:
        return ""
    step = summary["bucket_s"] * 1000
    moments = {moment["at_ms"]: moment for moment in summary["moments"]}
    marks = [
        Mark(_since(line), kind, _position(line))
        for kind, lines in summary["findings"].items()
        for line in lines
        if "row_time" in line or "message_time" in line
    ]
    axis = time_axis(list(moments), step, marks)
    times = axis.buckets()
    rows, messages = ([moments[at][name] if at in moments else 0 for at in times] for name in ("rows", "messages"))
    series = [Series("rows", "rows", rows, is_area=True), Series("messages", "messages", messages)]
    drawn = _wide(over_time(axis, times, step, series, marks, ""))
    has_rows = any(rows)
    note = "" if has_rows else " No column says when rows were committed."
    return (
        f"<h2>When</h2><p>Messages and rows by {_bucket(summary)}, at their own times (UTC); "
        f"below, what was found.{note}</p>"
        f"{_key({'rows': 'rows', 'messages': 'messages', 'bad': 'findings'})}{drawn}"
    )


def _latencies(summary: Summary) -> str:
    moments = [moment for moment in summary["moments"] if moment["latency_ms_p50"] is not None]
    if not moments:
        return ""
    totals = summary["totals"]
    series = [
        Series("p50", "messages", [moment["latency_ms_p50"] for moment in moments]),
        Series("p99", "p99", [moment["latency_ms_p99"] for moment in moments]),
    ]
    times, step = [moment["at_ms"] for moment in moments], summary["bucket_s"] * 1000
    drawn = _wide(over_time(time_axis(times, step), times, step, series, [], " ms"))
    return (
        f"<h2>Latency</h2><p>From the row's time to the message's, by {_bucket(summary)}. All: p50 "
        f"{rounded(totals['latency_ms_p50'])}, p99 {rounded(totals['latency_ms_p99'])}, most "
        f"{rounded(totals['latency_ms_max'])}. Below zero: the message was made before the row's time.</p>"
        f"{_key({'messages': 'p50', 'p99': 'p99'})}{drawn}"
    )


def _log(summary: Summary) -> str:
    spans = {line["partition"]: (line["first"], line["last"]) for line in summary["partitions"]}
    if not spans:
        return ""
    marks: dict[int, list[Mark]] = {}
    for kind, lines in summary["findings"].items():
        for line in lines:
            if "offset" in line:
                marks.setdefault(line["partition"], []).append(Mark(line["offset"], kind, _position(line)))
    wanted = sorted(spans, key=lambda partition: (partition not in marks, partition))[:PARTITIONS_DRAWN_MAX]
    more = "" if len(spans) <= len(wanted) else f" {len(spans) - len(wanted)} more partitions are not drawn."
    drawn = _wide(along_the_log({partition: spans[partition] for partition in wanted}, marks))
    return f"<h2>Where in the log</h2><p>The offsets that were read; red: something was found there.{more}</p>{drawn}"


def _findings(summary: Summary) -> str:
    parts = []
    for kind, lines in summary["findings"].items():
        count = summary["counts"][kind]
        more = f" The first {len(lines)}; all are in the dataset." if count > len(lines) else ""
        parts.append(f"<h2>{kind}: {count:,}</h2><p>{MEANING[Kind(kind)].capitalize()}.{more}</p>{_table(lines)}")
    return "".join(parts)


def _table(lines: Sequence[Mapping[str, Any]]) -> str:
    shown = [(name, head) for name, head in zip(_COLUMNS, _NAMES, strict=True) if any(name in line for line in lines)]
    heads = "".join(f"<th>{head}</th>" for _, head in shown)
    body = "".join(f"<tr>{''.join(_cell(name, line.get(name)) for name, _ in shown)}</tr>" for line in lines)
    return _wide(f"<table><tr>{heads}</tr>{body}</table>")


def _wide(content: str) -> str:
    """A table that a telephone scrolls sideways, by itself."""
    return f'<div class="wide">{content}</div>'


def _cell(name: str, value: object) -> str:
    if isinstance(value, int):
        return f'<td class="n">{value}</td>'
    is_long = name == "detail" or len(str(value)) > CELL_LENGTH
    return f"<td{' class=long' if is_long else ''}>{'' if value is None else _text(value)}</td>"


def _facts(summary: Summary) -> str:
    totals = summary["totals"]
    facts = {
        "topic": summary["topic"], "broker": summary.get("bootstrap"), "database": summary.get("database"),
        "table": summary.get("table"), "a row and its message": "; ".join(summary["match"]),
        "compared too": "; ".join(summary["compare"]), "order of a key": summary["order"],
        "rows, messages, pairs": f"{totals['rows']:,}, {totals['messages']:,}, {totals['matched']:,}",
        "read with the margins": f"{totals['rows_read']:,} rows, {totals['messages_read']:,} messages",
        "first and last": f"{iso(totals['first_ms']) or '-'} to {iso(totals['last_ms']) or '-'}",
        "audited": summary.get("started"), "seconds": summary.get("seconds"), "all findings": summary.get("dataset"),
    }  # fmt: skip
    lines = "".join(
        f"<tr><td>{name}</td><td class=long>{_text(value)}</td></tr>" for name, value in facts.items() if value
    )
    return f"<h2>What was audited</h2><table>{lines}</table>"


def _key(entries: Mapping[str, str]) -> str:
    shown = "".join(f'<span><i style="background:var(--{name})"></i>{text}</span>' for name, text in entries.items())
    return f'<p class="key">{shown}</p>'


def _bucket(summary: Summary) -> str:
    seconds = summary["bucket_s"]
    if seconds < 60:
        return "the second" if seconds == 1 else f"{seconds} seconds"
    return "the minute" if seconds == 60 else f"{seconds // 60} minutes"


def _since(line: Mapping[str, Any]) -> float:
    from datetime import datetime

    return datetime.fromisoformat(line.get("row_time") or line["message_time"]).timestamp() * 1000


def _position(line: Mapping[str, Any]) -> str:
    names: Iterable[str] = (name for name in ("identity", "txid", "partition", "offset") if name in line)
    return ", ".join(f"{name} {line[name]}" for name in names) + f": {line.get('detail', '')}"


# --- on disk ----------------------------------------------------------------------------------------------------------


def save(result: AuditResult, summary: Summary, directory: Path, dataset: str | None = None) -> Summary:
    """Write all three; what was there of an earlier audit is replaced.

    Args:
        directory: on this machine; made if it is missing.
        dataset: where Spark writes the findings (Parquet); default: in ``directory``. On a cluster a path that every
            executor reaches.

    Returns:
        The summary, with the dataset's place.
    """
    make_private_directory(directory)
    path = dataset or str((directory / DATASET).absolute())
    result.findings.write.mode("overwrite").parquet(path)
    summary = {**summary, "dataset": path}
    write_private(directory / OBJECT, json.dumps(summary, indent=1, ensure_ascii=True, default=str) + "\n", "w")
    write_private(directory / PAGE, page(summary), "w")
    return summary
