"""The report of a cluster's campaign: its table, its bounds, and the clues below a finding."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tools.checkers.events import Fault, History, Operation, Send
from tools.checkers.history import Verdict
from tools.checkers.index import Finding
from tools.crash.arguments import parser
from tools.crash.cluster.clues import Clues
from tools.crash.cluster.report import COLUMNS, Bounds, ClusterReport, Played

LATE = Finding("L12", "realtime-order", "w0.2.1-7T at orders/1@5 began after x1.1-3M at 9 ended")


def _report(*faults: Played) -> ClusterReport:
    report = ClusterReport(Bounds(paused_s=2.0, settled_s=5.0))
    for fault in faults:
        report.add(fault)
    return report


def _played(number: int, what: str, paused_s: float, **recovered_s: float) -> Played:
    return Played(number, what, f"{what} {number}", paused_s, 0.25, recovered_s)


def _cells(report: ClusterReport) -> dict[str, dict[str, str]]:
    table = [line for line in report.lines() if line][: len({fault.what for fault in report.faults}) + 2]
    head, *rows = [re.split(r" {2,}", line.strip()) for line in table]
    assert tuple(head) == COLUMNS
    return {row[0]: dict(zip(COLUMNS, row, strict=True)) for row in rows}


def test_row_has_the_longest_times_of_its_kind() -> None:
    report = _report(
        _played(1, "kill broker", 0.5, victims=0.75, settled=3.5),
        _played(2, "kill broker", 1.5, victims=0.5, settled=0.5),
        _played(3, "kill driver", 0.125, stream=20.0, settled=0.25),
    )
    cells = _cells(report)
    assert (
        cells["kill broker"] | {"times": "2", "paused": "1.50", "victims": "0.75", "settled": "3.50"}
        == (cells["kill broker"])
    )
    assert cells["kill driver"] | {"times": "1", "victims": "-", "stream": "20.00"} == cells["kill driver"]
    assert cells["all"] | {"times": "3", "paused": "1.50", "settled": "3.50", "stream": "20.00"} == cells["all"]
    lines = [*report.lines()]
    assert any("longest pause of a living home: 1.50 s" in line and "fault 2" in line for line in lines)
    assert any("in doubt: middle 0.50 s, longest 3.50 s" in line and "fault 1" in line for line in lines)
    assert report.complaints == []


def test_pause_over_the_bound_is_a_finding() -> None:
    report = _report(_played(1, "kill broker", 2.5, settled=0.5))
    assert report.complaints == ["fault-1: a partition of a living home paused 2.50 s"]


def test_findings_stand_with_what_to_look_at(tmp_path: Path) -> None:
    for process in ("w0.2", "x1.1"):
        (tmp_path / f"{process}.jsonl").touch()
    second = 1_000_000_000
    late = Operation(
        "w0.2.1-7T", "w0.2.1", "txn", 3 * second, [Send("orders", "k", "v")], [], "ok", 4 * second, txid="7"
    )
    early = Operation("x1.1-3M", "x1.1", "txn", second, [Send("orders", "k", "u")], [])
    faults = {"fault-1": Fault("fault-1", 0, 2 * second), "fault-2": Fault("fault-2", 2 * second, None)}
    history = History(operations={late.id: late, early.id: early}, faults=faults)
    report = _report(_played(1, "kill broker", 0.5, settled=0.5))
    report.messages = Verdict(
        "invalid", (LATE,), (), dict.fromkeys(("ok", "fail", "info", "messages", "rows", "row_reads"), 1)
    )
    report.group = Verdict("valid", (), (), {"handled": 1})
    report.clues = Clues(tmp_path, history, {("orders", 1): 2}, ["kill broker 0"]).of
    found = "\n".join(report.lines())
    assert "finding 1: L12 realtime-order" in found
    folder = tmp_path.name
    for clue in (
        f"w0.2.1-7T: txid 7, ok, from 2.000 to 3.000 s, faults meanwhile: 2; {folder}/w0.2.jsonl, w0.log",
        f"x1.1-3M: txid None, info, from 0.000 s on, not ended, faults meanwhile: 1, 2; {folder}/x1.1.jsonl, x1.log",
        "orders/1: at broker 2; brokers/broker-2.log, txmq journal dump --data brokers/broker-2",
    ):
        assert f"    {clue}\n" in found + "\n"
        assert clue in report.as_json()["findings"][0]["clues"]


def test_late_fault_is_told_by_its_text(tmp_path: Path) -> None:
    clues = Clues(tmp_path, History(), {}, ["kill broker 0"])
    assert clues.of("A9 resolution-time: fault-1: in doubt for 6.00 s") == ["fault 1: kill broker 0"]


def test_json_has_each_fault() -> None:
    report = _report(_played(1, "kill broker", 0.5, settled=0.5))
    told = json.loads(json.dumps(report.as_json()))
    assert told["faults"] == [
        {
            "number": 1, "what": "kill broker", "text": "kill broker 1", "paused_s": 0.5, "machine_paused_s": 0.25,
            "recovered_s": {"settled": 0.5},
        }
    ]  # fmt: skip
    assert told["bounds"] == {"paused_s": 2.0, "settled_s": 5.0}
    assert told["findings"] == []


def test_campaign_that_got_stuck_at_once_reports_nothing() -> None:
    assert [*_report().lines()] == []


def test_help_names_each_campaign_and_how_to_read_it() -> None:
    told = parser().format_help()
    for word in ("--xa", "--homes", "--groups", "--ordered", "--spark", "--cluster", "BROKEN", "STUCK", "report.json"):
        assert word in told


def test_two_campaigns_at_once_are_refused() -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--xa", "--cluster"])
