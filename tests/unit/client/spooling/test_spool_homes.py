"""An ordered producer over several homes: sessions and drain threads of their own, and order per partition."""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.unit.client.homes import Cluster, OpenCommits
from txmq.client.partitioner import KeyHashSelector
from txmq.client.spooling.ordered_producer import OrderedMessageProducer, OrderedOptions
from txmq.client.spooling.spool import Spool
from txmq.errors import RequestTimeoutError, UnavailableError
from txmq.model import Message, SendStatus


class NamedPartition:
    """The key is the partition's number."""

    def select(self, topic: str, partitions: int, message: Message) -> int:
        assert message.key is not None
        return int(message.key)


def ordered(cluster: Cluster, spool: Path) -> OrderedMessageProducer:
    client: Any = cluster.client
    return OrderedMessageProducer(client, NamedPartition(), str(spool), OrderedOptions(visibility_wait_s=0.0))


def send(producer: OrderedMessageProducer, partition: int, value: bytes) -> SendStatus:
    return producer.send("t", value, b"%d" % partition).status


def test_each_home_numbers_in_a_session_of_its_own(cluster: Cluster, tmp_path: Path) -> None:
    with ordered(cluster, tmp_path) as producer:
        for number in range(12):
            assert send(producer, number % 6, b"%d" % number) is SendStatus.ACKNOWLEDGED
        with Spool(tmp_path, read_only=True) as spool:
            assert sorted(session.home for session in spool.sessions()) == [1, 2, 3]
    assert [cluster.values(partition) for partition in range(6)] == [
        [b"%d" % partition, b"%d" % (partition + 6)] for partition in range(6)
    ]


def _former(spool: Path) -> list[int]:
    """The homes whose sessions the spool keeps for the next process."""
    with Spool(spool, read_only=True) as kept:
        return sorted(session.home for session in kept.sessions())


def test_close_ends_sessions_of_which_nothing_is_kept(cluster: Cluster, tmp_path: Path) -> None:
    with ordered(cluster, tmp_path) as producer:
        for partition in range(3):
            send(producer, partition, b"0")
    assert [home.sequences for home in cluster.homes] == [{}, {}, {}]
    assert _former(tmp_path) == []
    with ordered(cluster, tmp_path) as producer:
        send(producer, 0, b"1")
    assert cluster.values(0) == [b"0", b"1"]


def test_close_ends_no_session_whose_batches_the_spool_keeps(cluster: Cluster, tmp_path: Path) -> None:
    with ordered(cluster, tmp_path) as producer:
        send(producer, 0, b"0")
        send(producer, 1, b"0")
        cluster.homes[1].lose_answer["put"] = 1
        cluster.homes[1].faults["hello"] = deque([UnavailableError("starting")] * 1000)
        assert send(producer, 1, b"1") is SendStatus.SPOOLED  # stored, and its answer lost
    assert _former(tmp_path) == [1, 2]  # while messages wait, no session is looked at
    cluster.homes[1].faults.clear()
    with ordered(cluster, tmp_path) as producer:
        cluster.pass_time_until(lambda: not producer.spooled)
        producer.flush()
    assert cluster.values(1) == [b"0", b"1"]
    with ordered(cluster, tmp_path) as producer:
        producer.flush()  # the session's last batch is sent: what a process before left is over
        send(producer, 1, b"2")
    assert cluster.values(1) == [b"0", b"1", b"2"]


def test_next_process_ends_session_of_a_killed_one(cluster: Cluster, tmp_path: Path) -> None:
    with ordered(cluster, tmp_path) as producer:
        send(producer, 0, b"0")
        cluster.homes[0].go_down()
    assert _former(tmp_path) == [1]
    cluster.back(0)
    with ordered(cluster, tmp_path) as producer:
        producer.flush()
        assert cluster.homes[0].sequences == {}
        send(producer, 0, b"1")
    assert cluster.values(0) == [b"0", b"1"]


def test_a_home_that_is_away_delays_no_other(cluster: Cluster, tmp_path: Path) -> None:
    with ordered(cluster, tmp_path) as producer:
        assert send(producer, 1, b"0") is SendStatus.ACKNOWLEDGED
        cluster.homes[1].go_down()
        assert [send(producer, 1, b"%d" % number) for number in (1, 2, 3)] == [SendStatus.SPOOLED] * 3
        assert send(producer, 0, b"a") is SendStatus.ACKNOWLEDGED
        cluster.homes[0].go_down()
        assert send(producer, 0, b"b") is SendStatus.SPOOLED
        cluster.back(0)
        cluster.pass_time_until(lambda: cluster.values(0) == [b"a", b"b"] and producer.spooled == 3)
        cluster.back(1)
        cluster.pass_time_until(lambda: not producer.spooled)
    assert cluster.values(1) == [b"0", b"1", b"2", b"3"]


