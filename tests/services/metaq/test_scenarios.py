"""The acceptance scenarios of MetaQ for producers, consumers, retries and the browser.

Their name, and where it is here; a name without a file is a test of this one. What transactions do, and what the
original fails at, is in ``test_scenarios_transactions``. Left out: ha, gregor, spring and ZooKeeper.

======================================== ==============================================================================
OneProducerOneConsumerTest               test_five_messages_arrive_as_they_were
...TwoBroker...                          none: one broker
OneProducerOneConsumerWithFilterTest     test_filter_delivers_what_it_accepts_and_offset_passes_rest
OneProducerTenConsumerOneGroupTest       test_six_members_joining_in_turn_get_each_message_once;
                                         tests/services/consumer/test_consumers.py::
                                         test_members_that_join_one_after_another_share_and_lose_nothing
OneProducerTenConsumerTenGroup,          test_ten_producers_and_ten_groups_on_two_topics
TenProducerTenConsumerTenGroup, TwoTopic,
MessageAttribute, Attributediff
BlankData, SpecialCharData               test_blank_and_special_content_is_carried
BlankTopic, BlankGroup, SpecialCharTopic,
SpecialCharGroupName                     test_blank_and_special_names_are_refused
NotPublishTopicTest                      test_sending_to_a_topic_that_is_not_there_is_refused
SubscribeWrongTopic                      test_topic_that_is_not_there_brings_nothing_and_fails_nothing
SubscribeSmallInfoSize                   test_the_smallest_fetch_brings_a_whole_message
BigMessageTest, BigCountTest             test_big_messages_and_many_messages_arrive_equal
SendMessageCallbackTest                  test_callbacks_are_told_in_order
RandomTopicTest, SetDefaultTopicTest     none: there is no default topic; a topic is created before it is sent to
AcceptPublishAcceptSubscribeTest         test_a_topic_closed_for_publishing_or_for_reading
ComsumeFailAndRetryTest                  test_a_listener_that_fails_twice_gets_the_message_three_times
ComsumeFailAndRecoverTest                test_six_deliveries_in_place_then_from_the_retry_store
ComsumeFromMaxOffsetTest                 test_the_latest_is_what_comes_after_the_consumer
MesageSetRollbackOnlyTest                test_five_messages_rejected_twice_are_fifteen_deliveries
TransactionConsumerTest                  test_rejected_messages_come_again_in_their_order
TopicBrowserTest                         test_a_topic_is_browsed_whole
---------------------------------------- ------------------------------------------------------------------------------
SimpleFetchManagerUnitTest: normal       test_five_messages_arrive_as_they_were
  filter accepts, rejects                test_filter_delivers_what_it_accepts_and_offset_passes_rest
  filter throws                          test_a_filter_that_fails_loses_nothing
  invalid message, offset query          tests/unit/client/test_client_bulk_and_reading.py::
                                         test_damage_on_the_way_is_found;
                                         tests/unit/broker/verbs/test_get.py::
                                         test_damaged_segment_is_an_internal_error_and_affects_no_other
  retry too many, delay, rollbackOnly    test_six_deliveries_in_place_then_from_the_retry_store;
                                         tests/unit/client/consumer/test_consumed_partition.py::
                                         test_failed_message_comes_again_in_time_and_holds_the_position
  increase maxSize                       test_big_messages_and_many_messages_arrive_equal
MessageIteratorUnitTest                  tests/unit/log/test_batch.py::
                                         test_batch_that_breaks_rule_is_refused_and_rule_named;
                                         tests/unit/client/test_client_bulk_and_reading.py::
                                         test_messages_before_the_offset_are_dropped
FetchRequestQueueUnitTest                tests/unit/client/consumer/test_consumed_partition.py::
                                         test_full_buffer_fetch_under_way_and_error_hold_fetching_up
DefaultStrategy-, ConsistStrategyUnitTest tests/unit/registry/test_assignors.py::
                                         test_every_partition_of_metaqs_own_cases_is_consumed
BaseOffset-, LocalOffsetStorageUnitTest  tests/services/consumer/test_offset_stores.py::
                                         test_file_after_any_crash_has_the_last_or_current_save
RecoverStorageManagerUnitTest            tests/unit/client/consumer/retry/test_retry_store.py::
                                         test_what_was_put_is_there_for_whoever_opens_file_next;
                                         tests/unit/client/consumer/retry/test_retry_store.py::
                                         test_a_message_put_again_replaces_itself_and_is_removed_once
OrderedMessagePartitionSelectorUnitTest  tests/unit/client/test_partitioner.py::
                                         test_equal_keys_go_to_one_partition;
                                         tests/unit/client/test_partitioner.py::
                                         test_a_partition_that_is_not_there_is_refused;
                                         tests/services/producer/test_ordered_producer.py::
                                         test_closed_topic_and_its_successor_are_waited_for
OrderedMessageSenderUnitTest             tests/unit/client/spooling/test_direct_or_spooled.py::
                                         test_direct_sending_goes_on_only_when_the_spool_is_empty;
                                         tests/unit/client/spooling/test_direct_or_spooled.py::
                                         test_whatever_fails_nothing_is_lost_repeated_or_reordered
OrderedLocalMessageStorageManagerUnitT.  tests/unit/client/spooling/test_spool.py::
                                         test_batches_come_out_in_order_in_which_they_went_in
AsyncMetaMessageProducerUnitTest         tests/unit/client/test_client.py::
                                         test_a_failed_future_holds_what_send_would_raise
SlidingWindowUnitTest                    tests/unit/client/test_client.py::
                                         test_caller_that_fills_the_buffer_waits_until_its_timeout
======================================== ==============================================================================
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import txmq
from tests.services.consumer.consuming import WAIT_S, take, values
from tests.services.loop_client import Connect
from txmq.client.consumer import partition_handover
from txmq.client.consumer.consumer import Consumer
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess


class Scene:
    """A topic and a group of one test."""

    def __init__(self, client: txmq.Client, name: str) -> None:
        self.client, self.topic, self.group = client, f"{name}-topic", f"{name}-group"
        self.producer = client.producer(timeout=30.0)

    def create(self, partitions: int = 1, **settings: Any) -> Scene:
        """Create the topic."""
        self.client.topics.create(self.topic, partitions, **settings)
        return self

    def send(self, count: int, key: bytes | None = b"k") -> list[bytes]:
        """Numbered messages; their values."""
        sent = [b"%d" % number for number in range(count)]
        self.producer.send_many(self.topic, [(key, value) for value in sent])
        return sent

    def consumer(self, group: str = "", *, topics: tuple[str, ...] = (), accept: Any = None, **words: Any) -> Consumer:
        """A consumer that does not take long for anything."""
        options = txmq.ConsumerOptions(
            accept=accept, retry_delay=0.0, heartbeat_interval=0.1, session_timeout=30.0, deferred_delay=0.0
        )
        return self.client.consumer(group or self.group, topics or (self.topic,), options=options, **words)

    def run(self, handle: Callable[[txmq.Message], object], is_over: Callable[[], bool], **words: Any) -> None:
        """A listener at work until it is over."""
        consumer = self.consumer(**words)
        thread = threading.Thread(target=lambda: consumer.run(handle, threads=2))
        thread.start()
        try:
            eventually(is_over, "the listener gets everything")
        finally:
            consumer.close()
            thread.join(WAIT_S)

    def saved(self) -> list[int | None]:
        """The group's offsets."""
        return [row["offset"] for row in self.client.groups.describe(self.group)["partitions"]]


