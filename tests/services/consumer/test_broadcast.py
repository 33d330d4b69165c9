"""Broadcast against a real broker: every member gets everything; what a name is worth; what begins later."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import txmq
from tests.services.consumer.consuming import WAIT_S, take, values
from tests.services.loop_client import Connect
from txmq.client.consumer.consumer import Consumer
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess

TOPIC, GROUP = "changes", "caches"
PARTITIONS = 3
_MEMBER = """
import sys, txmq
client = txmq.connect(sys.argv[1])
options = txmq.ConsumerOptions(name="shop-1")
consumer = client.consumer("caches", ["changes"], broadcast=True, options=options)
while len(consumer.assignment) < 3:
    consumer.poll(timeout=0.01)
print("assigned", flush=True)
for message in consumer:
    print(message.value.decode(), flush=True)
    if message.value != b"later":
        message.ack(sync=True)
"""


@pytest.fixture
def client(shared_broker: BrokerProcess, connect: Connect) -> Iterator[txmq.Client]:
    """A client of a broker with the topic, which holds a message that is older than every member, and nothing else."""
    with connect(shared_broker.address, timeout=30.0) as made:
        made.topics.create(TOPIC, partitions=PARTITIONS)
        made.producer().send(TOPIC, b"old")
        yield made
        for topic in made.topics.list():
            made.topics.delete(topic.name)
        for known in made.groups.list():
            made.groups.delete(known["group"])


def options(name: str | None = None) -> txmq.ConsumerOptions:
    """Quick ones."""
    return txmq.ConsumerOptions(name=name, heartbeat_interval=0.1, retry_delay=0.01, deferred_delay=0.01)


@contextmanager
def member(client: txmq.Client, name: str | None = None) -> Iterator[Consumer]:
    """A member of the broadcast that has every partition."""
    with client.consumer(GROUP, [TOPIC], broadcast=True, options=options(name)) as consumer:
        eventually(lambda: len(consumer.assignment) == PARTITIONS, "it has everything")
        yield consumer


def send(client: txmq.Client, count: int, prefix: str = "v") -> list[bytes]:
    """Messages over all partitions."""
    sent = [f"{prefix}{number}".encode() for number in range(count)]
    client.producer(timeout=30.0).send_many(TOPIC, [(value, value) for value in sent])
    return sent


def test_every_member_gets_every_message_from_its_beginning_on(client: txmq.Client) -> None:
    with member(client) as one, member(client) as two, member(client, "three") as three:
        sent = send(client, 100)
        for consumer in (one, two, three):
            found = take(consumer, 100)
            assert sorted(values(found)) == sorted(sent)
            for partition in range(PARTITIONS):
                offsets = [message.offset for message in found if message.partition == partition]
                assert offsets == sorted(offsets)
            assert consumer.poll(timeout=0) == []


def test_member_without_name_begins_anew_and_leaves_no_trace(client: txmq.Client) -> None:
    with member(client) as consumer:
        send(client, 3)
        take(consumer, 3)
    send(client, 3, "missed")
    with member(client) as consumer:
        sent = send(client, 3, "w")
        assert sorted(values(take(consumer, 3))) == sent
    assert client.groups.list() == []


def test_a_member_with_a_name_goes_on_where_it_stopped(client: txmq.Client) -> None:
    with member(client, "shop-1") as consumer:
        send(client, 3)
        take(consumer, 3)
    missed = send(client, 3, "missed")
    with member(client, "shop-1") as consumer:
        assert sorted(values(take(consumer, 3))) == missed
    assert [group["group"] for group in client.groups.list()] == [f"{GROUP}.shop-1"]


def test_second_consumer_of_name_stands_by_and_follows_kill(client: txmq.Client, shared_broker: BrokerProcess) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _MEMBER, shared_broker.address], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout as output:
        assert output.readline() == "assigned\n"
        with client.consumer(GROUP, [TOPIC], broadcast=True, options=options("shop-1")) as second:
            send(client, 10)
            assert {output.readline() for _ in range(10)} == {f"v{number}\n" for number in range(10)}
            assert (second.assignment, second.poll(timeout=0)) == ([], [])
            client.producer(timeout=30.0).send(TOPIC, b"later")
            assert output.readline() == "later\n"
            process.send_signal(signal.SIGKILL)
            process.wait(WAIT_S)
            assert values(take(second, 1)) == [b"later"]  # it was delivered, and not acknowledged


@pytest.mark.parametrize("name", [None, "shop-1"])
def test_later_topics_and_partitions_are_consumed_from_their_first_message(
    client: txmq.Client, name: str | None
) -> None:
    with client.consumer(GROUP, [TOPIC, "new"], broadcast=True, options=options(name)) as consumer:
        eventually(lambda: len(consumer.assignment) == PARTITIONS, "it has what there is")
        producer = client.producer(timeout=30.0)
        client.topics.create("new")
        producer.send("new", b"first of a topic")
        client.topics.alter(TOPIC, partitions=PARTITIONS + 1)
        producer.send(TOPIC, b"first of a partition", partition=PARTITIONS)
        assert set(values(take(consumer, 2))) == {b"first of a topic", b"first of a partition"}


def test_added_topic_begins_at_its_end_missing_no_later_partition(
    client: txmq.Client,
) -> None:
    with member(client, "shop-1"):
        pass
    client.topics.create("new")
    client.topics.alter(TOPIC, partitions=PARTITIONS + 1)
    producer = client.producer(timeout=30.0)
    producer.send("new", b"old of a topic that is new to it")
    producer.send(TOPIC, b"first of a partition", partition=PARTITIONS)
    with client.consumer(GROUP, [TOPIC, "new"], broadcast=True, options=options("shop-1")) as consumer:
        eventually(lambda: len(consumer.assignment) == PARTITIONS + 2, "it has everything")
        producer.send("new", b"new")
        assert set(values(take(consumer, 2))) == {b"first of a partition", b"new"}


@pytest.mark.parametrize("name", [None, "shop-1"])
def test_a_topic_that_is_made_anew_is_another_one(client: txmq.Client, name: str | None) -> None:
    client.topics.create("new")
    with client.consumer(GROUP, ["new"], broadcast=True, options=options(name)) as consumer:
        for number in range(3):
            eventually(lambda: len(consumer.assignment) == 1, "it has the topic")
            client.producer(timeout=30.0).send("new", b"%d" % number)
            assert values(take(consumer, 1)) == [b"%d" % number]
            client.topics.delete("new")
            client.topics.create("new")


@pytest.mark.parametrize("name", [None, "shop-1"])
def test_a_broker_that_is_killed_loses_a_member_nothing(
    client: txmq.Client, shared_broker: BrokerProcess, name: str | None
) -> None:
    with member(client, name) as consumer:
        sent = send(client, 10)
        found = set(values(take(consumer, 10)))
        shared_broker.kill()
        shared_broker.start()
        sent += send(client, 10, "w")
        while found != set(sent):
            found.update(values(take(consumer, 1)))


def test_pause_seek_and_the_start_are_as_elsewhere(client: txmq.Client) -> None:
    with client.consumer(GROUP, [TOPIC], broadcast=True, start="earliest", options=options()) as consumer:
        (old,) = take(consumer, 1)
        assert old.value == b"old"
        consumer.pause()
        client.producer(timeout=30.0).send(TOPIC, b"new", partition=old.partition)
        assert consumer.poll(timeout=0.2) == []
        consumer.resume()
        assert values(take(consumer, 1)) == [b"new"]
        consumer.seek(TOPIC, old.partition, old.offset)
        assert values(take(consumer, 2)) == [b"old", b"new"]


def test_message_that_one_member_cannot_handle_affects_no_other(client: txmq.Client, tmp_path: Path) -> None:
    seen: list[bytes | None] = []
    refused = threading.Event()

    def handle(message: txmq.Message) -> None:
        seen.append(message.value)
        if message.value == b"v0" and not refused.is_set():
            raise ValueError("cannot")

    kept = {"max_retries": 1, "retry_store": str(tmp_path / "retry.db")}
    with (
        client.consumer(GROUP, [TOPIC], broadcast=True, options=options("shop-1"), **kept) as one,  # type: ignore[arg-type]
        member(client, "shop-2") as two,
    ):
        eventually(lambda: len(one.assignment) == PARTITIONS, "it has everything")
        send(client, 1)
        thread = threading.Thread(target=lambda: one.run(handle))
        thread.start()
        try:
            assert values(take(two, 1)) == [b"v0"]
            eventually(lambda: seen.count(b"v0") > 2, "it is deferred and tried again")
            refused.set()
            send(client, 2, "w")
            eventually(lambda: {b"w0", b"w1"} <= set(seen), "the partition moves on")
        finally:
            one.close()
            thread.join(WAIT_S)


def test_its_dead_letters_are_the_whole_groups_and_say_whose(client: txmq.Client) -> None:
    refusing = client.consumer(GROUP, [TOPIC], broadcast=True, max_retries=0, options=options("shop-1"))
    with refusing as consumer:
        eventually(lambda: len(consumer.assignment) == PARTITIONS, "it has everything")
        client.producer(timeout=30.0).send(TOPIC, b"bad")
        (message,) = consumer.poll(timeout=WAIT_S)
        message.reject("cannot")
    (dead,) = client.browse(f"{GROUP}.dead-letter")
    assert (dead.value, dead.headers["txmq.dead.member"]) == (b"bad", b"shop-1")


def test_retry_store_needs_name_to_be_found_again_under(client: txmq.Client, tmp_path: Path) -> None:
    with pytest.raises(txmq.errors.ConfigError, match=r"options\.name"):
        client.consumer(GROUP, [TOPIC], broadcast=True, retry_store=str(tmp_path / "retry.db"))
    with pytest.raises(txmq.errors.ConfigError, match="longer"):
        client.consumer("g" * 150, [TOPIC], broadcast=True, options=txmq.ConsumerOptions(name="n" * 60))
