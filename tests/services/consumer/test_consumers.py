"""Consumer groups against a real broker: sharing, hand-over, retries, restarts, members that are killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import txmq
from tests.services.consumer.consuming import WAIT_S, take, values
from tests.services.loop_client import Connect
from txmq.client.consumer.consumer import ConsumerOptions
from txmq.model import Message
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess

TOPIC, GROUP = "orders", "billing"
PARTITIONS = 6
_MEMBER = """
import sys, txmq
from txmq.client.consumer.consumer import ConsumerOptions
client = txmq.connect(sys.argv[1])
options = ConsumerOptions(session_timeout=5.0, heartbeat_interval=0.2)
consumer = client.consumer(sys.argv[2], [sys.argv[3]], options=options)
def handle(message):
    # One write a line: print writes word by word, and two threads would share a line.
    sys.stdout.write(f"{message.partition} {message.offset} {message.value.decode()}\\n")
    sys.stdout.flush()
consumer.run(handle, threads=2)
"""

_DEAF_MEMBER = """
import sys, time, txmq
from txmq.client.consumer.consumer import ConsumerOptions
client = txmq.connect(sys.argv[1])
options = ConsumerOptions(session_timeout=5.0, heartbeat_interval=0.2)
consumer = client.consumer(sys.argv[2], [sys.argv[3]], start="latest", options=options)
while not consumer.assignment:
    consumer.poll(timeout=0.01)
print("assigned", flush=True)
while True:
    for message in consumer.poll():
        print(message.value.decode(), flush=True)
