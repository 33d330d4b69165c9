"""Producers over several homes: each partition's batches go to its home, and nothing is stored twice."""

from __future__ import annotations

from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.unit.client.homes import Cluster, OpenCommits
from txmq.client.partitioner import FixedSelector, RoundRobinSelector
from txmq.client.producer.home_senders import HomeSender
from txmq.errors import BrokerAwayError, DeliveryUnknownError, NotOwnerError, RequestTimeoutError, UnknownTopicError
from txmq.testing.eventually import eventually


def test_each_home_gets_its_partitions_in_its_own_session(cluster: Cluster) -> None:
    producer = cluster.client.producer()
    for number in range(12):
        assert producer.send("t", b"%d" % number, partition=number % 6).offset == number // 6
    assert [cluster.values(partition) for partition in range(6)] == [
        [b"%d" % partition, b"%d" % (partition + 6)] for partition in range(6)
    ]
    assert [home.verbs.count("put") for home in cluster.homes] == [4, 4, 4]
    assert [len(home.streams) for home in cluster.homes] == [1, 1, 1]  # the links' own connections


def test_keyless_messages_take_turns_by_home_and_number(cluster: Cluster) -> None:
    producer = cluster.client.producer()
    assert [producer.send("t", b"v").partition for _ in range(7)] == [0, 3, 1, 4, 2, 5, 0]


def test_keyless_messages_leave_a_home_and_come_back(cluster: Cluster) -> None:
    producer = cluster.client.producer()
    cluster.homes[1].go_down()
    sent = [producer.send("t", b"%d" % number) for number in range(12)]
    assert {result.partition for result in sent} == {0, 3, 2, 5}
    assert cluster.homes[1].tries == 1
    assert sorted(cluster.all_values(), key=repr) == sorted((b"%d" % number for number in range(12)), key=repr)
    cluster.back(1)
    assert {producer.send("t", b"v").partition for _ in range(6)} == set(range(6))


def test_keyless_messages_under_way_stay_until_a_batch_is_full(cluster: Cluster) -> None:
    producer = cluster.client.producer(linger_ms=1000, batch_size_bytes=1024)
    futures = [producer.send_async("t", b"v" * 100) for _ in range(30)]
    producer.flush()
    assert [future.result().partition for future in futures][::7] == [0, 3, 1, 4, 2]


def test_round_robin_leaves_a_home_whatever_the_key(cluster: Cluster) -> None:
    cluster.homes[2].go_down()
    producer = cluster.client.producer(RoundRobinSelector())
    assert {producer.send("t", b"v", key=b"k").partition for _ in range(8)} == {0, 3, 1, 4}


@pytest.mark.parametrize("kind", ["key", "partition", "selector"])
def test_a_fixed_partition_waits_for_its_home(cluster: Cluster, kind: str) -> None:
    producer = cluster.client.producer(FixedSelector(1) if kind == "selector" else None)
    key = next(b"%d" % n for n in range(100) if producer._select("t", 6, (b"%d" % n, b"", (), 0), None) == 1)
    cluster.homes[1].go_down()
    with ThreadPoolExecutor(2) as threads:
        if kind == "key":
            waiting = threads.submit(producer.send, "t", b"v", key=key)
        elif kind == "partition":
            waiting = threads.submit(producer.send, "t", b"v", partition=1)
        else:
            waiting = threads.submit(producer.send, "t", b"v")
        eventually(lambda: cluster.homes[1].tries > 2, "its home is tried again and again")
        assert not waiting.done()
        cluster.back(1)
        assert (waiting.result().partition, waiting.result().offset) == (1, 0)


def test_a_fixed_partition_fails_in_time_and_is_nowhere(cluster: Cluster) -> None:
    producer = cluster.client.producer()
    cluster.homes[1].go_down()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(producer.send, "t", b"v", partition=4)
        eventually(lambda: cluster.homes[1].tries > 1, "its home is tried")
        cluster.clock.now += 6
        with pytest.raises(BrokerAwayError, match="t-4 were not sent in time, nothing was stored"):
            waiting.result()
    cluster.back(1)
    assert producer.send("t", b"next", partition=4).offset == 0