@pytest.fixture
def scene(
    shared_broker: BrokerProcess, connect: Connect, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Scene]:
    """A client, and names that no other test uses. What a member has got it acknowledges, on a busy machine, too."""
    monkeypatch.setattr(partition_handover, "HAND_OVER_S", 60.0)
    with connect(shared_broker.address, timeout=30.0) as client:
        yield Scene(client, request.node.name.removeprefix("test_")[:150].rstrip("]").replace("[", "-"))


# --- producers and consumers -----------------------------------------------------------------------------------------


def test_five_messages_arrive_as_they_were(scene: Scene) -> None:
    scene.create()
    for number in range(5):
        scene.producer.send(scene.topic, b"%d" % number, b"key", headers={"h": b"%d" % number}, tag="red")
    with scene.consumer() as consumer:
        found = take(consumer, 5)
    assert [(m.value, m.key, m.headers["h"], m.tag, m.offset) for m in found] == [
        (b"%d" % number, b"key", b"%d" % number, "red", number) for number in range(5)
    ]


def test_filter_delivers_what_it_accepts_and_offset_passes_rest(scene: Scene) -> None:
    scene.create()
    scene.send(200)  # in one batch
    for number in range(200, 220):  # and one by one
        scene.producer.send(scene.topic, b"%d" % number, b"k")

    def is_even(message: txmq.Message) -> bool:
        return int(message.value or b"") % 2 == 0

    with scene.consumer(accept=is_even) as consumer:
        assert values(take(consumer, 110)) == [b"%d" % number for number in range(0, 220, 2)]
        eventually(lambda: scene.saved() == [220], "nothing of it comes again")


def test_filter_that_refuses_nearly_everything_does_not_look_like_nothing(scene: Scene) -> None:
    scene.create()
    scene.send(3000)
    with scene.consumer(accept=lambda message: message.value == b"2999") as consumer:
        assert values(consumer.poll(10, timeout=WAIT_S)) == [b"2999"]