"""


@pytest.fixture
def client(broker: BrokerProcess, connect: Connect) -> Iterator[txmq.Client]:
    """A client of a broker with the topic."""
    with connect(broker.address) as made:
        made.topics.create(TOPIC, partitions=PARTITIONS)
        yield made


def fill(client: txmq.Client, count: int, prefix: str = "v") -> list[bytes]:
    """Messages over all partitions."""
    sent = [f"{prefix}{number}".encode() for number in range(count)]
    client.producer().send_many(TOPIC, [(value, value) for value in sent])
    return sent


def offsets(client: txmq.Client) -> dict[int, int | None]:
    """What the group has saved."""
    return {row["partition"]: row["offset"] for row in client.groups.describe(GROUP)["partitions"]}


def test_every_message_comes_once_in_order_over_two_consumers(
    client: txmq.Client,
) -> None:
    sent = fill(client, 1000)
    with client.consumer(GROUP, [TOPIC]) as consumer:
        found = take(consumer, 1000)
    assert sorted(values(found)) == sorted(sent)
    for partition in range(PARTITIONS):
        assert [m.offset for m in found if m.partition == partition] == list(range(offsets(client)[partition] or 0))
    more = fill(client, 10, "w")
    with client.consumer(GROUP, [TOPIC]) as consumer:
        assert sorted(values(take(consumer, 10))) == sorted(more)


def test_what_was_not_acknowledged_comes_again(client: txmq.Client) -> None:
    fill(client, 20)
    with client.consumer(GROUP, [TOPIC]) as consumer:
        held: list[Message] = []
        while len(held) < 20:
            held += consumer.poll(timeout=WAIT_S)
        for message in held[::2]:
            message.ack()
    with client.consumer(GROUP, [TOPIC]) as consumer:
        again: set[bytes] = set()
        while not set(values(held[1::2])) <= again:  # what was acknowledged after a gap may come along
            again.update(values(take(consumer, 1)))


def test_members_that_join_one_after_another_share_and_lose_nothing(client: txmq.Client) -> None:
    sent = fill(client, 3000)
    found: list[bytes] = []
    consumers = []
    for _ in range(6):
        consumers.append(client.consumer(GROUP, [TOPIC], options=ConsumerOptions(heartbeat_interval=0.1)))
        for consumer in consumers:
            for message in consumer.poll(20, timeout=0.05):
                message.ack()
                found.append(message.value or b"")

    def share_is_one() -> bool:
        for consumer in consumers:
            for message in consumer.poll(100, timeout=0.02):
                message.ack()
                found.append(message.value or b"")
        return all(len(consumer.assignment) == 1 for consumer in consumers) and len(set(found)) == len(sent)

    eventually(share_is_one, "every member has one partition")
    for consumer in consumers:
        consumer.close()
    assert set(found) == set(sent)
    assert len(found) - len(sent) <= 600  # at least once: what was under way at a hand-over may come twice


def test_listener_keeps_order_retries_in_place_and_gives_up_finally(client: txmq.Client) -> None:
    producer = client.producer()
    for value in (b"one", b"bad", b"two"):
        producer.send(TOPIC, value, key=b"k", headers={"h": b"1"})
    seen: list[bytes] = []

    def handle(message: Message) -> None:
        seen.append(message.value or b"")
        if message.value == b"bad":
            raise ValueError("cannot")

    consumer = client.consumer(GROUP, [TOPIC], max_retries=2, options=ConsumerOptions(retry_delay=0.01))
    thread = threading.Thread(target=lambda: consumer.run(handle, threads=3))
    thread.start()
    eventually(lambda: b"two" in seen, "the partition moves on")
    consumer.close()
    thread.join(WAIT_S)
    assert seen == [b"one", b"bad", b"bad", b"bad", b"two"]
    (dead,) = client.browse(f"{GROUP}.dead-letter")
    assert (dead.value, dead.key, dead.headers["h"]) == (b"bad", b"k", b"1")
    assert dead.headers["txmq.dead.topic"] == TOPIC.encode()
    assert dead.headers["txmq.dead.attempts"] == b"3"
    assert b"cannot" in dead.headers["txmq.dead.reason"]


@pytest.mark.threads
@pytest.mark.parametrize("threads", [1, 3])
def test_message_in_listeners_hand_is_finished_before_group_leave(client: txmq.Client, threads: int) -> None:
    client.producer().send(TOPIC, b"one", partition=0)
    client.producer().send(TOPIC, b"two", partition=0)
    consumer = client.consumer(GROUP, [TOPIC])
    consumer.run(lambda _message: consumer.close(), threads=threads)  # ends itself, with one message in hand
    assert offsets(client)[0] == 1
    again = client.consumer(GROUP, [TOPIC])
    in_hand, close_waits = threading.Event(), threading.Event()

    def handle(_message: Message) -> None:
        in_hand.set()
        close_waits.wait(WAIT_S)

    thread = threading.Thread(target=lambda: again.run(handle, threads=threads))
    thread.start()
    assert in_hand.wait(WAIT_S)
    closing = threading.Thread(target=again.close)
    closing.start()
    eventually(lambda: again._assignment.is_closed, "it is being closed")
    close_waits.set()
    closing.join(WAIT_S)
    thread.join(WAIT_S)
    assert offsets(client)[0] == 2


def test_partitions_are_worked_on_in_parallel(client: txmq.Client) -> None:
    for partition in range(3):
        client.producer().send(TOPIC, b"x", partition=partition)
    together = threading.Barrier(3)
    consumer = client.consumer(GROUP, [TOPIC])
    met: list[int] = []
    thread = threading.Thread(
        target=lambda: consumer.run(lambda _message: met.append(together.wait(WAIT_S)), threads=3)
    )
    thread.start()
    eventually(lambda: len(met) == 3, "three at a time")
    consumer.close()
    thread.join(WAIT_S)


def test_start_latest_and_a_time_and_seek(client: txmq.Client) -> None:
    producer = client.producer()
    producer.send(TOPIC, b"old", partition=0)
    old = client.fetch(TOPIC, 0, 0)[0].timestamp_ms
    eventually(lambda: int(time.time() * 1000) > old, "another millisecond")
    with client.consumer(GROUP, [TOPIC], start="latest") as consumer:
        eventually(lambda: len(consumer.assignment) == PARTITIONS, "assigned")
        producer.send(TOPIC, b"new", partition=0)
        assert values(take(consumer, 1)) == [b"new"]
        consumer.seek(TOPIC, 0, 0)
        assert values(take(consumer, 2)) == [b"old", b"new"]
        consumer.seek(TOPIC, 0, timestamp_ms=old + 1)
        assert values(take(consumer, 1)) == [b"new"]
        with pytest.raises(txmq.errors.TransactionStateError):
            consumer.seek("other", 0, 0)
    with client.consumer("another", [TOPIC], start=old + 1) as consumer:
        assert values(take(consumer, 1)) == [b"new"]


def test_latest_is_where_the_group_began_not_its_next_member(client: txmq.Client, broker: BrokerProcess) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _DEAF_MEMBER, broker.address, GROUP, TOPIC], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "assigned\n"
    client.producer().send(TOPIC, b"first", partition=0)
    assert process.stdout.readline() == "first\n"
    process.kill()
    process.wait()
    process.stdout.close()
    with client.consumer(GROUP, [TOPIC], start="latest") as consumer:
        assert values(take(consumer, 1)) == [b"first"]


@pytest.mark.parametrize("retry_store", [None, "topic"])
@pytest.mark.parametrize("is_generator", [False, True])
def test_dead_letter_stays_when_transaction_around_it_rolls_back(
    client: txmq.Client, is_generator: bool, retry_store: str | None
) -> None:
    """Found: of a generator's block it was part, and was rolled back with it, while the group went on."""
    producer = client.producer()
    producer.send(TOPIC, b"bad", key=b"k", tag="red")
    with client.consumer(GROUP, [TOPIC], max_retries=0, retry_store=retry_store) as consumer:
        (message,) = consumer.poll(timeout=WAIT_S)

        def in_generator() -> Iterator[None]:
            with producer.transaction():
                message.reject("cannot")
                yield
                raise ValueError("no")

        def rolled_back() -> None:
            with producer.transaction():
                message.reject("cannot")
                raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            list(in_generator()) if is_generator else rolled_back()
    (dead,) = client.browse(f"{GROUP}.dead-letter" if retry_store is None else f"{GROUP}.retry")
    assert (dead.value, dead.key, dead.tag) == (b"bad", b"k", "red")