def test_a_written_batch_keeps_its_partition(cluster: Cluster) -> None:
    producer = cluster.client.producer()
    cluster.homes[0].lose_answer["put"] = 1
    cluster.homes[0].faults["hello"] = deque([lambda stream: setattr(stream, "is_over", True)] * 3)
    result = producer.send("t", b"v")
    assert (result.partition, result.offset) == (0, 0)
    assert cluster.all_values() == [b"v"]


def test_a_written_batch_ends_as_unknown(cluster: Cluster) -> None:
    producer = cluster.client.producer()
    home = cluster.homes[0]
    home.faults["put"] = deque([lambda _stream: home.go_down()])
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(producer.send, "t", b"v")
        eventually(lambda: home.tries > 2, "its home is tried again")
        cluster.clock.now += 6
        with pytest.raises(DeliveryUnknownError):
            waiting.result()
    assert cluster.all_values() == []
    assert producer.send("t", b"other").partition != 0  # nobody waits for the home that is away


def test_a_home_that_answers_nothing_is_left(cluster: Cluster) -> None:
    producer = cluster.client.producer()
    cluster.homes[0].faults["put"] = deque([lambda _stream: None])
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(producer.send, "t", b"v")
        eventually(lambda: cluster.homes[0].verbs.count("put") == 1, "it is sent")
        cluster.clock.now += 6
        with pytest.raises(DeliveryUnknownError):
            waiting.result()
    assert cluster.links[0].is_away
    assert {producer.send("t", b"v").partition for _ in range(6)} == {1, 4, 2, 5}


def test_futures_follow_messages_that_were_never_sent(cluster: Cluster) -> None:
    producer = cluster.client.producer(RoundRobinSelector(), linger_ms=1000)
    cluster.homes[2].go_down()
    futures = [producer.send_async("t", b"%d" % number) for number in range(60)]
    producer.flush()
    results = [future.result() for future in futures]
    places = Counter((result.partition, result.offset) for result in results)
    assert set(places.values()) == {1}
    assert {result.partition for result in results} == {0, 3, 1, 4}
    assert len(cluster.all_values()) == 60


