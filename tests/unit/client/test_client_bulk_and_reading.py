"""Many messages at once, reading and addresses, on a scripted broker."""

from __future__ import annotations

from collections import deque

import pytest

import txmq
from tests.unit.client.scripted import ScriptedBroker
from txmq.addresses import parse_bootstrap
from txmq.client.client import Client
from txmq.client.partitioner import KafkaPartitionSelector, PartitionSelector
from txmq.client.producer.bulk import SLICE_COUNT_MAX, SendResults
from txmq.client.reading import PAGE_MESSAGES
from txmq.errors import (
    ConfigError,
    ConnectionLostError,
    InvalidBatchError,
    TooLargeError,
    TopicClosedError,
)
from txmq.model import Message


def values(messages: list[Message]) -> list[bytes | None]:
    return [message.value for message in messages]


# --- send_many -------------------------------------------------------------------------------------------------------


def test_many_keep_their_partition_order_and_know_their_places(client: Client) -> None:
    count = 2 * SLICE_COUNT_MAX + 17
    pairs = [(b"%d" % (number % 5), b"%d" % number) for number in range(count)]
    results = client.producer().send_many("t", pairs)
    stored = {(m.partition, m.offset): m.value for m in client.browse("t")}
    assert isinstance(results, SendResults)
    assert [stored[result.partition, result.offset] for result in results] == [value for _, value in pairs]  # type: ignore[index]
    assert [results[i] for i in (0, 5000, count - 1, -1)] == [list(results)[i] for i in (0, 5000, count - 1, -1)]
    assert results[3:6] == list(results)[3:6]
    assert (len(results), len(stored)) == (count, count)
    with pytest.raises(IndexError):
        results[count]


@pytest.mark.parametrize("selector", [None, KafkaPartitionSelector()])
def test_messages_without_key_fill_batches_over_many_partitions(
    client: Client, broker: ScriptedBroker, selector: PartitionSelector | None
) -> None:
    """Found: each of thousands of partitions took a batch of one message."""
    broker.partitions = 5000
    producer = client.producer(partition_selector=selector, linger_ms=1000, batch_size_bytes=16 << 10)
    futures = [producer.send_async("t", b"v" * 100) for _ in range(1000)]
    producer.flush()
    assert len({future.result().partition for future in futures}) < 12
    assert broker.verbs.count("put") < 200  # at least one a partition


def test_messages_without_key_take_turns_if_each_is_waited_for(client: Client) -> None:
    producer = client.producer()
    assert [producer.send("t", b"v").partition for _ in range(5)] == [0, 1, 0, 1, 0]


def test_many_go_where_one_would(client: Client) -> None:
    producer = client.producer()
    pairs: list[tuple[bytes | None, bytes]] = [(b"%d" % number, b"v") for number in range(50)]
    many = producer.send_many("t", pairs)
    assert [result.partition for result in many] == [producer.send("t", v, key=k).partition for k, v in pairs]


def test_large_messages_are_cut_into_batches_the_broker_takes(client: Client) -> None:
    producer = client.producer()
    producer.send("t", b"v", partition=0)
    results = producer.send_many("t", [(b"k", b"x" * 400_000) for _ in range(8)])
    assert [result.offset for result in results] == list(range(results[0].offset, results[0].offset + 8))  # type: ignore[arg-type, operator]
    with pytest.raises(TooLargeError):
        producer.send_many("t", [(b"k", b"x" * (2 << 20))])


def test_many_survive_lost_answers(broker: ScriptedBroker, client: Client) -> None:
    broker.lose_answer = {"put": 3}
    pairs: list[tuple[bytes | None, bytes]] = [(b"%d" % (n % 7), b"%d" % n) for n in range(10_000)]
    results = client.producer().send_many("t", pairs)
    assert len({(result.partition, result.offset) for result in results}) == sum(broker.ends.values()) == 10_000


def test_failure_among_many_is_raised_with_the_number_stored(broker: ScriptedBroker, client: Client) -> None:
    producer = client.producer()
    producer.send("t", b"v")
    broker.faults["put"] = deque([TopicClosedError("closed")])
    with pytest.raises(TopicClosedError) as caught:
        producer.send_many("t", [(b"%d" % n, b"v") for n in range(100)])
    stored = sum(broker.ends.values()) - 1
    assert caught.value.__notes__ == [f"{stored} of 100 messages were acknowledged; failed: t-0"]
    assert 0 < stored < 100


def test_none_at_all_is_no_request(broker: ScriptedBroker, client: Client) -> None:
    assert list(client.producer().send_many("t", [])) == []
    assert "put" not in broker.verbs


@pytest.mark.parametrize("pair", [(b"k", "text"), ("text", b"v"), (b"k", None)])
def test_many_are_checked_as_one_is(client: Client, pair: tuple[bytes, bytes]) -> None:
    with pytest.raises(TypeError):
        client.producer().send_many("t", [pair])


