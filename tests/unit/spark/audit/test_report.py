"""The page and the summary of an audit, from numbers alone."""

from __future__ import annotations

import itertools
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from txmq.spark.audit.drawing import TICK_PIXELS_MIN, Mark, Series, along_the_log, over_time, time_axis
from txmq.spark.audit.figures import BUCKETS_MAX, bucket_seconds
from txmq.spark.audit.report import iso, page, rounded, verdict
from txmq.spark.audit.spec import Kind

NOON_MS = 1_767_268_800_000


def summary(**changes: Any) -> dict[str, Any]:
    """An audit of two minutes, clean."""
    moments = [
        {"at_ms": NOON_MS + at, "messages": 5, "rows": 5, "latency_ms_p50": 1.5, "latency_ms_p99": 9.0}
        for at in (0, 120_000)
    ]
    whole: dict[str, Any] = {
        "clean": True, "topic": "orders", "table": "orders", "database": "sqlite:///x.db", "bootstrap": "txmq://h:1",
        "started": "2026-01-01T12:00:00Z", "seconds": 3.1, "match": ["id = key"], "compare": [], "order": None,
        "window": {"from": None, "to": iso(NOON_MS), "settle_s": 30.0},
        "counts": {kind.value: 0 for kind in Kind if kind is not Kind.TORN},
        "unjudged": {}, "blind": [],
        "unchecked": {"torn": "nothing says what belongs to a transaction"},
        "totals": {"messages": 10, "rows": 10, "matched": 10, "messages_read": 10, "rows_read": 10, "first_ms": NOON_MS,
                   "last_ms": NOON_MS, "latency_ms_p50": 1.5, "latency_ms_p99": 9.0, "latency_ms_max": 9.0},
        "bucket_s": 60, "moments": moments, "partitions": [{"partition": 0, "first": 0, "last": 9, "messages": 10}],
        "findings": {},
    }  # fmt: skip
    return whole | changes


def damaged() -> dict[str, Any]:
    line = {
        "identity": "<script>alert(1)</script>", "topic": "orders", "partition": 0, "offset": 4, "key": "k",
        "message_time": iso(NOON_MS + 1000), "detail": "no row has its identity",
    }  # fmt: skip
    counts = summary()["counts"] | {"phantom": 101}
    return summary(clean=False, counts=counts, findings={"phantom": [line] * 100})


