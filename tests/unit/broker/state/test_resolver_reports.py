"""What resolvers see in databases: the worst of what is fresh counts, what is stale until somebody has looked since."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tools.images.node import Answer, Client, Node
from txmq.broker.state import resolver_reports as module
from txmq.broker.verbs.stats import transaction_figures

from ..support import node

UUID, OTHER = "ab" * 16, "cd" * 16
TXID = "00000000000000c1-00000000000000a1-7-1"


def report(client: Client, name: str = "stock", *, branches: int = 0, age_ms: int = 0, **changed: Any) -> Answer:
    oldest = [[TXID, "b.1.2", age_ms, "nobody has decided yet"]] if branches else []
    body = {"kind": "xa", "uuid": UUID, "reachable": True, "why": None, "branches": branches, "age_ms": age_ms}
    text = json.dumps(body | {"oldest": oldest} | changed)
    return client.ask("resource", "report", name, body=text.encode())


def rows(made: Node, name: str = "*") -> list[dict[str, Any]]:
    answer = made.session().ask("resource", "list", name, body=b"")
    assert answer.code == 200, answer
    found: list[dict[str, Any]] = json.loads(answer.body)["resources"]
    return found


def later(made: Node, seconds: float) -> None:
    made.clock.advance(seconds)
    made.core.tick(made.clock.now_ms())


def figure(made: Node, name: str) -> object:
    return transaction_figures(made.context)[name]


def test_branches_seen_by_a_resolver_count_though_nothing_is_prepared() -> None:
    made = node()
    assert report(made.session(), branches=2, age_ms=45_000).code == 200
    later(made, 1.0)
    [row] = rows(made)
    assert (row["resource"], row["branches"], row["age_ms"], row["reachable"]) == ("stock", 2, 46_000, True)
    assert row["oldest"] == [{"txid": TXID, "bqual": "b.1.2", "age_ms": 45_000, "why": "nobody has decided yet"}]
    assert (figure(made, "in_doubt"), figure(made, "branches_prepared")) == (0, 2)
    assert figure(made, "in_doubt_age_ms_max") == figure(made, "branches_age_ms_max") == 46_000
    text = made.session().ask("stats", "resources").body.decode()
    assert text.startswith("stock kind xa reachable true branches 2 age_ms 46000")
    assert json.loads(made.session().ask("stats", "json").body)["resources"][0]["branches"] == 2


def test_a_report_takes_the_place_of_the_one_before() -> None:
    made = node()
    resolver = made.session()
    report(resolver, branches=2, age_ms=45_000)
    report(resolver)
    [row] = rows(made)
    assert (row["branches"], row["age_ms"], len(row["reports"])) == (0, 0, 1)
    assert figure(made, "in_doubt_age_ms_max") == 0


def test_of_contradicting_resolvers_the_worse_counts_while_it_is_fresh() -> None:
    made = node()
    one, other = made.session(), made.session()
    report(one, branches=1, age_ms=5000)
    report(other)
    assert [row["branches"] for row in rows(made)] == [1]
    later(made, module.FRESH_MS / 1000 + 1)
    report(other)
    assert [row["branches"] for row in rows(made)] == [0], "one is stale, and the other has looked since"


def test_report_of_dead_resolver_is_kept_until_next_look() -> None:
    made = node()
    dead = made.session()
    report(dead, branches=1, age_ms=5000)
    dead.disconnect()
    later(made, 3600.0)
    assert [(row["branches"], row["age_ms"]) for row in rows(made)] == [(1, 3_605_000)]
    report(made.session(), reachable=False, why="refused")
    assert [row["branches"] for row in rows(made)] == [1], "who does not reach it has not looked"
    report(made.session())
    assert [(row["branches"], row["reachable"]) for row in rows(made)] == [(0, True)]
    later(made, module.LOUD_KEPT_MS / 1000 + 1)
    assert rows(made) == []


def test_report_of_a_gone_client_holds_only_until_a_look() -> None:
    made = node()
    one, other = made.session(), made.session()
    report(one, branches=1, age_ms=5000)
    made.clock.advance(1.0)
    made.core.tick(made.clock.now_ms())
    report(other)
    assert [row["branches"] for row in rows(made)] == [1]
    one.disconnect()
    assert [row["branches"] for row in rows(made)] == [0]


def test_a_database_that_one_resolver_reaches_is_reached() -> None:
    made = node()
    cut_off, well = made.session(), made.session()
    report(cut_off, uuid=None, reachable=False, why="OperationalError: refused")
    assert [(row["reachable"], row["why"]) for row in rows(made)] == [(False, "OperationalError: refused")]
    assert figure(made, "resources_unreachable") == 1
    report(well)
    [row] = rows(made)
    assert (row["reachable"], row["uuid"], len(row["reports"])) == (True, UUID, 2)
    report(well, name="other", uuid=OTHER)
    assert {row["resource"] for row in rows(made)} == {"stock", "other"}
    assert [row["resource"] for row in rows(made, "other")] == ["other"]


def test_two_databases_under_one_name_are_told_apart() -> None:
    made = node()
    report(made.session(), branches=1, age_ms=5000)
    report(made.session(), uuid=OTHER)
    assert [(row["uuid"], row["branches"]) for row in rows(made)] == [(UUID, 1), (OTHER, 0)]


def test_hanging_or_unreachable_database_raises_one_alarm_while_it_lasts() -> None:
    made = node()
    resolver = made.session()
    report(resolver, branches=1, age_ms=module.ALARM_AGE_MS - 1)
    assert made.context.alarms == []
    for _ in range(2):
        report(resolver, branches=1, age_ms=module.ALARM_AGE_MS)
    [alarm] = made.context.alarms
    assert (alarm["resource"], alarm["branches"], alarm["txid"]) == ("stock", 1, TXID)
    report(resolver)
    report(resolver, branches=1, age_ms=module.ALARM_AGE_MS)
    assert len(made.context.alarms) == 2
    made.context.alarms.clear()
    report(resolver)
    for _ in range(3):
        report(resolver, reachable=False, why="refused")
        later(made, module.ALARM_AGE_MS / 1000 / 2)
    report(resolver, reachable=False, why="refused")
    [alarm] = made.context.alarms
    assert alarm["reason"] == "refused"


def test_flood_of_reports_is_bounded_and_drops_the_empty_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENTRIES_MAX", 5)
    made = node()
    resolver = made.session()
    report(resolver, "loud", branches=1, age_ms=1)
    for number in range(20):
        report(resolver, f"quiet-{number}")
    found = [row["resource"] for row in rows(made)]
    assert len(found) == 5
    assert {"loud", "quiet-19"} <= set(found)


def test_reports_are_gone_with_the_brokers_life_and_move_nothing() -> None:
    made = node()
    before = made.context.counters.group_commits
    report(made.session(), branches=1, age_ms=1)
    assert made.context.counters.group_commits == before + 1, "of the session, none of the report"


@pytest.mark.parametrize(
    "changed",
    [
        {"kind": "half"}, {"reachable": 1}, {"uuid": "ab"}, {"uuid": 7}, {"branches": -1}, {"branches": True},
        {"age_ms": 1 << 60}, {"why": "x" * 501}, {"why": "\ud800"}, {"oldest": [[TXID, "b", 1, "w"]] * 21},
        {"oldest": [["nonsense", "b", 1, "w"]]}, {"oldest": [[TXID, "b" * 65, 1, "w"]]}, {"oldest": [[TXID, "b", 1]]},
        {"oldest": {}},
    ],
)  # fmt: skip
def test_report_that_is_none_is_refused_and_keeps_connection(changed: dict[str, Any]) -> None:
    made = node()
    resolver = made.session()
    assert report(resolver, **changed).error == "bad-request"
    assert report(resolver).code == 200
    assert len(rows(made)) == 1


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"[" * 10_000])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    assert node().session().ask("resource", "report", "stock", body=body).error == "bad-request"


def test_report_of_a_session_that_was_ended_is_outvoted() -> None:
    """Its connection reported in its name, and was taken for one that is there for half a minute."""
    made = node()
    client = made.session()
    report(client, branches=1, age_ms=900)
    assert client.ask("end", 0).code == 200
    client.disconnect()
    later(made, 0.5)
    report(made.session())
    assert [row["branches"] for row in rows(made)] == [0]


def test_limits_of_name_size_and_action() -> None:
    client = node().session()
    assert report(client, "no/name").error == "invalid-name"
    assert client.ask("resource", "report", "stock", body=b" " * (16 * 1024 + 1)).error == "too-large"
    assert client.ask("resource", "forget", "stock", body=b"").error == "bad-request"