def test_a_filter_that_fails_loses_nothing(scene: Scene) -> None:
    scene.create()
    scene.send(5)

    def fails_at_two(message: txmq.Message) -> bool:
        if message.value == b"2":
            raise ValueError("cannot tell")
        return message.value == b"3"

    with scene.consumer(accept=fails_at_two) as consumer:
        assert values(take(consumer, 2)) == [b"2", b"3"]


def test_six_members_joining_in_turn_get_each_message_once(scene: Scene) -> None:
    scene.create(partitions=12)
    consumers: list[Consumer] = []
    found: list[bytes] = []
    sent: list[bytes] = []

    def poll_all() -> None:
        for consumer in consumers:
            for message in consumer.poll(timeout=0):
                message.ack()
                found.append(message.value or b"")

    def is_shared() -> bool:
        poll_all()
        return sum(len(consumer.assignment) for consumer in consumers) == 12 and all(
            consumer.assignment for consumer in consumers
        )

    for number in range(6):
        consumers.append(scene.consumer())
        more = [b"%d.%d" % (number, each) for each in range(20 if number < 5 else 0)]
        sent += more
        scene.producer.send_many(scene.topic, [(value, value) for value in more])
        eventually(is_shared, "every member has its share")

    def is_complete() -> bool:
        poll_all()
        return len(found) >= len(sent)

    eventually(is_complete, "everything is there")
    for consumer in consumers:
        consumer.close()
    assert sorted(found) == sorted(sent)


def test_ten_producers_and_ten_groups_on_two_topics(scene: Scene) -> None:
    scene.create(partitions=2)
    other = f"{scene.topic}-2"
    scene.client.topics.create(other, partitions=2)

    def produce(number: int) -> None:
        producer = scene.client.producer(timeout=30.0)
        for each in range(10):
            headers = {"by": b"%d" % number} if each % 2 else None
            producer.send((scene.topic, other)[each % 2], b"%d.%d" % (number, each), b"%d" % each, headers=headers)

    with ThreadPoolExecutor(10) as threads:
        list(threads.map(produce, range(10)))
    expected = {b"%d.%d" % (number, each): (number if each % 2 else None) for number in range(10) for each in range(10)}
    for number in range(10):
        with scene.consumer(f"{scene.group}-{number}", topics=(scene.topic, other)) as consumer:
            found = {m.value: int(m.headers["by"]) if m.headers else None for m in take(consumer, 100)}
            assert found == expected


def test_blank_and_special_content_is_carried(scene: Scene) -> None:
    scene.create()
    contents = [b"", b"\x00\xff\r\n", "值 ✓".encode(), b"put t 0 1 A\r\nx"]
    for content in contents:
        scene.producer.send(scene.topic, content, content, headers={"": content, "名": b""}, tag="")
    with scene.consumer() as consumer:
        found = take(consumer, len(contents))
    assert [(m.value, m.key, dict(m.headers)) for m in found] == [
        (content, content, {"": content, "名": b""}) for content in contents
    ]


def test_blank_and_special_names_are_refused(scene: Scene) -> None:
    for name in ("", " ", "a b", "a/b", "..", "ü", "a\r\nb", "x" * 201):
        with pytest.raises(txmq.errors.LocalProtocolError):
            scene.client.topics.create(name)
        with pytest.raises(txmq.errors.LocalProtocolError):
            scene.producer.send(name, b"x")
        with pytest.raises(txmq.errors.ConfigError):
            scene.client.consumer(name, ["t"])
        with pytest.raises(txmq.errors.ConfigError):
            scene.client.consumer("g", [name])


def test_sending_to_a_topic_that_is_not_there_is_refused(scene: Scene) -> None:
    with pytest.raises(txmq.UnknownTopicError):
        scene.producer.send(scene.topic, b"x")
    with pytest.raises(txmq.UnknownTopicError):
        scene.producer.send_many(scene.topic, [(None, b"x")])
    assert scene.topic not in [topic.name for topic in scene.client.topics.list()]


def test_topic_that_is_not_there_brings_nothing_and_fails_nothing(scene: Scene) -> None:
    with scene.consumer() as consumer:
        assert consumer.poll(timeout=0.1) == []
        scene.create().send(1)
        assert values(take(consumer, 1)) == [b"0"]


def test_the_smallest_fetch_brings_a_whole_message(scene: Scene) -> None:
    scene.create().producer.send(scene.topic, bytes(100_000))
    scene.producer.send(scene.topic, b"second")
    (first,) = scene.client.fetch(scene.topic, 0, 0, max_bytes=1)
    assert first.value == bytes(100_000)
    assert values(scene.client.fetch(scene.topic, 0, 1, max_bytes=1)) == [b"second"]


