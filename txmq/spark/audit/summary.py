"""An audit's result as one JSON object: for programs, for the terminal, and what the page is drawn from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from txmq.spark.audit.audit import AuditResult
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
