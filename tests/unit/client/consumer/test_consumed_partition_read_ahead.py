"""What is fetched ahead: opened when its turn comes, counted while it waits, freed when it is delivered."""

from __future__ import annotations

import gc

import pytest

from txmq.client.consumer.consumed_partition import ReadAhead
from txmq.log import records
from txmq.model import Message

from .test_consumed_partition import message, raw_batch


def take(ahead: ReadAhead, count: int) -> list[int]:
    """Deliver some messages; their offsets."""
    several = ahead.look(count)
    ahead.at += len(several)
    ahead.let_go()
    return [message.offset for message in several]


def test_batches_are_opened_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    decode = records.decode_batch

    def counted(batch: records.RawBatch, topic: str, partition: int) -> list[Message]:
        opened.append(batch.base_offset)
        return decode(batch, topic, partition)

    monkeypatch.setattr(records, "decode_batch", counted)
    ahead = ReadAhead(("t", 0))
    ahead.add([message(0), message(1)], [raw_batch(2), raw_batch(3)])
    assert take(ahead, 1) == [0]
    assert take(ahead, 9) == [1]  # of one batch at most
    assert opened == []
    assert take(ahead, 9) == [2]
    assert opened == [2]
    assert take(ahead, 9) == [3]
    assert (take(ahead, 9), ahead.is_empty, opened) == ([], True, [2, 3])


def test_looking_delivers_nothing() -> None:
    ahead = ReadAhead(("t", 0))
    ahead.add([message(0)], [])
    assert [one.offset for one in ahead.look(5)] == [one.offset for one in ahead.look(5)] == [0]
    assert not ahead.is_empty


def test_size_counts_a_batch_until_all_of_it_is_delivered() -> None:
    ahead = ReadAhead(("t", 0))
    assert ahead.size_bytes == 0
    ahead.add([message(0), message(1)], [raw_batch(2)])
    full = ahead.size_bytes
    take(ahead, 1)
    assert ahead.size_bytes == full
    take(ahead, 1)
    rest = ahead.size_bytes
    assert 0 < rest < full
    take(ahead, 1)
    assert ahead.size_bytes == 0


def test_nothing_that_was_delivered_is_held() -> None:
    ahead = ReadAhead(("t", 0))
    buffer = bytearray(raw_batch(0).content)
    ahead.add([], [raw_batch(0)._replace(content=memoryview(buffer))])
    [kept] = ahead.look(1)
    ahead.at += 1
    ahead.let_go()
    gc.collect()
    buffer.clear()  # BufferError while anything looks at it: a message that is kept holds its own bytes alone
    assert (kept.value, ahead.open) == (b"v", [])


def test_clear_forgets_damage_too() -> None:
    ahead = ReadAhead(("t", 0))
    ahead.add([], [raw_batch(4, count=3), raw_batch(7)])
    assert ahead.look(1) == []
    assert (ahead.damaged_at, ahead.size_bytes, ahead.is_empty) == (4, 0, True)
    ahead.clear()
    assert ahead.damaged_at is None
