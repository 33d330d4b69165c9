"""A topic is deleted, and another one has its name: producers of a cluster do not mistake the one for the other."""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.unit.client.homes import Cluster
from txmq.errors import DeliveryUnknownError, NotOwnerError, StaleTopicError, UnknownTopicError
from txmq.testing.eventually import eventually


def test_every_batch_says_which_topic_is_meant(cluster: Cluster) -> None:
    producer = cluster.client.producer()
    producer.send("t", b"v", key=b"k")
    producer.send_async("t", b"v", partition=1).result()
    list(producer.send_many("t", [(b"%d" % number, b"v") for number in range(20)]))
    assert {meant for home in cluster.homes for meant in home.meant} == {7}


def test_batches_follow_a_topic_of_the_same_size(cluster: Cluster) -> None:
    producer = cluster.client.producer()
    futures = [producer.send_async("t", b"old", partition=0) for _ in range(3)]
    assert [future.result().offset for future in futures] == [0, 1, 2]
    cluster.create_anew()
    futures = [producer.send_async("t", b"%d" % number, partition=0) for number in range(50)]
    assert [future.result().offset for future in futures] == list(range(50))
    assert cluster.values(0) == [b"%d" % number for number in range(50)]
    assert (cluster.homes[0].meant[-1], cluster.routes.corrections) == (8, 1)


def test_batches_follow_a_topic_to_another_home(cluster: Cluster) -> None:
    producer = cluster.client.producer()
    producer.send("t", b"old", partition=0)
    cluster.create_anew()
    cluster.give(0, to=1)
    assert producer.send("t", b"new", partition=0).offset == 0
    assert cluster.homes[1].meant == [8]


def test_keys_of_a_topic_of_another_size_are_refused(cluster: Cluster) -> None:
    """Their partition was chosen for the topic that is gone; the next send chooses anew."""
    producer = cluster.client.producer()
    key = next(b"%d" % n for n in range(100) if producer._select("t", 6, (b"%d" % n, b"", (), 0), None) == 1)
    producer.send("t", b"old", key=key)
    cluster.create_anew(partitions=3)
    with pytest.raises(NotOwnerError, match="created anew with 3 partitions: nothing was stored"):
        producer.send("t", b"stale", key=key)
    assert cluster.all_values() == []
    result = producer.send("t", b"new", key=key)
    assert (result.partition, result.offset) == (producer._select("t", 3, (key, b"", (), 0), None), 0)


def test_a_partition_without_batches_follows_what_the_client_knows(cluster: Cluster) -> None:
    producer = cluster.client.producer()
    for partition in range(3):
        producer.send("t", b"old", partition=partition)
        producer.send("t", b"old", partition=partition)
    cluster.create_anew(partitions=3)
    cluster.client.topics.forget("t")
    assert [producer.send("t", b"new", partition=partition).offset for partition in range(3)] == [0, 0, 0]
    assert cluster.routes.corrections == 0
    assert [home.meant for home in cluster.homes] == [[7, 7, 8]] * 3


def test_the_size_that_counts_is_the_last_one_known(cluster: Cluster) -> None:
    for home in cluster.homes:
        home.partitions = 3
    producer = cluster.client.producer()
    producer.send("t", b"of 3", partition=0)
    for home in cluster.homes:
        home.partitions = 6
    cluster.client.topics.forget("t")
    producer.send("t", b"of 6", partition=0)
    cluster.create_anew(partitions=3)
    with pytest.raises(NotOwnerError, match="created anew with 3 partitions"):
        producer.send("t", b"of 6", partition=0)


def test_what_may_be_stored_in_the_old_topic_is_unknown(cluster: Cluster) -> None:
    producer = cluster.client.producer()
    cluster.homes[0].lose_answer["put"] = 1
    cluster.homes[0].after_put = cluster.create_anew
    with pytest.raises(DeliveryUnknownError, match="another topic has the name"):
        producer.send("t", b"v", partition=0)
    cluster.homes[0].after_put = lambda: None
    assert cluster.all_values() == []
    assert producer.send("t", b"new", partition=0).offset == 0
    assert cluster.values(0) == [b"new"]


def test_a_deleted_topic_fails_what_was_refused(cluster: Cluster) -> None:
    producer = cluster.client.producer()
    producer.send("t", b"v", partition=1)
    cluster.homes[0].faults["put"] = deque([StaleTopicError("topic 't' has id 8 now, not 7")])
    cluster.homes[0].faults["meta"] = deque([UnknownTopicError("no topic t")])
    with pytest.raises(UnknownTopicError):
        producer.send("t", b"v", partition=0)
    assert cluster.values(0) == []


def test_brokers_that_disagree_are_asked_again(cluster: Cluster) -> None:
    """The broker that is asked for the topic has not heard of the new one yet."""
    producer = cluster.client.producer()
    stale = StaleTopicError("topic 't' has id 8 now, not 7")
    cluster.homes[0].faults["put"] = deque([stale, stale])
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(producer.send, "t", b"v", partition=0, timeout=86_400)
        cluster.pass_time_until(waiting.done)
        assert (waiting.result().offset, cluster.routes.corrections) == (0, 2)
        cluster.homes[0].faults["put"] = deque([stale] * 1000)
        waiting = threads.submit(producer.send, "t", b"v", partition=0)
        eventually(lambda: cluster.routes.corrections == 3, "the topic is looked up")
        cluster.pass_time_until(waiting.done)
        with pytest.raises(StaleTopicError):
            waiting.result()
    assert cluster.values(0) == [b"v"]
