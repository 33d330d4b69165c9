"""What ``make bench`` says: verdicts, the page and its drawings, and that every drawing is of something that exists."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from contextlib import nullcontext
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from bench import report
from bench.catalogue import ROWS
from bench.model import Bound, NotInstalledError, Result, Row
from bench.page import CHARTS, page
from bench.peers.processes import require_client
from bench.svg import Mark, bars, latencies
from txmq.testing.bench.limits import BARE_LIMITS, ECHO, SYNCED_ECHO, busy
from txmq.testing.bench.model import LATENCY_UNITS

FACTS = {"cores": "2", "load before": "0.3"}
BARE = dict.fromkeys(BARE_LIMITS, 0.1)


def result(name: str, **figures: float) -> Result:
    """Of a row of the catalogue, measured twice alike."""
    [row] = [row for row in ROWS if row.name == name]
    made = Result(row)
    for _ in range(2):
        made.add({figure.replace("_", " "): value for figure, value in figures.items()})
    return made


@pytest.mark.parametrize(
    ("value", "verdict"), [(0.1, "pass"), (0.15, "pass"), (0.17, "within 20 %"), (0.181, "MISS"), (None, "MISS")]
)
def test_a_row_is_missed_beyond_a_fifth_of_its_bound(value: float | None, verdict: str) -> None:
    row = Row("x", "x", lambda _: nullcontext(dict), {"p50": "ms"}, (Bound("p50", 0.15, "ms", at_least=False),))
    made = Result(row)
    if value is not None:
        made.add({"p50": value})
    assert made.verdict == verdict


@pytest.mark.parametrize(
    ("value", "bare_ms", "verdict"),
    [(0.4, 0.1, "MISS"), (0.4, 0.175, "MISS"), (0.4, 0.19, "LIMIT"), (0.1, 0.19, "pass"), (0.17, 0.19, "within 20 %")],
)
def test_miss_of_the_bare_machine_is_called_its_limit(value: float, bare_ms: float, verdict: str) -> None:
    made = result("put-single-sync-on")
    made.samples.clear()
    made.add({"p50": value}, {SYNCED_ECHO: bare_ms, ECHO: 0.01})
    assert made.bare == {SYNCED_ECHO: bare_ms}
    assert made.verdict == verdict
    console = Console(file=StringIO(), width=200)
    report.show([made], FACTS, BARE, console)
    assert f"at best p50: {bare_ms} ms" in console.file.getvalue()  # type: ignore[attr-defined]
    assert f"(at best {bare_ms})" in page([made], FACTS, BARE)


def test_the_worst_bound_of_a_row_is_its_verdict() -> None:
    made = result("last-resource-mariadb")
    made.samples.clear()
    lone = {"share, 1 thr": 20.0, "outbox, 1 thr": 5000.0, "steps, 1 thr": 1500.0}
    made.add(lone | {"share, 8 thr": 100.0, "outbox, 8 thr": 5000.0, "steps, 8 thr": 5000.0}, {SYNCED_ECHO: 0.2})
    assert made.verdict == "LIMIT"  # the bare steps reach 30 % at best
    made.add({"share, 8 thr": 1.0, "outbox, 8 thr": 500.0, "steps, 8 thr": 450.0})  # they 90 %, so 1 % is ours
    made.add({"share, 8 thr": 1.0, "outbox, 8 thr": 500.0, "steps, 8 thr": 450.0})
    assert made.verdict == "MISS"


@pytest.mark.parametrize(
    ("names", "is_chosen", "is_long_chosen"),
    [((), True, False), (("b",), True, False), (("a-b",), True, True), (("c",), False, False)],
)
def test_long_rows_are_chosen_by_their_whole_name(
    names: tuple[str, ...], is_chosen: bool, is_long_chosen: bool
) -> None:
    short, long = (Row("a-b", "x", lambda _: nullcontext(dict), {}, is_long=is_long) for is_long in (False, True))
    assert (short.is_chosen(names), long.is_chosen(names)) == (is_chosen, is_long_chosen)


def test_what_is_not_installed_is_no_failure() -> None:
    made = result("peer-nats-alone")
    made.missing = "not installed: apt-get install nats-server"
    assert made.verdict == ""
    console = Console(file=StringIO(), width=200)
    report.show([made], FACTS, BARE, console)
    assert "apt-get install nats-server" in console.file.getvalue()  # type: ignore[attr-defined]


def test_names_are_unique_and_every_drawn_line_is_a_figure() -> None:
    units = {row.name: row.units for row in ROWS}
    assert len(units) == len(ROWS)
    for chart in CHARTS:
        for line in chart.lines:
            assert line.row in BARE_LIMITS or line.figure in units[line.row], line
    for row in ROWS:
        assert set(row.bare) <= set(BARE_LIMITS)
        assert {bound.figure for bound in row.bounds} <= set(row.units)


def test_page_shows_figures_bounds_and_gaps_and_loads_nothing() -> None:
    put = result("put-single-sync-on", **dict(zip(("p50", "p90", "p99", "p99.9"), (0.2, 0.3, 0.4, 0.9), strict=True)))
    absent, broken = result("peer-rabbitmq-alone"), result("send-many")
    absent.missing, broken.failure = "not installed: <nothing>", "OSError: <no> disk"
    text = page([put, absent, broken], FACTS | {"system": "2 & more"}, BARE)
    for words in ("0.2 / 0.4 ms", "≤ 0.15 ms", "not installed: &lt;nothing&gt;", "&lt;no&gt; disk", "2 &amp; more"):
        assert words in text
    assert "<nothing>" not in text
    for loaded in ("http:", "https:", "src=", "<script", "@import", "url("):
        assert loaded not in text
    drawings = [ET.fromstring(part.partition("</svg>")[0] + "</svg>") for part in _drawings(text)]
    assert len(drawings) == 2  # of one caller; and of bulk, where send-many stands with its failure
    assert len(drawings[0].findall("path[@class='bound']")) == 1


def _drawings(text: str) -> list[str]:
    return ["<svg" + part for part in text.split("<svg")[1:]]


def test_bars_begin_at_zero_and_latencies_are_logarithmic() -> None:
    half, whole = (Mark("a", "own", value, "") for value in (50.0, 100.0))
    widths = [float(bar.attrib["width"]) for bar in ET.fromstring(bars([half, whole])).findall("rect")]
    assert widths[1] == pytest.approx(2 * widths[0], abs=0.2)
    spreads = [dict.fromkeys(LATENCY_UNITS, value) for value in (0.1, 1.0, 10.0)]
    marks = [Mark("a", "own", spread["p50"], "", spread=spread) for spread in spreads]
    drawn = ET.fromstring(latencies(marks))
    places = [float(dot.attrib["cx"]) for dot in drawn.findall("circle")[::4]]
    assert places[2] - places[1] == pytest.approx(places[1] - places[0], abs=0.2)


def test_the_results_of_a_run_are_kept_as_json(tmp_path: Path) -> None:
    content = report.to_json([result("send-many", rate=7.0)], {}, BARE)
    assert content["rows"][0]["figures"]["rate"]["samples"] == [7.0, 7.0]
    assert report.save(content, tmp_path / "new", "stamp").read_text().startswith("{")


@pytest.mark.parametrize(("load", "is_said"), [("0.3", False), ("1.0", False), ("1.1", True)])
def test_figures_of_a_busy_machine_are_marked(load: str, is_said: bool) -> None:
    facts = FACTS | {"load before": load}
    assert (busy(facts) is not None) is is_said
    assert ("Others used this machine" in page([], facts, BARE)) is is_said


def test_client_that_is_not_installed_is_named_with_its_package() -> None:
    with pytest.raises(NotInstalledError, match="pip install some-package"):
        require_client("no_such_module_anywhere", "some-package")
