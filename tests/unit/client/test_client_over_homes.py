"""What operators ask of a client of several homes: all of them answer, or the one that is away is named."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from tests.unit.client.scripted_cluster import ScriptedCluster, scripted_cluster
from txmq.client.client import Client
from txmq.client.home_link import LOOK_S
from txmq.errors import (
    FencedError,
    PartialResultError,
    TopicExistsError,
    TransactionConflictError,
    UnknownTransactionError,
)
from txmq.model import Outcome
from txmq.xid import TxId


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> ScriptedCluster:
    made = scripted_cluster(monkeypatch, 1, 2, 3)
    for number, home in made.homes.items():
        home.in_doubt = [{"txid": txid(number), "age_ms": number * 10}]
    return made


@pytest.fixture
def routed(cluster: ScriptedCluster) -> Iterator[Client]:
    with cluster.client(1) as opened:
        yield opened


def txid(home: int) -> str:
    return str(TxId(0xC1, home, 1, 1))


def test_transactions_of_all_homes_are_listed_oldest_first(routed: Client) -> None:
    assert [row["txid"] for row in routed.transactions.list()] == [txid(3), txid(2), txid(1)]
    assert [row["resource"] for row in routed.transactions.resources()] == ["db of 1", "db of 2", "db of 3"]


def test_list_without_a_home_that_is_away_says_so(cluster: ScriptedCluster, routed: Client) -> None:
    routed.ping()
    cluster.kill(2)
    with pytest.raises(PartialResultError, match=r"1 of 3 homes did not answer: b2 \(0{15}2\): cannot") as told:
        routed.transactions.list()
    assert {row["txid"] for row in told.value.found} == {txid(1), txid(3)}
    assert len(told.value.away) == 1


@pytest.mark.parametrize("ask", [lambda client: client.transactions.list(), lambda client: client.stats()])
def test_home_that_nobody_leads_is_not_waited_for_long(
    cluster: ScriptedCluster, routed: Client, ask: Callable[[Client], object]
) -> None:
    routed.ping()
    cluster.kill(2)
    begun = cluster.clock.now
    with pytest.raises(PartialResultError):
        ask(routed)
    assert cluster.clock.now - begun < 2 * LOOK_S


def test_transaction_is_asked_for_at_the_home_in_its_id(cluster: ScriptedCluster, routed: Client) -> None:
    routed.ping()
    assert routed.outcome(txid(2)) is Outcome.UNKNOWN
    assert [home.verbs.count("outcome") for home in cluster.homes.values()] == [0, 1, 0]
    assert routed.transactions.show(txid(3))["outcome"] == "unknown"
    assert [home.verbs.count("outcome") for home in cluster.homes.values()] == [0, 1, 1]


def waits_for_third(cluster: ScriptedCluster) -> list[dict[bytes, str]]:
    """The second home has decided a transaction with a part at the third."""
    homes = [{"txid": txid(1), "complete": True}, {"txid": txid(3), "complete": False}]
    cluster.homes[2].in_doubt[0] |= {"state": "decided", "homes": homes}
    return cluster.homes[2].completed


def test_lost_home_is_given_up_at_the_deciding_home(cluster: ScriptedCluster, routed: Client) -> None:
    completed = waits_for_third(cluster)
    routed.ping()
    cluster.kill(3)
    routed.transactions.give_up_home(txid(2), f"{3:016x}", "the disk burnt")
    assert completed == [{b"branch": txid(3), b"heuristic": "hazard", b"reason": "the%20disk%20burnt"}]


def test_home_that_a_broker_leads_is_not_given_up(cluster: ScriptedCluster, routed: Client) -> None:
    completed = waits_for_third(cluster)
    routed.ping()
    with pytest.raises(TransactionConflictError, match=r"home 0{15}3 is led at host:3"):
        routed.transactions.give_up_home(txid(2), f"{3:016x}", "by mistake")
    assert completed == []


HAZARD = {b"heuristic": "hazard", b"reason": "settled%20by%20hand"}


@pytest.mark.parametrize(
    ("outcome", "sent"), [(b"committed\n", {}), (b"rolled-back\n", HAZARD), (None, HAZARD)]
)  # fmt: skip
def test_home_that_has_ended_its_part_is_given_up(
    cluster: ScriptedCluster, routed: Client, outcome: bytes | None, sent: dict[bytes, str]
) -> None:
    completed = waits_for_third(cluster)
    cluster.homes[3].in_doubt, cluster.homes[3].outcome_told = [], outcome
    routed.ping()
    assert routed.transactions.give_up_home(txid(2), f"{3:016x}", "settled by hand") is bool(sent)
    assert completed == [{b"branch": txid(3), **sent}]


def waits_to_report(cluster: ScriptedCluster) -> list[dict[bytes, str]]:
    """The second home has placed a part of a transaction that the third has decided."""
    cluster.homes[2].in_doubt[0] |= {"state": "placed", "of": txid(3)}
    return cluster.homes[2].completed


def test_lost_deciding_home_is_given_up(cluster: ScriptedCluster, routed: Client) -> None:
    completed = waits_to_report(cluster)
    routed.ping()
    with pytest.raises(TransactionConflictError, match=r"home 0{15}3 is led at host:3"):
        routed.transactions.give_up_home(txid(2), f"{3:016x}", "by mistake")
    cluster.kill(3)
    assert routed.transactions.give_up_home(txid(2), f"{3:016x}", "burnt")
    assert completed == [{b"of": txid(3), b"heuristic": "hazard", b"reason": "burnt"}]


def test_part_is_shown_when_its_outcome_is_kept_no_longer(cluster: ScriptedCluster, routed: Client) -> None:
    waits_to_report(cluster)
    cluster.homes[2].outcome_told = None
    routed.ping()
    shown = routed.transactions.show(txid(2))
    assert (shown["outcome"], shown["state"], shown["of"]) == ("committed", "placed", txid(3))
    cluster.homes[2].in_doubt = []
    with pytest.raises(FencedError):
        routed.transactions.show(txid(2))


def test_home_whose_operator_gave_this_one_up_is_told(cluster: ScriptedCluster, routed: Client) -> None:
    completed = waits_for_third(cluster)
    there = cluster.homes[3]
    there.in_doubt[0] |= {"state": "heuristic", "outcome": "committed", "heuristics": []}
    there.outcome_told = None
    routed.ping()
    assert not routed.transactions.give_up_home(txid(2), f"{3:016x}", "it was back")
    assert completed == [{b"branch": txid(3)}]


def test_home_that_may_still_decide_is_not_given_up(cluster: ScriptedCluster, routed: Client) -> None:
    completed = waits_to_report(cluster)
    cluster.homes[2].in_doubt[0]["state"] = "prepared"
    routed.ping()
    cluster.kill(3)
    with pytest.raises(TransactionConflictError, match="is prepared: commit it or roll it back first"):
        routed.transactions.give_up_home(txid(2), f"{3:016x}", "burnt")
    assert completed == []


def test_home_that_is_not_waited_for_is_not_given_up(cluster: ScriptedCluster, routed: Client) -> None:
    completed = waits_for_third(cluster)
    routed.ping()
    with pytest.raises(UnknownTransactionError, match=r"waits for no home '0{15}1'; waited for: 0{15}3"):
        routed.transactions.give_up_home(txid(2), f"{1:016x}", "by mistake")
    assert completed == []


def test_watermarks_are_those_of_the_owners(routed: Client) -> None:
    assert [(row["partition"], row["end"], int(row["home"], 16)) for row in routed.topics.watermarks("t")] == [
        (0, 0, 1), (1, 0, 2), (2, 0, 3),
    ]  # fmt: skip


def test_watermarks_that_are_missing_are_told(cluster: ScriptedCluster, routed: Client) -> None:
    cluster.homes[2].taken_over = 0
    with pytest.raises(PartialResultError, match="1 new partitions of topic t are not there yet") as told:
        routed.topics.watermarks("t")
    assert [row["partition"] for row in told.value.found] == [0, 2]


def test_topic_is_changed_once_at_any_broker(cluster: ScriptedCluster, routed: Client) -> None:
    routed.routes.all_links()
    cluster.kill(1)
    cluster.clock.now += 1  # the connection is looked at before it is used
    routed.topics.create("u")
    routed.topics.delete("u")
    assert [home.changes for home in cluster.homes.values()] == [[], ["create u", "delete u"], []]


def test_topic_whose_creation_may_be_done_is_not_created_again(cluster: ScriptedCluster, routed: Client) -> None:
    routed.ping()
    cluster.homes[1].lose_answer["topic"] = 1
    with pytest.raises(Exception, match="connection") as told:
        routed.topics.create("u")
    assert not isinstance(told.value, TopicExistsError)
    assert [home.changes for home in cluster.homes.values()] == [["create u"], [], []]


def test_statistics_are_told_by_home(routed: Client) -> None:
    homes = [f"{number:016x}" for number in (1, 2, 3)]
    assert routed.stats() == "".join(f"home {home}\nputs {int(home)}\n" for home in homes)
    assert json.loads(routed.stats("json")) == {home: {"puts": int(home)} for home in homes}


def test_statistics_of_the_other_homes_come_with_the_error(cluster: ScriptedCluster, routed: Client) -> None:
    routed.ping()
    cluster.kill(3)
    with pytest.raises(PartialResultError) as told:
        routed.stats()
    assert told.value.found == ["home 0000000000000001\nputs 1\nhome 0000000000000002\nputs 2\n"]
