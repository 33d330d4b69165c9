"""Where a consumer goes on whose offset is out of range, or whose partition is damaged."""

from __future__ import annotations

import sys
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from tests.interrupts import Strike
from tests.logged import said
from tools.simulated.clock import SimClock
from txmq.client.consumer import fetcher
from txmq.client.consumer.consumed_partition import ConsumedPartition
from txmq.client.consumer.fetcher import (
    FETCH_AGAIN_S,
    FETCH_DAMAGED_S,
    REPORTED_AGAIN_S,
    ConsumerFetcher,
    _Fetch,
)
from txmq.errors import StorageError
from txmq.log import records
from txmq.log.batch import HEADER_SIZE, checksum, stamp, stored_crc
from txmq.model import PartitionRange
from txmq.runtime.logging import get_logger
from txmq.runtime.threads import Condition

SLOT = ("orders", 0)


@pytest.mark.parametrize(
    ("asked", "meanwhile", "expected"),
    [(10, 10, 50), (200, 200, 50), (10, 150, 150), (10, 60, 60)],
    ids=["retention passed it", "the log is another", "it went on past the end that was told", "it went on"],
)
def test_oldest_message_comes_next_unless_the_position_moved_meanwhile(
    asked: int, meanwhile: int, expected: int
) -> None:
    consumed = ConsumedPartition(SLOT, 1, asked, asked)

    def offsets(*_: object) -> PartitionRange:
        if meanwhile != asked:
            consumed.skip_to(meanwhile)
        return PartitionRange(*SLOT, 50, 100)

    client = SimpleNamespace(clock=SimClock(), offsets=offsets)
    fetching = ConsumerFetcher(client, None, Condition(), {SLOT: consumed}, 1 << 20, get_logger())  # type: ignore[arg-type]
    fetching._go_to_start(consumed, asked)
    assert (consumed.next_fetch, consumed.position) == (expected, expected)


def test_fetching_goes_on_behind_an_error_of_any_kind(caplog: pytest.LogCaptureFixture) -> None:
    """Found: the thread ended, and the consumer kept its partitions without ever getting a message."""
    waits: list[float] = []

    def wait(_: object, until: float) -> None:
        waits.append(until)
        if len(waits) == 1:
            raise MemoryError
        fetching._is_closed = True

    reconnecting: Any = SimpleNamespace(connect=lambda _: SimpleNamespace(wait=wait))
    client: Any = SimpleNamespace(clock=SimClock(), timeout=5.0)
    fetching = ConsumerFetcher(client, reconnecting, Condition(), {}, 1 << 20, get_logger())
    fetching._run()
    assert [len(waits), [line["event"] for line in said(caplog)]] == [2, ["the fetching thread failed; it goes on"]]


def test_an_interrupt_anywhere_starves_no_partition() -> None:
    """Found: a partition whose get was never sent was taken for one that waits for its answer."""
    number, is_struck = 0, True
    while is_struck:
        number += 1
        clock, strike, started = SimClock(), Strike(number, fetcher), dict[int, int]()
        partitions = {(topic, 0): ConsumedPartition((topic, 0), 1, 0, 0) for topic in ("a", "b")}

        def start(fetch: Any, *_: Any, started: dict[int, int] = started, **__: Any) -> None:
            started[id(fetch.consumed)] = fetch.number

        client, connection = SimpleNamespace(clock=clock), SimpleNamespace(start=start)
        fetching = ConsumerFetcher(client, None, Condition(), partitions, 1 << 20, get_logger())  # type: ignore[arg-type]
        sys.setprofile(strike)
        with suppress(KeyboardInterrupt):
            fetching.more(connection)  # type: ignore[arg-type]
        sys.setprofile(None)
        is_struck = strike.left <= 0
        clock.advance(FETCH_AGAIN_S)
        fetching.more(connection)  # type: ignore[arg-type]
        assert all(started.get(id(one)) == one.fetch for one in partitions.values()), f"struck at {number}"
    assert number > 10


def answer(*, damaged: int) -> bytes:
    """Three batches of one message each; the last byte of one of them is wrong."""
    chain = bytearray()
    for offset in range(3):
        made = records.encode([(b"key", b"value", (), 1000)])
        stamp(made, 7, 0, offset, stored_crc(made))
        made[-1] ^= offset == damaged
        chain += made
    return bytes(chain)


def test_damaged_batch_delays_nothing_before_it_and_is_reported_sparingly() -> None:
    clock, consumed = SimClock(), ConsumedPartition(SLOT, 1, 0, 0)
    forgotten: list[str] = []
    topics = SimpleNamespace(known=lambda _: SimpleNamespace(topic_id=7), forget=forgotten.append)
    logs: list[str] = []
    given: Any = (
        SimpleNamespace(clock=clock, topics=topics), SimpleNamespace(live=None), Condition(), {SLOT: consumed}, 1 << 20,
        SimpleNamespace(warning=lambda _, error, **_where: logs.append(error)),
    )  # fmt: skip
    fetching = ConsumerFetcher(*given)

    def answered(damaged: int) -> float:
        """Seconds until the next fetch."""
        consumed.fetch = 1
        fetching.answered(consumed, 1, 200, answer(damaged=damaged))
        return consumed.fetch_at - clock.monotonic()

    answered(1)
    assert (consumed.next_fetch, len(consumed.ahead.look(9)), logs, forgotten) == (1, 1, [], [])
    assert 0 < answered(1) < FETCH_DAMAGED_S  # the topic may have been made anew: its id is asked for, soon
    assert forgotten == ["orders"]
    for _ in range(3):
        assert answered(1) == pytest.approx(FETCH_DAMAGED_S)
    assert consumed.fetch_error is not None
    assert "txmq log verify" in consumed.fetch_error
    assert logs == [consumed.fetch_error.partition("; damaged")[0], consumed.fetch_error]
    clock.advance(REPORTED_AGAIN_S)
    answered(1)
    assert len(logs) == 3
    answered(-1)  # sound again
    assert (consumed.next_fetch, len(consumed.take(9, 0.0)), [*logs[3:]]) == (3, 3, [])
    assert not consumed.fetch_error


