"""Partition selectors, against Kafka's own vectors where there are any."""

from __future__ import annotations

import pytest
from crc32c import crc32c

from txmq.client.partitioner import (
    FixedSelector,
    KafkaPartitionSelector,
    KeyHashSelector,
    RoundRobinSelector,
    checked,
    murmur2,
)
from txmq.errors import LocalProtocolError
from txmq.model import Message


def message(key: bytes | None) -> Message:
    return Message("t", -1, -1, key, b"v", {}, None, 0, None)


@pytest.mark.parametrize(
    ("key", "signed"),
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)  # Source: Apache Kafka, UtilsTest.testMurmur2
def test_murmur2_is_kafkas(key: bytes, signed: int) -> None:
    assert murmur2(key) == signed & 0xFFFFFFFF


def test_the_kafka_selector_takes_the_positive_part() -> None:
    assert KafkaPartitionSelector().select("t", 7, message(b"21")) == (-973932308 & 0x7FFFFFFF) % 7


def test_equal_keys_go_to_one_partition() -> None:
    selector = KeyHashSelector()
    assert {selector.select("t", 5, message(b"k")) for _ in range(9)} == {crc32c(b"k") % 5}


@pytest.mark.parametrize("selector", [KeyHashSelector(), KafkaPartitionSelector(), RoundRobinSelector()])
def test_without_a_key_messages_go_round(selector: KeyHashSelector) -> None:
    assert [selector.select("t", 3, message(None)) for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_round_robin_does_not_look_at_the_key() -> None:
    selector = RoundRobinSelector()
    assert [selector.select("t", 3, message(b"k")) for _ in range(3)] == [0, 1, 2]


def test_the_fixed_selector_is_fixed() -> None:
    assert FixedSelector(2).select("t", 3, message(b"k")) == 2


@pytest.mark.parametrize("partition", [-1, 3])
def test_a_partition_that_is_not_there_is_refused(partition: int) -> None:
    with pytest.raises(LocalProtocolError, match="partitions 0 to 2"):
        checked(partition, "t", 3)


def test_a_partition_that_is_no_number_is_refused() -> None:
    with pytest.raises(TypeError):
        checked("1", "t", 3)