def test_pause_and_filter(client: txmq.Client) -> None:
    fill(client, 100)
    with client.consumer(
        GROUP, [TOPIC], options=ConsumerOptions(accept=lambda m: m.value in (b"v3", b"v4"))
    ) as consumer:
        assert sorted(values(take(consumer, 2))) == [b"v3", b"v4"]
        consumer.pause()
        client.producer().send(TOPIC, b"v3")
        assert consumer.poll(timeout=0.3) == []
        consumer.resume()
        assert values(take(consumer, 1)) == [b"v3"]


def test_groups_do_not_disturb_each_other_and_bad_names_fail(client: txmq.Client) -> None:
    sent = fill(client, 50)
    for group in ("one", "two"):
        with client.consumer(group, [TOPIC]) as consumer:
            assert sorted(values(take(consumer, 50))) == sorted(sent)
    no_room = "g" * 180  # for the topic of its dead letters that were sent again: the first one would stop a partition
    for group, topics in (
        (no_room, [TOPIC]),
        ("__g", [TOPIC]),
        ("", [TOPIC]),
        ("a b", [TOPIC]),
        ("g", []),
        ("g", ["a/b"]),
    ):
        with pytest.raises(txmq.errors.ConfigError):
            client.consumer(group, topics)


def test_member_reports_thousands_of_partitions_in_pieces(client: txmq.Client) -> None:
    """One request would be more than the broker takes, which may be as little as 64 KiB."""
    topic, count = "t" * 150, 500
    client.topics.create(topic, partitions=count)
    client.groups.reset(GROUP, [(topic, number, 0) for number in range(count)], create=True)
    client.producer().send_many(topic, [(b"%d" % number, b"v") for number in range(count)])
    with client.consumer(GROUP, [topic]) as consumer:
        found = take(consumer, count)
    assert sum(row["offset"] for row in client.groups.describe(GROUP)["partitions"]) == len(found)