def test_answer_is_taken_behind_the_read_and_starves_nobody() -> None:
    """An event loop reads for all, and nothing that waits may stand in there."""
    clock, consumed = SimClock(), ConsumedPartition(SLOT, 1, 0, 0)
    asked: list[str] = []

    def fail(topic: str) -> None:
        asked.append(topic)
        raise MemoryError

    client = SimpleNamespace(clock=clock, topics=SimpleNamespace(known=fail))
    given: Any = (client, SimpleNamespace(live=None), Condition(), {SLOT: consumed}, 1 << 20, get_logger())
    fetching = ConsumerFetcher(*given)
    consumed.fetch = 1
    _Fetch(fetching, consumed, 1).answered(200, answer(damaged=3))
    assert asked == []
    assert fetching._waiter.nudged
    with pytest.raises(MemoryError):
        fetching._take_arrived()
    assert asked == [SLOT[0]]
    assert not fetching._waiter.nudged
    assert (consumed.fetch, consumed.fetch_at) == (0, clock.monotonic() + FETCH_AGAIN_S)


def malformed(offset: int, count: int = 3) -> bytearray:
    """A whole batch in its place, whose first record says another length than it has."""
    made = records.encode([(b"key", b"value", (), 1000)] * count)
    made[HEADER_SIZE] ^= 2
    made[17:21] = checksum(memoryview(made)[21:]).to_bytes(4, "big")
    stamp(made, 7, 0, offset, stored_crc(made))
    return made


def sound(offset: int) -> bytearray:
    made = records.encode([(b"key", b"value", (), 1000)])
    stamp(made, 7, 0, offset, stored_crc(made))
    return made


class _Partition:
    """A partition whose offsets 1 to 3 cannot be read, and what was made dead letters of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, passes: bool = True) -> None:
        self.clock, self.consumed = SimClock(), ConsumedPartition(SLOT, 1, 0, 0)
        self.dead: list[tuple[int, int]] = []
        self.failures = 0
        topics = SimpleNamespace(known=lambda _: SimpleNamespace(topic_id=7), forget=lambda _: None)
        given: Any = (
            SimpleNamespace(clock=self.clock, topics=topics), SimpleNamespace(live=None), Condition(),
            {SLOT: self.consumed}, 1 << 20, get_logger(), 0, self._dead_letter if passes else None,
        )  # fmt: skip
        self.fetching = ConsumerFetcher(*given)
        monkeypatch.setattr(fetcher, "start_daemon", lambda _, run: run())

    def _dead_letter(self, _: object, batch: records.RawBatch, reason: str) -> None:
        assert "at offset 1" in reason
        if self.failures:
            self.failures -= 1
            raise StorageError("away")
        self.dead.append((batch.base_offset, batch.end_offset))

    def fetch(self) -> None:
        """Fetch from where it is."""
        at = self.consumed.next_fetch
        chain = {0: sound(0) + malformed(1) + sound(4), 1: malformed(1) + sound(4), 4: sound(4)}.get(at, bytearray())
        self.consumed.fetch = 1
        self.fetching.answered(self.consumed, 1, 200, bytes(chain))

    def take(self) -> list[int]:
        """Offsets of what is delivered now; they are acknowledged."""
        taken = self.consumed.take(9, self.clock.monotonic())
        for message in taken:
            self.consumed.ack(message.offset)
        return [message.offset for message in taken]


def test_unreadable_batch_stops_its_partition_unless_it_is_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    stopping = _Partition(monkeypatch, passes=False)
    for _ in range(5):
        stopping.fetch()
        assert stopping.take() in ([0], [])
    assert (stopping.consumed.position, stopping.consumed.next_fetch) == (1, 1)


def test_unreadable_batch_becomes_one_dead_letter_and_is_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    partition = _Partition(monkeypatch)
    partition.failures = 2
    taken = []
    for _ in range(9):
        partition.fetch()
        taken += partition.take()
    assert (taken, partition.dead) == ([0, 4], [(1, 4)])
    assert (partition.consumed.position, partition.consumed.fetch_error) == (5, None)


def test_unreadable_batch_waits_for_what_was_fetched_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    partition = _Partition(monkeypatch)
    for _ in range(4):
        partition.fetch()
    assert partition.dead == []
    (first,) = partition.consumed.take(9, 0.0)
    for _ in range(2):
        partition.fetch()
    assert partition.dead == [(1, 4)]
    assert partition.consumed.position == 0  # the first one is in hand
    partition.consumed.ack(first.offset)
    assert partition.consumed.position == 4