class Tags(HTMLParser):
    """Checks that every tag that opens closes, in order."""

    VOID = frozenset({"meta", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize(
    "found", [summary(), damaged(), summary(moments=[], partitions=[])], ids=["clean", "damaged", "empty"]
)
def test_the_page_is_whole_and_refers_to_nothing(found: dict[str, Any]) -> None:
    text = page(found)
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert not re.search(r"(src|href)=|@import|url\(|<script", text)
    assert "prefers-color-scheme: dark" in text
    used = set(re.findall(r"var\((--[a-z0-9]+)\)", text))
    light, dark = text.split("prefers-color-scheme: dark")
    assert all(f"{name}:" in light and f"{name}:" in dark for name in used)


def test_page_says_what_was_found_and_what_was_not_checked() -> None:
    text = page(damaged())
    assert "101 findings in 10 rows and 10 messages: 101 phantom." in text
    assert "&lt;script&gt;alert(1)" in text
    assert "The first 100; all are in the dataset." in text
    assert "not checked: nothing says what belongs to a transaction" in text
    assert text.count('class="found"') == 200  # by time and by place
    clean = page(summary())
    assert "Clean: 10 rows and 10 messages agree in all that was checked." in clean
    assert 'class="found"' not in clean


def test_a_verdict_claims_no_more_than_was_checked() -> None:
    assert verdict(summary(unchecked={})) == "Clean: 10 rows and 10 messages agree."
    one = summary(clean=False, counts={"gap": 1})
    assert verdict(one) == "1 finding in 10 rows and 10 messages: 1 gap."


def test_a_bucket_without_anything_is_drawn_as_nothing() -> None:
    """Lines do not lead across minutes in which nothing happened."""
    times = [0, 60_000, 240_000]
    series = [Series("p50", "messages", [1.0, 2.0, 3.0])]
    drawn = over_time(time_axis(times, 60_000), times, 60_000, series, [], " ms")
    assert drawn.count('class="messages line"') == 2


def test_marks_stand_in_their_band_and_along_the_log() -> None:
    marks = [Mark(30_000, "gap", "here"), Mark(45_000, "torn", "there")]
    series = [Series("rows", "rows", [3], is_area=True)]
    drawn = over_time(time_axis([0], 60_000, marks), [0], 60_000, series, marks, "")
    assert drawn.count('class="found"') == 2
    assert ">gap<" in drawn
    assert along_the_log({0: (5, 5), 1: (0, 10)}, {1: [Mark(10, "gap", "x")]}).count('class="log"') == 2


@pytest.mark.parametrize(
    ("times", "step_ms"),
    [
        ([NOON_MS], 1000),
        ([NOON_MS, NOON_MS + 2000], 1000),
        ([NOON_MS + at * 1000 for at in range(61)], 1000),
        ([NOON_MS + at * 60_000 for at in range(600)], 60_000),
        ([NOON_MS, NOON_MS + 86_400_000, NOON_MS + 90 * 86_400_000], 60_000),
        ([NOON_MS + at * 86_400_000 for at in range(40)], 86_400_000),
    ],
)
def test_ticks_of_the_time_axis_differ_and_have_room(times: list[int], step_ms: int) -> None:
    ticks = time_axis(times, step_ms).ticks()
    texts = [text for _, text in ticks]
    assert len(set(texts)) == len(texts) >= 1
    assert all(right - left >= TICK_PIXELS_MIN for (left, _), (right, _) in itertools.pairwise(ticks))


def test_idle_minutes_take_no_room_and_are_named() -> None:
    busy = [NOON_MS + at * 1000 for at in range(60)]
    evening = [NOON_MS + 8 * 3_600_000 + at * 1000 for at in range(60)]
    axis = time_axis([*busy, *evening], 1000)
    widths = [stretch.right - stretch.left for stretch in axis.stretches]
    assert len(widths) == 2
    assert min(widths) > 400
    assert [text for _, text in axis.breaks()] == ["7 h"]
    assert axis.buckets() == [*busy, *evening]
    short = time_axis([NOON_MS, NOON_MS + 2000], 1000)
    assert short.buckets() == [NOON_MS, NOON_MS + 1000, NOON_MS + 2000], "a pause of a second is drawn as such"


def test_page_names_its_table_and_shows_first_what_was_found() -> None:
    text = page(damaged() | {"table": "shop.orders"})
    assert "<title>txmq audit: orders against shop.orders</title>" in text
    assert re.search(r"<tr><th>what</th><th>identity</th>", text)
    assert 'content="width=device-width, initial-scale=1"' in text
    assert text.count("<svg") == text.count('<div class="wide"><svg')


def test_verdict_says_what_was_not_judged_and_why() -> None:
    left = verdict(summary(unjudged={"earlier messages": 1200}))
    assert left == "Clean: 10 rows and 10 messages agree in all that was checked; not judged: 1,200 earlier messages."
    nothing = page(summary(clean=False, blind=["nothing was judged: the window has no rows and no messages"]))
    assert "Not clean, and no findings: nothing was judged: the window has no rows" in nothing


def test_buckets_are_minutes_unless_the_window_is_short_or_long() -> None:
    assert [bucket_seconds(span) for span in (0, 59, 61, 600, 601, 86_400)] == [1, 1, 2, 10, 60, 60]
    year = 365 * 86_400
    assert bucket_seconds(year) % 60 == 0
    assert year / bucket_seconds(year) <= BUCKETS_MAX


def test_latencies_are_rounded_for_people() -> None:
    assert [rounded(ms) for ms in (None, 0.0, -5.25, 123.4, 9_999.0, 65_000.0)] == [
        "-", "0.00 ms", "-5.25 ms", "123 ms", "9999 ms", "65.0 s",
    ]  # fmt: skip