def test_the_next_process_sends_what_each_home_was_owed(cluster: Cluster, tmp_path: Path) -> None:
    with ordered(cluster, tmp_path) as producer:
        for partition in range(3):
            send(producer, partition, b"0")
        for home in cluster.homes:
            home.go_down()
        for partition in range(3):
            assert send(producer, partition, b"1") is SendStatus.SPOOLED
    for number in range(3):
        cluster.back(number)
    with ordered(cluster, tmp_path) as producer:
        cluster.pass_time_until(lambda: not producer.spooled)
        producer.flush()
        for partition in range(3):
            send(producer, partition, b"2")
    assert [cluster.values(partition) for partition in range(3)] == [[b"0", b"1", b"2"]] * 3


def test_a_lost_answer_is_asked_for_at_its_home(cluster: Cluster, tmp_path: Path) -> None:
    cluster.homes[2].lose_answer["put"] = 1
    with ordered(cluster, tmp_path) as producer:
        assert send(producer, 5, b"0") is SendStatus.SPOOLED
        cluster.pass_time_until(lambda: not producer.spooled)
        assert send(producer, 5, b"1") is SendStatus.ACKNOWLEDGED
    assert cluster.values(5) == [b"0", b"1"]


def test_flush_waits_for_former_sessions_of_all_homes(cluster: Cluster, tmp_path: Path) -> None:
    with ordered(cluster, tmp_path) as producer:
        for partition in range(3):
            send(producer, partition, b"0")
        for home in cluster.homes:
            home.go_down()  # so that no session ends with its producer
    for number in (0, 1):
        cluster.back(number)
    with ordered(cluster, tmp_path) as producer:
        with ThreadPoolExecutor(1) as threads:
            flushed = threads.submit(producer.flush, timeout=2.0)
            cluster.pass_time_until(flushed.done)
            with pytest.raises(RequestTimeoutError):
                flushed.result()
        assert [left.home for left in producer._homes._former] == [3]  # those of living homes have ended
        cluster.back(2)
        producer.flush()
        assert producer._homes._former == []


def test_a_wrong_home_is_left_and_nothing_changes_its_order(cluster: Cluster, tmp_path: Path) -> None:
    cluster.routes.believed = dict.fromkeys(range(6), 0)
    with ordered(cluster, tmp_path) as producer:
        for number in range(5):
            send(producer, 4, b"%d" % number)
        cluster.pass_time_until(lambda: not producer.spooled)
        assert send(producer, 4, b"5") is SendStatus.ACKNOWLEDGED
    assert cluster.values(4) == [b"%d" % number for number in range(6)]
    assert cluster.routes.corrections == 1


def test_the_log_tells_of_numbers_for_a_former_owner(cluster: Cluster, tmp_path: Path) -> None:
    with ordered(cluster, tmp_path) as producer:
        send(producer, 0, b"0")
        cluster.homes[0].lose_answer["put"] = 1
        cluster.homes[0].after_put = cluster.homes[0].go_down
        assert send(producer, 0, b"1") is SendStatus.SPOOLED
        cluster.give(0, to=1)
        cluster.routes.corrected("t")
        assert send(producer, 0, b"2") is SendStatus.SPOOLED
        cluster.pass_time_until(lambda: not producer.spooled)
    assert cluster.homes[1].ends[0] == 2


def test_a_retrying_producer_keeps_what_one_home_does_not_take(cluster: Cluster, tmp_path: Path) -> None:
    client: Any = cluster.client
    with OrderedMessageProducer(client, KeyHashSelector(), str(tmp_path), OrderedOptions()) as producer:
        cluster.homes[1].go_down()
        futures = [producer.send_async("t", b"%d" % number, b"%d" % number) for number in range(60)]
        results = [future.result() for future in futures]
        away = {result.partition for result in results if result.status is SendStatus.SPOOLED}
        assert away == {1, 4}
        cluster.back(1)
        cluster.pass_time_until(lambda: not producer.spooled)
    assert sorted(cluster.all_values(), key=repr) == sorted((b"%d" % number for number in range(60)), key=repr)


def test_an_ordered_message_passes_no_commit_of_its_home(cluster: Cluster, tmp_path: Path) -> None:
    commits = cluster.links[1].pending_commits = OpenCommits(cluster.clock)
    with ordered(cluster, tmp_path) as producer:
        assert send(producer, 0, b"0") is SendStatus.ACKNOWLEDGED
        commits.is_open = False
        assert send(producer, 1, b"0") is SendStatus.ACKNOWLEDGED
        commits.is_open = True
        assert [send(producer, 1, b"%d" % number) for number in (1, 2)] == [SendStatus.SPOOLED] * 2
        assert cluster.values(1) == [b"0"]
        commits.is_open = False
        cluster.pass_time_until(lambda: not producer.spooled)
    assert cluster.values(1) == [b"0", b"1", b"2"]
