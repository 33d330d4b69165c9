"""Where a query's batches are decided, and how the other homes hear of it."""

from __future__ import annotations

from collections import deque

import pytest

from tests.unit.client.scripted import ScriptedStream
from tests.unit.spark.sink.sink_cluster import Job, SinkCluster, lone_broker, rows
from txmq.errors import (
    ConnectionLostError,
    FencedError,
    NotOwnerError,
    RequestTimeoutError,
    TransactionConflictError,
    UnavailableError,
    UnknownTopicError,
    UnknownTransactionError,
)
from txmq.runtime import crashpoints
from txmq.runtime.crashpoints import SimulatedCrash
from txmq.spark.sink import queries
from txmq.spark.sink.queries import Opened, Winner


def anchored(cluster: SinkCluster, home: int, topic: str | None = "t", query: str = "q") -> Opened:
    """A query, opened by another client than the one that made its anchor."""
    cluster.anchors[query] = home
    with cluster.client(1) as client:
        client.ping()
        return queries.open_query(client, topic, query, queries.new_epoch(client), 0)


def committed(cluster: SinkCluster) -> list[list[str]]:
    """What each home has committed, in its order."""
    return [[txid for txid, word in home.ended.items() if word == "committed"] for home in cluster.homes.values()]


# --- the anchor ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("home", [1, 2, 3])
def test_query_is_opened_at_its_anchor_whichever_home_is_asked(cluster: SinkCluster, home: int) -> None:
    assert anchored(cluster, home).home == home
    assert [text for number, text in cluster.asked if number == home][-1] == "query open"


def test_anchor_needs_no_rows_of_the_query(cluster: SinkCluster) -> None:
    cluster.topics["u"] = [2]
    assert anchored(cluster, 1, "u").home == 1


def test_new_query_gets_a_home_of_its_topic(cluster: SinkCluster) -> None:
    cluster.topics["u"] = [2, 3]
    with cluster.client(1) as client:
        client.ping()
        found = {
            queries.open_query(client, "u", f"q{number}", queries.new_epoch(client), 0).home for number in range(20)
        }
    assert found == {2, 3}


def test_queries_whose_rows_name_topics_are_spread_over_all_homes(cluster: SinkCluster) -> None:
    with cluster.client(1) as client:
        client.ping()
        found = {
            queries.open_query(client, None, f"q{number}", queries.new_epoch(client), 0).home for number in range(20)
        }
    assert found == {1, 2, 3}


def test_new_query_passes_over_a_home_that_is_away(cluster: SinkCluster) -> None:
    with cluster.client(1) as client:
        client.ping()
        client.routes.all_links()
        cluster.kill(3)
        begun = cluster.clock.now
        assert queries.open_query(client, "t", "q", queries.new_epoch(client), 0).home != 3
        assert cluster.clock.now - begun < 3.0


def test_registry_that_is_away_for_a_while_is_waited_for(cluster: SinkCluster) -> None:
    for home in cluster.homes.values():
        home.faults["query"] = deque([UnavailableError("the registry does not answer")] * 2)
    with cluster.client(1) as client:
        client.ping()
        assert queries.open_query(client, "t", "q", queries.new_epoch(client), 0).standing.newest is None
    assert len(set(cluster.anchors.values())) == 1


def test_registry_that_stays_away_ends_with_the_time(cluster: SinkCluster) -> None:
    for home in cluster.homes.values():
        home.faults["query"] = deque([UnavailableError("the registry does not answer")] * 10_000)
    with cluster.client(1) as client:
        client.ping()
        with pytest.raises(UnavailableError, match="the registry does not answer"):
            queries.new_epoch(client)


def test_anchor_that_is_away_is_waited_for_and_not_replaced(cluster: SinkCluster) -> None:
    cluster.anchors["q"] = 2
    with cluster.client(1) as client:
        client.ping()
        client.routes.all_links()
        cluster.kill(2)
        begun = cluster.clock.now
        with pytest.raises(ConnectionLostError):
            queries.open_query(client, "t", "q", queries.new_epoch(client), 0)
        assert cluster.clock.now - begun >= 5.0
    assert cluster.anchors == {"q": 2}