def test_two_threads_that_leave_a_home_move_each_message_once(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = cluster.client.producer()
    cluster.client.topics.known("t")
    cluster.homes[0].go_down()
    with monkeypatch.context() as patch:
        patch.setattr(HomeSender, "_start_background", lambda _sender: None)
        future = producer.send_async("t", b"v")
        senders = producer._senders
        source = senders._of_links[cluster.links[0]]
        (batch,) = source.movable()
        cluster.links[0].was_silent()
        for _ in range(2):  # both have read what may move before either has moved it
            senders._move(source, batch)
    assert (source.core.unfinished, source.core.buffered_bytes, source._futures) == (0, 0, 0)
    for sender in senders._of_links.values():
        sender._start_background()
    assert future.result(5).is_success
    assert cluster.all_values() == [b"v"]


def test_a_message_that_cannot_move_yet_goes_on_waiting(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal of the question where else it could go is no answer to the message: it may still be sent."""
    monkeypatch.setattr(cluster.links[0], "was_silent", lambda: cluster.client.topics.forget("t"))
    producer = cluster.client.producer()
    cluster.client.topics.known("t")
    cluster.homes[0].go_down()
    cluster.homes[1].faults["meta"] = deque([UnknownTopicError("no topic t")])
    assert producer.send("t", b"v").is_success
    assert cluster.all_values() == [b"v"]


# --- routes that are wrong -------------------------------------------------------------------------------------------


def test_a_message_for_a_wrong_home_finds_the_right_one(cluster: Cluster) -> None:
    cluster.routes.believed = dict.fromkeys(range(6), 0)
    producer = cluster.client.producer()
    results = [producer.send("t", b"%d" % number, partition=5) for number in range(3)]
    assert [result.offset for result in results] == [0, 1, 2]
    assert cluster.values(5) == [b"0", b"1", b"2"]
    assert cluster.homes[0].verbs.count("put") == cluster.routes.corrections == 1


def test_messages_keep_their_order_when_the_owner_changes(cluster: Cluster) -> None:
    producer = cluster.client.producer()
    assert producer.send("t", b"first", partition=0).offset == 0
    cluster.give(0, to=1)
    futures = [producer.send_async("t", b"%d" % number, partition=0) for number in range(50)]
    assert [future.result().offset for future in futures] == list(range(50))
    assert cluster.values(0) == [b"first", *(b"%d" % number for number in range(50))]


def test_what_may_be_stored_goes_to_no_other_home(cluster: Cluster) -> None:
    """The former owner stored it, and its answer was lost."""
    producer = cluster.client.producer()
    cluster.homes[0].lose_answer["put"] = 1
    cluster.homes[0].after_put = lambda: cluster.give(0, to=1)
    with pytest.raises(DeliveryUnknownError, match="another home's"):
        producer.send("t", b"v", partition=0)
    assert cluster.values(0) == [b"v"]
    assert 0 not in cluster.homes[1].ends


def test_a_topic_of_another_size_fails_the_old_messages(cluster: Cluster) -> None:
    producer = cluster.client.producer()
    producer.send("t", b"v", partition=0)
    cluster.give(0, to=1)
    for home in cluster.homes:
        home.partitions, home.topic_id = 4, 8
    with pytest.raises(NotOwnerError, match="created anew with 4 partitions"):
        producer.send("t", b"w", partition=0)
    cluster.client.topics.forget("t")
    assert producer.send("t", b"w", partition=0).offset == 0


def test_a_home_that_denies_its_partition_is_asked_again(cluster: Cluster) -> None:
    producer = cluster.client.producer()
    refusal = NotOwnerError("leader=host:9 home=9 owns partition 0 of topic 't'")
    cluster.homes[0].faults["put"] = deque([refusal, refusal])
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(producer.send, "t", b"v", partition=0, timeout=86_400)
        cluster.pass_time_until(waiting.done)
        assert (waiting.result().offset, cluster.routes.corrections) == (0, 2)
        cluster.homes[0].faults["put"] = deque([refusal] * 1000)
        waiting = threads.submit(producer.send, "t", b"v", partition=0)
        eventually(lambda: cluster.routes.corrections == 3, "the routes are corrected")
        cluster.pass_time_until(waiting.done)
        with pytest.raises(NotOwnerError):
            waiting.result()
    assert cluster.values(0) == [b"v"]


# --- transactions over homes -----------------------------------------------------------------------------------------


def test_a_key_waits_for_commits_that_its_home_owes(cluster: Cluster) -> None:
    commits = cluster.links[0].pending_commits = OpenCommits(cluster.clock)
    producer = cluster.client.producer()
    with pytest.raises(BrokerAwayError, match="nothing was stored"):
        producer.send("t", b"v", key=b"k", partition=0)
    assert not cluster.homes[0].ends
    assert producer.send("t", b"v", partition=0).offset == 0  # no key, no order
    assert producer.send("t", b"v", key=b"k", partition=1).is_success
    commits.is_open = False
    assert producer.send("t", b"v", key=b"k", partition=0).offset == 1
    assert commits.waited == 1


def test_send_many_leaves_out_only_what_waits_for_commits(cluster: Cluster) -> None:
    commits = cluster.links[0].pending_commits = OpenCommits(cluster.clock)
    producer = cluster.client.producer()
    pairs = [(b"%d" % number, b"v") for number in range(50)]
    with pytest.raises(BrokerAwayError, match="nothing was stored") as failed:
        producer.send_many("t", pairs, timeout=5.0)
    there = sum(len(cluster.values(partition)) for partition in (1, 2, 4, 5))
    assert failed.value.__notes__ == [f"{there} of 50 messages were acknowledged; failed: t-0, t-3"]
    assert (cluster.homes[0].ends, there > 0) == ({}, True)
    assert commits.deadlines == [cluster.clock.now + 5.0, cluster.clock.now]  # the second one's home was waited for
    commits.is_open = False
    assert all(result.is_success for result in producer.send_many("t", pairs))


# --- many, and limits over all homes ---------------------------------------------------------------------------------


def test_send_many_to_all_homes_keeps_the_callers_order(cluster: Cluster) -> None:
    producer = cluster.client.producer()
    pairs = [(b"%d" % number if number % 3 else None, b"%d" % number) for number in range(300)]
    results = producer.send_many("t", pairs)
    found = {
        (partition, offset): value for partition in range(6) for offset, value in enumerate(cluster.values(partition))
    }
    assert [found[result.partition, result.offset] for result in results if result.offset is not None] == [
        value for _, value in pairs
    ]
    assert len({results[number].partition for number in range(0, 300, 3)}) == 1  # one full batch


def test_send_many_names_the_partitions_of_a_dead_home(cluster: Cluster) -> None:
    producer = cluster.client.producer()
    cluster.homes[1].go_down()
    pairs = [(b"%d" % number, b"%d" % number) for number in range(60)]
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(producer.send_many, "t", pairs)
        eventually(lambda: {0, 2, 3, 5} <= {p for home in cluster.homes for p in home.ends}, "the others have theirs")
        living = [sender for link, sender in producer._senders._of_links.items() if link.home != 2]
        eventually(lambda: not any(sender.core.unfinished for sender in living), "and have told so")
        stored = len(cluster.all_values())
        cluster.clock.now += 6
        with pytest.raises((BrokerAwayError, RequestTimeoutError)) as caught:
            waiting.result()
    assert caught.value.__notes__ == [f"{stored} of 60 messages were acknowledged; failed: t-1, t-4"]
    assert not {1, 4} & cluster.homes[1].ends.keys()


def test_send_many_gives_keyless_messages_to_living_homes(cluster: Cluster) -> None:
    producer = cluster.client.producer()
    cluster.homes[0].go_down()
    results = producer.send_many("t", [(None, b"%d" % number) for number in range(100)])
    assert {result.partition for result in results} < {1, 4, 2, 5}
    assert len(cluster.all_values()) == 100


def test_the_buffer_is_one_for_all_homes(cluster: Cluster) -> None:
    producer = cluster.client.producer(buffer_size_bytes=2000, linger_ms=60_000, timeout=1000)
    for home in cluster.homes:
        home.hold.add("put")
    futures = [producer.send_async("t", b"x" * 300, partition=partition) for partition in range(4)]
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(producer.send_async, "t", b"x" * 600, partition=5)
        cluster.clock.now += 61
        eventually(lambda: sum(len(home.held) for home in cluster.homes) == 4, "they are sent")
        assert not waiting.done()
        for home in cluster.homes:
            home.hold.clear()
            home.release()
        assert [future.result().offset for future in futures] == [0, 0, 0, 0]
        future = waiting.result()
        producer.flush()
        assert future.result().partition == 5


def test_close_gives_the_senders_of_all_homes_back(cluster: Cluster) -> None:
    with cluster.client.producer(linger_ms=60_000) as producer:
        futures = [producer.send_async("t", b"v", partition=partition) for partition in range(6)]
    assert all(future.done() for future in futures)
    cluster.client.producer().send_many("t", [(b"%d" % n, b"v") for n in range(50)])
    assert [home.next_session for home in cluster.homes] == [2, 2, 2]