def test_an_ack_that_is_waited_for_is_saved(client: txmq.Client) -> None:
    client.producer().send(TOPIC, b"x", partition=2)
    with client.consumer(GROUP, [TOPIC], options=ConsumerOptions(offset_save_interval=3600.0)) as consumer:
        (message,) = consumer.poll(timeout=WAIT_S)
        message.ack(sync=True)
        assert offsets(client)[2] == 1


def test_a_broker_that_is_killed_and_restarted_is_consumed_on(client: txmq.Client, broker: BrokerProcess) -> None:
    sent = fill(client, 200)
    with client.consumer(GROUP, [TOPIC]) as consumer:
        found = values(take(consumer, 100))
        broker.kill()
        broker.start()
        more = fill(client, 50, "w")
        wanted = set(sent) | set(more)
        deadline = time.monotonic() + WAIT_S
        while set(found) != wanted:
            assert time.monotonic() < deadline
            for message in consumer.poll(timeout=0.2):
                message.ack()
                found.append(message.value or b"")
    assert max(Counter(found).values()) <= 2


def test_join_under_taken_name_takes_over_and_tells_other(
    client: txmq.Client, broker: BrokerProcess, connect: Connect
) -> None:
    """Else both had all of it, and each saved what the other one had not deferred."""
    sent = fill(client, 100)
    options = txmq.ConsumerOptions(name="same")
    with connect(broker.address) as other, client.consumer(GROUP, [TOPIC], options=options) as elder:
        found = set(values(elder.poll(timeout=30.0)))
        with other.consumer(GROUP, [TOPIC], options=options) as younger:
            with pytest.raises(txmq.errors.FencedError, match="name of its own"):
                found.update(values(list(elder)))
            assert elder.assignment == []
            elder.close()
            assert set(values(take(younger, len(sent)))) == set(sent)  # the elder has acknowledged nothing
            assert _owners(client) == {"same"}
    assert found <= set(sent)


class Member:
    """A consumer in a process of its own."""

    def __init__(self, broker: BrokerProcess, directory: Path, number: int) -> None:
        self.output = directory / f"member-{number}"
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _MEMBER, broker.address, GROUP, TOPIC], stdout=output, stderr=subprocess.STDOUT
            )

    def lines(self) -> list[tuple[int, int, str]]:
        """What it handled: partition, offset, value."""
        found = [line.split() for line in self.output.read_text().splitlines() if line[:1].isdigit()]
        return [(int(words[0]), int(words[1]), words[2]) for words in found if len(words) == 3]


@pytest.mark.threads
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_member_that_dies_stops_or_freezes_is_followed_by_others(
    client: txmq.Client, broker: BrokerProcess, tmp_path: Path, end: signal.Signals
) -> None:
    members = [Member(broker, tmp_path, number) for number in range(3)]
    try:
        producer = client.producer()
        eventually(lambda: len(_owners(client)) == 3, "all members share")
        sent = []
        for number in range(300):
            value = f"v{number}"
            producer.send(TOPIC, value.encode(), key=value.encode())
            sent.append(value)
            if number == 150:
                members[0].process.send_signal(end)
        eventually(lambda: {value for m in members for _, _, value in m.lines()} == set(sent), "all are handled")
        eventually(lambda: len(_owners(client)) == 2, "the others have everything")
        for member in members:  # a partition's offsets go up while one member has it
            for partition in range(PARTITIONS):
                seen = [offset for number, offset, _ in member.lines() if number == partition]
                assert seen == sorted(set(seen))
        if end == signal.SIGTERM:
            assert members[0].process.wait(WAIT_S) == 0
    finally:
        for member in members:
            member.process.kill()
            member.process.wait()


def _owners(client: txmq.Client) -> set[str]:
    try:
        rows = client.groups.describe(GROUP)["partitions"]
    except txmq.errors.UnknownGroupError:
        return set()
    return {row["owner"] for row in rows if row["owner"]} if all(row["owner"] for row in rows) else set()