def test_homes_that_name_each_other_are_not_followed_for_ever(cluster: SinkCluster) -> None:
    for number, home in cluster.homes.items():
        told = NotOwnerError(f"leader=- home={number % 3 + 1:016x} is the anchor of query q")
        home.faults["query"] = deque([told] * 100)
    with cluster.client(1) as client:
        client.ping()
        with pytest.raises(NotOwnerError):
            queries.open_query(client, "t", "q", 1, 0)


def test_refusal_that_names_no_home_is_told(cluster: SinkCluster) -> None:
    for home in cluster.homes.values():
        home.faults["query"] = deque([NotOwnerError("not here")])
    with cluster.client(1) as client:
        client.ping()
        with pytest.raises(NotOwnerError, match="not here"):
            queries.open_query(client, "t", "q", 1, 0)


def test_anchor_of_which_no_broker_tells_is_waited_for(cluster: SinkCluster) -> None:
    cluster.anchors["q"] = 3
    with cluster.client(1) as client:
        client.ping()
        before = cluster.clock.now
        with pytest.raises(UnavailableError, match=r"no broker tells where home 0{15}5 is"):
            queries.anchor_of(client, 5)
        assert cluster.clock.now - before >= 4.9
        assert queries.anchor_of(client, 3).home == 3


def test_missing_topic_is_told_before_a_query_is_opened(cluster: SinkCluster) -> None:
    with cluster.client(1) as client:
        client.ping()
        with pytest.raises(UnknownTopicError):
            queries.open_query(client, "nosuch", "q", 1, 0)
    assert cluster.anchors == {}


def test_former_driver_is_told_by_the_anchor(cluster: SinkCluster) -> None:
    cluster.epochs["q"] = 7
    with pytest.raises(FencedError):
        anchored(cluster, 2)


def test_newest_batch_comes_from_the_anchor(cluster: SinkCluster) -> None:
    cluster.batches["q"] = 5
    opened = anchored(cluster, 2)
    assert opened.standing.newest == 5


# --- the decision ----------------------------------------------------------------------------------------------------


def test_homes_are_told_behind_the_decision_in_the_winners_order(cluster: SinkCluster, job: Job) -> None:
    written = [job.write(rows(0, 1, 2), task_number=number) for number in range(3)]
    cluster.requests()
    job.commit(*written)
    asked = cluster.requests()
    assert asked[0] == (3, "query commit")
    assert sorted(asked[1:]) == [(1, "commit")] * 3 + [(2, "commit")] * 3
    winners = [winner for one in written for winner in one.transactions]
    assert committed(cluster) == [
        [winner.branches[0] for winner in winners], [winner.branches[1] for winner in winners],
        [winner.txid for winner in winners],
    ]  # fmt: skip


def test_branches_of_losers_are_told_nothing(cluster: SinkCluster, job: Job) -> None:
    job.write(rows(0, 1, 2))
    winner = job.write(rows(0, 1, 2), attempt=1)
    job.commit(winner)
    assert [len(found) for found in committed(cluster)] == [1, 1, 1]
    assert [len(home.prepared) for home in cluster.homes.values()] == [1, 1, 0]


def test_decision_that_is_refused_tells_nobody(cluster: SinkCluster, job: Job) -> None:
    written = job.write(rows(0, 2))
    cluster.homes[3].faults["query"] = deque([TransactionConflictError("not prepared")])
    with pytest.raises(TransactionConflictError):
        job.commit(written)
    assert committed(cluster) == [[], [], []]


def test_decision_whose_answer_was_lost_is_found_and_told(cluster: SinkCluster, job: Job) -> None:
    written = job.write(rows(0, 1, 2))
    cluster.homes[3].lose_answer["query"] = 1
    cluster.requests()
    job.commit(written)
    assert [text for home, text in cluster.requests() if home == 3] == ["query commit", "query commit", "outcome"]
    assert [len(found) for found in committed(cluster)] == [1, 1, 1]


def test_batch_that_other_attempts_have_won_commits_nothing_of_these(cluster: SinkCluster, job: Job) -> None:
    mine, others = job.write(rows(0, 1, 2)), job.write(rows(0, 1, 2), attempt=1)
    job.commit(others)
    job.commit(mine)
    assert committed(cluster)[0] == [others.transactions[0].branches[0]]
    assert set(cluster.homes[1].prepared) == {mine.transactions[0].branches[0]}


