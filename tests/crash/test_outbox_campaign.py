"""The short campaign of outboxes, on SQLite; ``make crash`` has the three databases. And: does it notice a defect?"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import cast

import pytest

import txmq
from tools.checkers.events import History, Operation, Poll, Row, Send
from tools.crash.directory import HistoryFile
from tools.crash.doors import OPEN, GuardedDoors
from tools.crash.faults import Fault
from tools.crash.outbox.campaign import OutboxCampaign
from tools.crash.outbox.directory import OutboxCampaignDirectory
from tools.crash.outbox.excuses import BrokerRestored, DatabaseRestored, excuse
from tools.crash.outbox.plan import ALL_POINTS, ROUND, faults
from tools.crash.outbox.processes import Processes
from tools.crash.outbox.reader import OutboxReader
from tools.simulated.stand_in import StandIn

SEED = 1
DATABASE, SERVICE, RELAY = "database sqlite", "service sqlite", "relay 1"
DIES = Fault("crash", (RELAY,), 0.0, "relay.page.taken:3")
FAULTS = (
    DIES,
    Fault("kill", ("broker", SERVICE), 0.0),
    Fault("copy", (DATABASE,), 0.0),
    Fault("overtake", (DATABASE,), 0.0),
    Fault("restore", (DATABASE,), 0.0, "operator.dropped:1"),
    Fault("restore", ("broker",), 0.0, "operator.adopted:1"),
)


@pytest.mark.timeout(600)
def test_outbox_survives_kills_copies_and_restores(tmp_path: Path) -> None:
    lines: list[str] = []
    doors = GuardedDoors(tmp_path / "tls")
    report = OutboxCampaign(tmp_path, SEED, lines.append, databases=["sqlite"], doors=doors).play(FAULTS)
    assert report.complaints == [], "\n".join(lines)
    assert report.stops == {"sqlite": 3, "copy of sqlite": 1}
    assert report.points_hit.keys() == {"relay.page.taken", "operator.dropped", "operator.adopted"}
    assert min(report.lost["rows"], report.lost["messages"], report.dropped) > 0
    assert report.verdict.counts["ok"] > 50


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("rule", "noticed"),
    [("lowest_id_first", "A6 order"), ("claim_overwritten", "outbox sqlite has stopped without a cause")],
)
def test_campaign_notices_a_relay_without_a_rule(tmp_path: Path, rule: str, noticed: str) -> None:
    report = OutboxCampaign(tmp_path, SEED, lambda _: None, databases=["sqlite"], rule=rule).play([DIES])
    assert any(complaint.startswith(noticed) for complaint in report.complaints), report.complaints


def test_relay_that_has_stopped_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a rule the line may stop before the relay gets to the point where it was to die."""
    killed: list[object] = []
    stops = itertools.chain([0, 0], itertools.repeat(1))
    relay = StandIn(name="relay-1", is_running=True, start=lambda _point: None)
    processes = Processes(OutboxCampaignDirectory(Path("/nowhere")), {"sqlite": StandIn()}, random.Random(SEED), OPEN)
    processes.relays = {}
    monkeypatch.setattr(processes, "child", lambda _name: relay)
    monkeypatch.setattr(processes, "stops", lambda _outbox: next(stops))
    monkeypatch.setattr(processes, "_kill", lambda victims, _fault: killed.extend(victims))
    processes._crash([relay], DIES)
    assert (killed, processes.points_hit) == ([relay], {})


def test_a_round_has_every_point_and_every_victim() -> None:
    played = list(itertools.islice(faults(random.Random(SEED), ["mariadb", "postgresql"], ["sqlite"]), ROUND))
    assert {fault.point.partition(":")[0] for fault in played} == {*ALL_POINTS, ""}
    assert {fault.kind for fault in played} == {"kill", "pause", "crash", "restore", "copy", "overtake"}
    for kind in ("restore", "copy", "overtake"):
        victims = {victim for fault in played if fault.kind == kind for victim in fault.victims}
        assert victims - {"broker"} == {"database mariadb", "database postgresql", DATABASE}


def _history() -> History:
    sends = [Send("orders-sqlite", "k0", f"s-1B2.{number}") for number in range(2)]
    rows = [Row("sqlite", "s-1B2/0")]
    operation = Operation("s-1B2", "s", "txn", 10, sends, rows, status="ok", completed_ns=20)
    polls = [Poll("r", ("orders-sqlite", 0), 30, [(0, "s-1B2.0"), (1, "s-1B2.1")])]
    return History(operations={"s-1B2": operation}, polls=polls)


def test_restored_database_excuses_only_what_it_lost() -> None:
    for lost, left in ((frozenset({"s-1B2/0"}), {"s-1B2/0", "s-1B2/1"}), (frozenset({"s-1B3/0"}), {"s-1B2"})):
        history = _history()
        excuse(history, [DatabaseRestored(50, "sqlite", lost), DatabaseRestored(5, "sqlite", frozenset())])
        assert history.operations.keys() == left


def test_restored_broker_excuses_only_what_it_lost() -> None:
    for copied_ns, seen in ((20, [(0, "s-1B2.0")]), (40, [(0, "s-1B2.0"), (1, "s-1B2.1")])):
        history = _history()
        excuse(history, [BrokerRestored(copied_ns, 50, frozenset({"s-1B2.1"}), {("orders-sqlite", 0): 1})])
        assert [send.value for send in history.operations["s-1B2"].sends] == ["s-1B2.0"]
        assert history.polls[0].messages == seen


def test_reader_tells_no_unit_that_it_began_within(tmp_path: Path) -> None:
    world = OutboxCampaignDirectory(tmp_path)
    world.write_places({})
    reader = OutboxReader(world, cast("txmq.Client", None), HistoryFile(tmp_path, "r"))
    begun_within, torn, whole = (f"service-sqlite.1.t0-{number}M2" for number in range(3))
    reader.look([])
    reader.look_for_rows([f"{begun_within}.0"])
    reader.look([])
    reader.look_for_rows([f"{begun_within}.1", f"{torn}.1", f"{whole}.0", f"{whole}.1"])
    reader.look([])
    told = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text("utf-8").splitlines()]
    assert [(line["id"], line["v"]) for line in told] == [(torn, [[f"{torn}.1"], 2])]