@pytest.mark.parametrize("compression", ["gzip", "lz4", "zstd"])
def test_compressed_batches_come_back_as_they_were(broker: ScriptedBroker, client: Client, compression: str) -> None:
    producer = client.producer(compression=compression)
    producer.send_many("t", [(b"k", b"x" * 100)] * 100)
    producer.send("t", b"y" * 1000, key=b"k")
    assert sorted(map(len, values(list(client.browse("t"))))) == [100] * 100 + [1000]  # type: ignore[arg-type]
    assert sum(map(len, broker.logs.values())) < 2000


# --- reading ---------------------------------------------------------------------------------------------------------


def test_messages_before_the_offset_are_dropped(client: Client) -> None:
    producer = client.producer()
    producer.send_many("t", [(b"k", b"%d" % n) for n in range(10)])
    partition = producer.send("t", b"10", key=b"k").partition
    assert values(client.fetch("t", partition, 4)) == [b"%d" % n for n in range(4, 11)]


def test_nothing_new_is_an_empty_list_after_the_wait(broker: ScriptedBroker, client: Client) -> None:
    assert client.fetch("t", 0, 0, timeout=0) == []
    assert client.fetch_raw("t", 0, 0, timeout=0) == b""


def test_who_cannot_connect_is_told_how_to_start_a_broker(broker: ScriptedBroker) -> None:
    broker.connections_refused = 10
    with pytest.raises(ConnectionLostError, match="refused; is a broker running there"):
        txmq.connect("txmq://host:1", timeout=0.1)


def test_damage_on_the_way_is_found(broker: ScriptedBroker, client: Client) -> None:
    client.producer().send("t", b"value", partition=0)
    for position in range(len(broker.logs[0])):
        broker.logs[0][position] ^= 1
        with pytest.raises(InvalidBatchError, match="txmq log verify"):
            client.fetch("t", 0, 0)
        broker.logs[0][position] ^= 1


@pytest.mark.parametrize("end", [1, PAGE_MESSAGES - 1, PAGE_MESSAGES, PAGE_MESSAGES + 1])
def test_browse_stops_at_an_end_inside_an_answer(broker: ScriptedBroker, client: Client, end: int) -> None:
    producer = client.producer()
    for number in range(2 * PAGE_MESSAGES):
        producer.send("t", b"%d" % number, partition=0)
    broker.ends[0] = end  # the others came when it had been asked for
    pages = list(client.browse_pages("t"))
    assert [message.offset for page in pages for message in page] == list(range(end))
    assert max(map(len, pages)) <= PAGE_MESSAGES


def test_what_is_sound_is_read_before_the_damage_is_told(broker: ScriptedBroker, client: Client) -> None:
    producer = client.producer()
    producer.send("t", b"sound", partition=0)
    end = len(broker.logs[0])
    producer.send("t", b"damaged", partition=0)
    broker.logs[0][-2] ^= 1
    assert values(client.fetch("t", 0, 0)) == [b"sound"]
    browsing = client.browse("t")
    assert next(browsing).value == b"sound"
    with pytest.raises(InvalidBatchError, match="at offset 1"):
        next(browsing)
    del broker.logs[0][end:]


def test_browse_ends_at_what_was_there_when_it_began(client: Client) -> None:
    producer = client.producer()
    producer.send("t", b"1", partition=0)
    browsing = client.browse("t")
    first = next(browsing)
    producer.send("t", b"2", partition=0)
    assert [first.value, *values(list(browsing))] == [b"1"]


def test_offsets_are_told(client: Client) -> None:
    client.producer().send("t", b"1", partition=1)
    assert client.offsets("t", 1) == txmq.PartitionRange("t", 1, 0, 1)
    assert client.offset_for("t", 1, 12345) == 1


def test_reads_have_a_connection_of_their_own(broker: ScriptedBroker, client: Client) -> None:
    client.ping()
    client.fetch("t", 0, 0, timeout=0)
    assert len(broker.streams) == 2


def test_fields_of_a_newer_broker_are_passed_over(client: Client) -> None:
    assert client.topics.describe("t") == txmq.TopicConfig("t", partitions=2)


# --- addresses, settings, names --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("txmq://host", [("host", 8123)]),
        ("txmq://host:1/", [("host", 1)]),
        ("txmq://a:1,b", [("a", 1), ("b", 8123)]),
        ("txmq://[::1]:9", [("::1", 9)]),
        ("txmq://[::1]", [("::1", 8123)]),
    ],
)
def test_addresses_are_read(text: str, addresses: list[tuple[str, int]]) -> None:
    assert parse_bootstrap(text) == addresses


@pytest.mark.parametrize(
    "text", ["", "host:1", "txmq://", "txmq://a:x", "txmq://a:1,", "kafka://a:1", "txmq://a:70000"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="txmq://HOST"):
        parse_bootstrap(text)


@pytest.mark.parametrize(
    "settings", [{"linger_ms": -1}, {"batch_size_bytes": 0}, {"max_in_flight": 65}, {"compression": "rar"}]
)
def test_settings_out_of_range_are_refused(client: Client, settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        client.producer(**settings)  # type: ignore[arg-type]


def test_connect_says_at_once_that_nobody_is_there(broker: ScriptedBroker) -> None:
    broker.connections_refused = 1
    with pytest.raises(ConnectionLostError):
        txmq.connect("txmq://host:1")