def test_big_messages_and_many_messages_arrive_equal(scene: Scene) -> None:
    scene.create()
    big = [bytes([number]) * (2 << 20) for number in range(10)]
    for content in big:
        scene.producer.send(scene.topic, content)
    options = txmq.ConsumerOptions(buffer_size_bytes=64 << 10)  # far below one of them
    with scene.client.consumer(scene.group, [scene.topic], options=options) as consumer:
        assert values(take(consumer, 10)) == big
        many = scene.send(20_000)
        assert values(take(consumer, 20_000)) == many


def test_callbacks_are_told_in_order(scene: Scene) -> None:
    scene.create()
    told: list[int | None] = []
    for number in range(50):
        future = scene.producer.send_async(scene.topic, b"%d" % number, b"k")
        future.add_done_callback(lambda done: told.append(done.result().offset))
    scene.producer.flush()
    eventually(lambda: len(told) == 50, "all are told")
    assert told == list(range(50))


def test_a_topic_closed_for_publishing_or_for_reading(scene: Scene) -> None:
    scene.create(accept_publish=False)
    with pytest.raises(txmq.errors.TopicClosedError):
        scene.producer.send(scene.topic, b"x", timeout=2.0)
    scene.client.topics.alter(scene.topic, accept_publish=True, accept_read=False)
    assert scene.producer.send(scene.topic, b"x").offset == 0
    with pytest.raises(txmq.errors.TopicClosedError):
        scene.client.fetch(scene.topic, 0, 0)
    with scene.consumer() as consumer:
        assert consumer.poll(timeout=0.1) == []
        scene.client.topics.alter(scene.topic, accept_read=True)
        assert values(take(consumer, 1)) == [b"x"]


def test_the_latest_is_what_comes_after_the_consumer(scene: Scene) -> None:
    scene.create().send(10)
    with scene.consumer(start="latest") as consumer:
        eventually(lambda: len(consumer.assignment) == 1, "it has the partition")
        scene.producer.send(scene.topic, b"new")
        assert values(take(consumer, 1)) == [b"new"]


# --- retries ---------------------------------------------------------------------------------------------------------


def test_a_listener_that_fails_twice_gets_the_message_three_times(scene: Scene) -> None:
    sent = scene.create().send(3)
    seen: list[bytes] = []

    def handle(message: txmq.Message) -> None:
        seen.append(message.value or b"")
        if message.value == b"1" and seen.count(b"1") <= 2:
            raise ValueError("cannot")

    scene.run(handle, lambda: b"2" in seen)
    assert seen == [sent[0], sent[1], sent[1], sent[1], sent[2]]


def test_six_deliveries_in_place_then_from_the_retry_store(scene: Scene, tmp_path: Path) -> None:
    scene.create().send(2)
    seen: list[bytes] = []

    def handle(message: txmq.Message) -> None:
        seen.append(message.value or b"")
        if message.value == b"0" and seen.count(b"0") < 8:
            raise ValueError("cannot")

    scene.run(handle, lambda: len(seen) == 9, max_retries=5, retry_store=str(tmp_path / "retry.db"))
    assert seen[:6] == [b"0"] * 6
    assert Counter(seen) == {b"0": 8, b"1": 1}
    with scene.consumer(retry_store=str(tmp_path / "retry.db")) as consumer:
        eventually(lambda: len(consumer.assignment) == 1, "it has the partition")
        assert consumer.poll(timeout=0.1) == []


def test_five_messages_rejected_twice_are_fifteen_deliveries(scene: Scene) -> None:
    sent = scene.create().send(5)
    deliveries: Counter[bytes] = Counter()
    with scene.consumer() as consumer:
        while deliveries.total() < 15:
            for message in consumer.poll(timeout=WAIT_S):
                deliveries[message.value or b""] += 1
                if deliveries[message.value or b""] < 3:
                    message.reject("twice")
                else:
                    message.ack()
        assert consumer.poll(timeout=0.1) == []
    assert deliveries == dict.fromkeys(sent, 3)


def test_rejected_messages_come_again_in_their_order(scene: Scene) -> None:
    sent = scene.create().send(5)
    with scene.consumer() as consumer:
        taken: list[txmq.Message] = []
        while len(taken) < 5:
            taken += consumer.poll(timeout=WAIT_S)
        for message in taken:
            message.reject("not now")
        again = take(consumer, 5)
        assert consumer.poll(timeout=0.1) == []
    assert values(taken) == values(again) == sent


# --- the browser -----------------------------------------------------------------------------------------------------


def test_a_topic_is_browsed_whole(scene: Scene) -> None:
    scene.create(partitions=3)
    sent = [b"%d" % number for number in range(100)]
    scene.producer.send_many(scene.topic, [(value, value) for value in sent])
    found = list(scene.client.browse(scene.topic))
    assert sorted(values(found)) == sorted(sent)
    assert [(m.partition, m.offset) for m in found] == sorted((m.partition, m.offset) for m in found)
    assert [group["group"] for group in scene.client.groups.list() if group["group"] == scene.group] == []