def test_decision_that_is_forgotten_is_not_told_again(cluster: SinkCluster, job: Job) -> None:
    written = job.write(rows(0, 2))
    cluster.homes[3].lose_answer["query"] = 1
    cluster.homes[3].faults["outcome"] = deque([FencedError("so long ago")])
    job.commit(written)
    assert committed(cluster)[0] == []


def test_batch_of_the_anchor_alone_asks_nothing_more(cluster: SinkCluster, job: Job) -> None:
    written = job.write(rows(2))
    cluster.homes[3].lose_answer["query"] = 1
    cluster.requests()
    job.commit(written)
    assert cluster.requests() == [(3, "query commit")] * 2


def test_anchor_that_has_just_started_is_asked_again(cluster: SinkCluster, job: Job) -> None:
    written = job.write(rows(0, 2))
    cluster.homes[3].faults["query"] = deque([UnavailableError("waits for the registry")] * 3)
    job.commit(written)
    assert [len(found) for found in committed(cluster)] == [1, 0, 1]


def test_anchor_that_stays_away_is_told_to_the_driver(cluster: SinkCluster, job: Job) -> None:
    written = job.write(rows(0, 2))
    cluster.kill(3)
    with pytest.raises(ConnectionLostError):
        job.commit(written)
    assert committed(cluster) == [[], [], []]


def test_home_that_stays_away_behind_the_decision_fails_nothing(cluster: SinkCluster, job: Job) -> None:
    written = job.write(rows(0, 1, 2))
    cluster.kill(1)
    begun = cluster.clock.now
    job.commit(written)
    assert [len(found) for found in committed(cluster)] == [0, 1, 1]
    assert 5.0 <= cluster.clock.now - begun < 8.0


def test_home_that_comes_back_behind_the_decision_is_told(cluster: SinkCluster, job: Job) -> None:
    written = job.write(rows(0, 1, 2))
    cluster.homes[1].cut()
    cluster.homes[1].connections_refused = 5
    job.commit(written)
    assert [len(found) for found in committed(cluster)] == [1, 1, 1]


def test_home_that_does_not_answer_in_time_fails_nothing(cluster: SinkCluster, job: Job) -> None:
    written = job.write(rows(0, 1, 2))
    cluster.homes[1].hold.add("commit")
    job.commit(written)
    assert committed(cluster)[1:] == [[*written.transactions[0].branches[1:]], [written.transactions[0].txid]]


@pytest.mark.parametrize("error", [FencedError("410"), UnknownTransactionError("404"), TransactionConflictError("409")])
def test_branch_that_has_ended_already_is_not_told_again(
    cluster: SinkCluster, job: Job, error: FencedError | UnknownTransactionError | TransactionConflictError
) -> None:
    written = job.write(rows(0, 2))
    cluster.homes[1].faults["commit"] = deque([error])
    job.commit(written)
    assert cluster.homes[1].verbs.count("commit") == 1


def test_many_branches_are_told_in_order_some_at_once(
    cluster: SinkCluster, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "TOLD_AT_ONCE", 4)
    written = [job.write(rows(0, 2), task_number=number) for number in range(10)]
    seen: list[int] = []

    def noting(stream: ScriptedStream) -> None:
        seen.append(1)
        stream.is_over = True

    cluster.homes[1].faults["commit"] = deque([noting])
    job.commit(*written)
    assert committed(cluster)[0] == [one.transactions[0].branches[0] for one in written]
    assert seen == [1]


def test_driver_that_dies_behind_the_decision_leaves_it_decided(cluster: SinkCluster, job: Job) -> None:
    written = job.write(rows(0, 2))

    def die(name: str) -> None:
        if name == "client.sink.decided":
            raise SimulatedCrash(name)

    crashpoints.set_hook(die)
    try:
        with pytest.raises(SimulatedCrash):
            job.commit(written)
    finally:
        crashpoints.set_hook(None)
    assert [len(found) for found in committed(cluster)] == [0, 0, 1]


def test_lone_broker_is_asked_once_and_its_refusal_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    lone = lone_broker(monkeypatch)
    with lone.client(1) as client:
        client.ping()
        made = Job(client)
        lone.homes[1].faults["query"] = deque([UnavailableError("stops")])
        with pytest.raises(UnavailableError, match="stops"):
            queries.commit(client, made.opened.home, made.at, [Winner("0-0-1-1", ())])
        lone.homes[1].hold.add("query")
        with pytest.raises(RequestTimeoutError):
            queries.open_query(client, "t", "q", made.at.epoch, 0)
