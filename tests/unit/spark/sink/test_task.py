"""A task's rows over several homes: branches first, then the transaction that decides; again if a home fenced it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.client.scripted import TOPIC_ID
from tests.unit.spark.sink.sink_cluster import Job, SinkCluster, lone_broker, rows, sink_cluster
from txmq.errors import (
    BrokerError,
    ConfigError,
    DiskFullError,
    FencedError,
    OverloadedError,
    TooLargeError,
    TransactionConflictError,
    UnavailableError,
)
from txmq.log.batch import checksum
from txmq.spark.sink import task
from txmq.xid import TxId


def home_of(txid: str) -> int:
    return TxId.parse(txid).home


# --- all is well -----------------------------------------------------------------------------------------------------


def test_branches_are_prepared_first_and_then_listed(cluster: SinkCluster, job: Job) -> None:
    (winner,) = job.write(rows(0, 1, 2, 0)).transactions
    assert cluster.requests() == [(1, "prepare branch"), (2, "prepare branch"), (3, "prepare spark")]
    assert (home_of(winner.txid), [home_of(txid) for txid in winner.branches]) == (3, [1, 2])
    decides = cluster.homes[3].prepared[winner.txid]
    assert decides.stated["homes"].split(",") == [*winner.branches]
    for number, txid in zip((1, 2), winner.branches, strict=True):
        branch = cluster.homes[number].prepared[txid]
        assert branch.stated["of"] == winner.txid
        assert "deadline" in branch.stated


def test_rows_stand_at_their_homes_under_the_id_that_decides(cluster: SinkCluster, job: Job) -> None:
    (winner,) = job.write(rows(0, 1, 2, 0)).transactions
    values = {number: [part.values for one in home.prepared.values() for part in one.parts]
              for number, home in cluster.homes.items()}  # fmt: skip
    assert values == {1: [(b"0", b"0")], 2: [(b"1",)], 3: [(b"2",)]}
    parts = [part for home in cluster.homes.values() for one in home.prepared.values() for part in one.parts]
    assert {(part.txids, part.topic_id) for part in parts} == {(frozenset({winner.txid}), TOPIC_ID)}


def test_branches_of_a_query_have_one_key(cluster: SinkCluster, job: Job) -> None:
    for number in range(2):
        job.write(rows(0, 1, 2), task_number=number)
    keys = {number: {part.keys for one in home.prepared.values() for part in one.parts}
            for number, home in cluster.homes.items()}  # fmt: skip
    of_query = frozenset({checksum(b"q")})
    assert keys == {1: {of_query}, 2: {of_query}, 3: {frozenset()}}


def test_rows_of_the_deciding_home_alone_are_one_request(cluster: SinkCluster, job: Job) -> None:
    (winner,) = job.write(rows(2)).transactions
    assert (cluster.requests(), winner.branches) == ([(3, "prepare spark")], ())
    assert "homes" not in cluster.homes[3].prepared[winner.txid].stated


def test_rows_of_other_homes_alone_are_decided_all_the_same(cluster: SinkCluster, job: Job) -> None:
    (winner,) = job.write(rows(0)).transactions
    assert cluster.requests() == [(1, "prepare branch"), (3, "prepare spark")]
    assert cluster.homes[3].prepared[winner.txid].parts == ()


def test_topic_of_one_home_costs_one_home(cluster: SinkCluster) -> None:
    cluster.topics["u"] = [2, 2]
    with cluster.client(2) as client:
        client.ping()
        made = Job(client, "u")
        assert made.opened.home == 2
        made.commit(made.write(rows(0, 1)))
    assert {home for home, _ in cluster.asked} == {2}


def test_rows_that_name_topics_go_to_the_homes_of_each(cluster: SinkCluster) -> None:
    cluster.topics |= {"u": [1, 2], "v": [2]}
    with cluster.client(1) as client:
        client.ping()
        made = Job(client, None)
        made.write(rows(0, 1, 0, topics=["u", "u", "v"]))
    found = {(number, part.topic, part.partition) for number, home in cluster.homes.items()
             for one in home.prepared.values() for part in one.parts}  # fmt: skip
    assert found == {(1, "u", 0), (2, "u", 1), (2, "v", 0)}


def test_lone_broker_gets_the_requests_of_one_home(monkeypatch: pytest.MonkeyPatch) -> None:
    lone = lone_broker(monkeypatch)
    with lone.client(1) as client:
        client.ping()
        made = Job(client)
        made.commit(made.write(rows(0, 0)))
    assert lone.homes[1].verbs == ["hello", "ping", "query", "query", "hello", "meta", "prepare", "query", "end"]
    assert lone.requests() == [(1, "query epoch"), (1, "query open"), (1, "prepare spark"), (1, "query commit")]


def test_lone_broker_sees_neither_homes_nor_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    lone = lone_broker(monkeypatch)
    with lone.client(1) as client:
        client.ping()
        (winner,) = task.write(client, Job(client).options, Job(client).at, iter([rows(0)])).transactions
    (prepared,) = lone.homes[1].prepared.values()
    (part,) = prepared.parts
    assert set(prepared.stated) == {"query", "epoch", "batch", "task", "attempt"}
    assert (part.keys, part.topic_id, winner.branches) == (frozenset(), 0, ())


# --- a home fenced it ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [TransactionConflictError("rolled back"), FencedError("gone")])
@pytest.mark.parametrize("refusing", [2, 3])
def test_chunk_that_was_fenced_is_prepared_under_other_ids(
    cluster: SinkCluster, job: Job, error: BrokerError, refusing: int
) -> None:
    cluster.homes[refusing].faults["prepare"] = deque([error])
    written = job.write(rows(0, 1, 2))
    (winner,) = written.transactions
    ids = {txid for home in cluster.homes.values() for txid in home.prepared}
    assert ids == {winner.txid, *winner.branches}
    rolled_back = {txid for home in cluster.homes.values() for txid in home.ended}
    assert {home_of(txid) for txid in rolled_back} == {1, 2, 3}
    assert not rolled_back & ids
    assert [text for home, text in cluster.requests() if home == 3 and text != "prepare spark"] == [
        "query open", "rollback",
    ]  # fmt: skip
    assert written.digest.rows == 3


def test_chunk_without_branches_is_not_prepared_anew(cluster: SinkCluster, job: Job) -> None:
    cluster.homes[3].faults["prepare"] = deque([TransactionConflictError("decided")])
    with pytest.raises(TransactionConflictError, match="decided"):
        job.write(rows(2))
    assert cluster.requests() == [(3, "rollback")]


def test_former_driver_gives_up_where_it_was_fenced(cluster: SinkCluster, job: Job) -> None:
    cluster.epochs["q"] = job.at.epoch + 1
    cluster.homes[3].faults["prepare"] = deque([TransactionConflictError("rolled back")])
    with pytest.raises(FencedError, match="a later driver writes"):
        job.write(rows(0, 2))
    assert [home.prepared for home in cluster.homes.values()] == [{}, {}, {}]


def test_batch_that_was_committed_meanwhile_is_not_prepared_anew(cluster: SinkCluster, job: Job) -> None:
    cluster.batches["q"] = 0
    cluster.homes[3].faults["prepare"] = deque([TransactionConflictError("committed already")])
    with pytest.raises(TransactionConflictError, match="committed already"):
        job.write(rows(0, 2))
    assert cluster.requests().count((1, "prepare branch")) == 1


def test_chunk_that_is_fenced_each_time_ends_with_its_time(cluster: SinkCluster, job: Job) -> None:
    begun = cluster.clock.now
    cluster.homes[3].faults["prepare"] = deque([TransactionConflictError("rolled back")] * 1000)
    with pytest.raises(TransactionConflictError):
        job.write(rows(0, 2))
    assert 4.5 <= cluster.clock.now - begun < 5.5
    assert cluster.homes[1].prepared == {}


# --- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("home", [1, 3])
def test_lost_answer_is_asked_for_again_under_the_same_id(cluster: SinkCluster, job: Job, home: int) -> None:
    cluster.homes[home].lose_answer["prepare"] = 1
    job.write(rows(0, 1, 2))
    assert [len(one.prepared) for one in cluster.homes.values()] == [1, 1, 1]
    assert cluster.requests().count((home, "prepare spark" if home == 3 else "prepare branch")) == 2


def test_home_without_room_is_asked_again(cluster: SinkCluster, job: Job) -> None:
    cluster.homes[1].faults["prepare"] = deque([OverloadedError("prepared_bytes_max")] * 3)
    job.write(rows(0, 2))
    assert [len(one.prepared) for one in cluster.homes.values()] == [1, 0, 1]


def test_home_that_stays_full_is_named_with_what_to_do(cluster: SinkCluster, job: Job) -> None:
    cluster.homes[1].faults["prepare"] = deque([OverloadedError("prepared_bytes_max")] * 1000)
    with pytest.raises(UnavailableError, match=r"home 0{15}1 .* within 5 s: prepared_bytes_max: .* raise that setting"):
        job.write(rows(0, 2))
    assert [one.prepared for one in cluster.homes.values()] == [{}, {}, {}]


@pytest.mark.parametrize("is_known", [True, False])
def test_home_that_stays_away_is_named(cluster: SinkCluster, job: Job, is_known: bool) -> None:
    if is_known:
        job.write(rows(0, 2), task_number=1)
    cluster.kill(1)
    begun = cluster.clock.now
    with pytest.raises(UnavailableError, match=r"home 0{15}1 .*did not take a part of task 0 within 5 s"):
        job.write(rows(0, 2))
    assert cluster.clock.now - begun >= 5.0
    assert {text for home, text in cluster.requests() if home == 3} <= {"prepare spark", "rollback"}
    assert len(cluster.homes[3].prepared) == (1 if is_known else 0)


@pytest.mark.parametrize("home", [1, 3])
def test_home_that_is_frozen_is_named(cluster: SinkCluster, job: Job, home: int) -> None:
    cluster.homes[home].hold.add("prepare")
    with pytest.raises(UnavailableError, match=rf"home 0{{15}}{home} .*within 5 s: no answer from host:{home} in time"):
        job.write(rows(0, 2))
    assert [one.prepared for one in cluster.homes.values()] == [{}, {}, {}]


def test_home_that_comes_back_in_time_costs_nothing(cluster: SinkCluster, job: Job) -> None:
    job.write(rows(0, 2), task_number=1)
    cluster.homes[1].cut()
    cluster.homes[1].connections_refused = 5
    job.write(rows(0, 2))
    assert [len(one.prepared) for one in cluster.homes.values()] == [2, 0, 2]


def test_home_that_waits_for_the_registry_is_asked_again(cluster: SinkCluster, job: Job) -> None:
    cluster.homes[1].faults["prepare"] = deque([UnavailableError("waits for the registry")] * 3)
    job.write(rows(0, 2))
    assert [len(one.prepared) for one in cluster.homes.values()] == [1, 0, 1]


def test_refusal_of_one_home_rolls_back_all(cluster: SinkCluster, job: Job) -> None:
    cluster.homes[2].faults["prepare"] = deque([DiskFullError("full")])
    with pytest.raises(DiskFullError):
        job.write(rows(0, 1, 2))
    assert [one.prepared for one in cluster.homes.values()] == [{}, {}, {}]
    assert (3, "prepare spark") not in cluster.requests()


def test_task_that_fails_rolls_back_the_deciding_home_first(cluster: SinkCluster, job: Job) -> None:
    def failing() -> Iterator[Any]:
        yield rows(*[0, 1, 2] * 4000)
        yield rows(*[0, 1, 2] * 4000)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        task.write(job.client, job.options, job.at, failing(), job.opened.home)
    ends = [(home, text) for home, text in cluster.requests() if text == "rollback"]
    assert [home for home, _ in ends] == sorted((home for home, _ in ends), key=lambda home: home != 3)
    assert {home for home, _ in ends} == {1, 2, 3}
    assert [one.prepared for one in cluster.homes.values()] == [{}, {}, {}]


def test_homes_need_not_keep_the_outcomes_of_a_task(cluster: SinkCluster, job: Job) -> None:
    job.write(rows(0, 1, 2))
    for link in job.client.routes.links():
        last = int(link.session.next_txid()[1].rpartition("-")[2], 16)
        assert link.session.finished_through == last - 1


def test_more_homes_than_a_transaction_takes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = sink_cluster(monkeypatch, *range(1, 35))
    with wide.client(1) as client:
        client.ping()
        made = Job(client)
        with pytest.raises(ConfigError, match="rows go to 34 homes at once, and a transaction takes 33"):
            made.write(rows(*range(34)))
        assert not any(home.prepared for home in wide.homes.values())
        others = [number for number in range(34) if number + 1 != made.opened.home]
        made.write(rows(*others[:32]))
    assert sum(len(home.prepared) for home in wide.homes.values()) == 33


def test_rows_too_many_for_a_home_are_refused_at_once(cluster: SinkCluster, job: Job) -> None:
    cluster.homes[2].told["request_size_bytes_max"] = 100
    with pytest.raises(TooLargeError, match="1 record batches at once do not fit a request"):
        job.write(rows(0, 1, 2))
    assert not any(text.startswith("prepare") for _, text in cluster.requests())
