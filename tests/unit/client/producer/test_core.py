"""The producer's decisions against a model of the broker: order, no duplicates, no loss, honest errors."""

from __future__ import annotations

import random
from collections import deque

import pytest

from txmq.client.producer.core import Batch, BatchState, ProducerCore, ProducerLimits
from txmq.errors import (
    BrokerError,
    ConnectionLostError,
    DeliveryUnknownError,
    DiskFullError,
    FencedError,
    OverloadedError,
    RequestTimeoutError,
    SequenceError,
    TopicClosedError,
    UnavailableError,
    UnknownTopicError,
)
from txmq.log import records
from txmq.log.batch import HEADER

KEPT = 8


class ModelPartition:
    """What a broker keeps of one partition: the values, and the last batches of the producer."""

    def __init__(self) -> None:
        self.values: list[bytes] = []
        self.next = 0
        self.recent: deque[tuple[int, int, int]] = deque(maxlen=KEPT)


class ModelBroker:
    """Follows docs/protocol.md for ``put``: sequences, duplicates, refusals."""

    def __init__(self) -> None:
        self.session = 1
        self.logs: dict[int, list[bytes]] = {}
        self._partitions: dict[tuple[int, int], ModelPartition] = {}

    def put(self, partition: int, content: bytes, refusal: BrokerError | None) -> int:
        fields = HEADER.unpack_from(content)
        crc, producer, sequence, count = fields[4], fields[9], fields[11], fields[12]
        if producer != self.session:
            raise FencedError("")
        if refusal is not None:
            raise refusal
        state = self._partitions.setdefault((producer, partition), ModelPartition())
        log = self.logs.setdefault(partition, [])
        if sequence != state.next:
            for known, offset, known_crc in state.recent:
                if (known, known_crc) == (sequence, crc):
                    return offset
            raise SequenceError(f"{sequence}, not {state.next}")
        state.next = (sequence + count) & 0x7FFFFFFF
        state.recent.append((sequence, len(log), crc))
        base = len(log)
        log.extend(message.value or b"" for message in records.decode(content, "t", partition))
        return base


class CoreFixture:
    """One core, one broker, and a network that loses what it likes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        limits = ProducerLimits(linger_s=self.random.choice([0.0, 0.5]), batch_size_bytes=300, in_flight_max=3)
        self.core, self.broker = ProducerCore(limits), ModelBroker()
        self.requests: deque[tuple[Batch, int, bytes]] = deque()
        self.answers: deque[tuple[Batch, int, int | BrokerError]] = deque()
        self.is_up = False
        self.sent: dict[int, list[bytes]] = {0: [], 1: []}
        self.where: list[tuple[Batch, int, bytes]] = []
        self.finished: list[Batch] = []
        self.faults = True

    def send(self) -> None:
        partition = self.random.randrange(2)
        value = b"%d" % len(self.where)
        deadline = self.now + self.random.choice([2.0, 20.0, 200.0])
        if self.random.random() < 0.2:
            content = records.encode_values([(None, value)], 1)
            batch, number = self.core.add("t", partition, content, 1, self.now, deadline), 0
        else:
            batch, number = self.core.append("t", partition, (None, value, (), 1), self.now, deadline)
        self.sent[partition].append(value)
        self.where.append((batch, number, value))

    def pump(self) -> None:
        self.core.expire(self.now)
        given_out = self.core.poll(self.now)
        for batch in given_out:
            assert batch.content is not None
            assert batch.state is BatchState.IN_FLIGHT
            self.requests.append((batch, batch.transmission, bytes(batch.content)))
        for queue in {batch.queue for batch in given_out}:
            assert sum(batch.state is BatchState.IN_FLIGHT for batch in queue.batches) <= 3
        self.finished += self.core.take_finished()

    def refusal(self) -> BrokerError | None:
        if not self.faults or self.random.random() > 0.15:
            return None
        return self.random.choice(
            [TopicClosedError(""), DiskFullError(""), OverloadedError(""), UnavailableError(""), BrokerError("")]
        )

    def serve(self) -> None:
        batch, transmission, content = self.requests.popleft()
        try:
            result: int | BrokerError = self.broker.put(batch.queue.partition, content, self.refusal())
            if self.faults and self.random.random() < 0.05:
                result = UnavailableError("executed, and not said so")
        except BrokerError as error:
            result = error
        self.answers.append((batch, transmission, result))

    def answer(self) -> None:
        batch, transmission, result = self.answers.popleft()
        if isinstance(result, int):
            self.core.answered(batch, result)
        else:
            self.core.refused(batch, transmission, result, self.now)

    def disconnect(self) -> None:
        late = [answer for answer in self.answers if self.random.random() < 0.3]
        self.requests.clear()
        self.answers.clear()
        self.is_up = False
        self.core.disconnected()
        for batch, transmission, result in late:  # read before the loss, told after it
            if isinstance(result, int):
                self.core.answered(batch, result)
            else:
                self.core.refused(batch, transmission, result, self.now)

    def connect(self) -> None:
        if self.faults and self.random.random() < 0.1:
            self.broker.session += 1
        self.is_up = True
        self.core.connected(self.broker.session, 0, KEPT)

    def step(self) -> None:
        choice = self.random.random()
        if choice < 0.3 and len(self.where) < 150:
            self.send()
        elif choice < 0.6 and self.requests:
            self.serve()
        elif choice < 0.85 and self.answers:
            self.answer()
        elif choice < 0.9:
            self.now += self.random.choice([0.01, 0.6, 3.0])
        elif choice < 0.95 and self.is_up and self.faults and self.random.random() < 0.3:
            self.disconnect()
        self.keep_connected()
        self.pump()

    def keep_connected(self) -> None:
        if self.is_up and (self.core.needs_session or self.core.needs_connection):
            if self.core.needs_session:
                self.broker.session += 1
            self.disconnect()
        if not self.is_up:
            self.connect()

    def heal(self) -> None:
        self.faults = False
        self.core.close_open()
        for _ in range(20_000):
            if not self.core.unfinished_batches() and not self.core.buffered_bytes:
                self.finished += self.core.take_finished()
                return
            self.now += 0.01
            self.keep_connected()
            self.pump()
            if self.requests:
                self.serve()
            if self.answers:
                self.answer()
        raise AssertionError("the core does not come to rest")

    def check(self) -> None:
        assert len(self.finished) == len(set(map(id, self.finished))) == len({id(batch) for batch, _, _ in self.where})
        for partition, log in self.broker.logs.items():
            assert len(log) == len(set(log)), "a message is stored twice"
            rank = {value: number for number, value in enumerate(self.sent[partition])}
            assert [rank[value] for value in log] == sorted(rank[value] for value in log), "out of order"
        for batch, number, value in self.where:
            log = self.broker.logs.get(batch.queue.partition, [])
            if batch.base_offset is not None:
                assert log[batch.base_offset + number] == value
            else:
                assert batch.error is not None
                assert isinstance(batch.error, DeliveryUnknownError) or value not in log, batch.error


@pytest.mark.parametrize("block", range(10))
def test_whatever_network_and_broker_do_order_and_honesty_hold(block: int) -> None:
    for seed in range(block * 60, block * 60 + 60):
        world = CoreFixture(seed)
        try:
            for _ in range(600):
                world.step()
            world.heal()
            world.check()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_the_model_run_reaches_every_kind_of_end() -> None:
    """The property test would prove little if its worlds were all sunny."""
    missing = {"stored", "DeliveryUnknownError", "RequestTimeoutError", "TopicClosedError", "DiskFullError"}
    seeds = iter(range(100))
    while missing:
        world = CoreFixture(next(seeds))
        for _ in range(600):
            world.step()
        world.heal()
        missing -= {"stored" if batch.error is None else type(batch.error).__name__ for batch in world.finished}


# --- one test per sentence -------------------------------------------------------------------------------------------


def connected_core(**limits: object) -> ProducerCore:
    core = ProducerCore(ProducerLimits(**limits))  # type: ignore[arg-type]
    core.connected(7, 0, 8)
    return core


def add(core: ProducerCore, value: bytes = b"v", deadline: float = 100.0, now: float = 0.0) -> Batch:
    return core.add("t", 0, records.encode_values([(None, value)], 1), 1, now, deadline)


def sequence_of(batch: Batch) -> tuple[int, int, int]:
    assert batch.content is not None
    fields = HEADER.unpack_from(batch.content)
    return fields[9], fields[10], fields[11]


def test_batches_of_a_partition_are_numbered_densely_under_the_session() -> None:
    core = connected_core()
    first = core.append("t", 0, (None, b"a", (), 1), 0.0, 9.0)[0]
    assert core.append("t", 0, (None, b"b", (), 1), 0.0, 9.0) == (first, 1)
    core.poll(0.0)
    second = add(core)
    core.poll(0.0)
    assert (sequence_of(first), sequence_of(second)) == ((7, 0, 0), (7, 0, 2))


def test_lingering_batch_waits_for_company_until_its_time() -> None:
    core = connected_core(linger_s=1.0)
    batch, _ = core.append("t", 0, (None, b"a", (), 1), 0.0, 9.0)
    assert core.poll(0.5) == []
    assert core.next_wakeup() == 1.0
    assert core.append("t", 0, (None, b"b", (), 1), 0.5, 9.0) == (batch, 1)
    assert core.poll(1.0) == [batch]


def test_flush_ends_the_linger() -> None:
    core = connected_core(linger_s=1.0)
    batch, _ = core.append("t", 0, (None, b"a", (), 1), 0.0, 9.0)
    core.close_open()
    assert core.poll(0.0) == [batch]


def test_batch_beyond_the_size_limit_is_closed() -> None:
    core = connected_core(linger_s=1.0, batch_size_bytes=1024)
    first, _ = core.append("t", 0, (None, b"a" * 800, (), 1), 0.0, 9.0)
    second, number = core.append("t", 0, (None, b"b" * 800, (), 1), 0.0, 9.0)
    assert (second is first, number) == (False, 0)


def test_messages_with_distant_deadlines_do_not_share_a_fate() -> None:
    core = connected_core(linger_s=1.0)
    first, _ = core.append("t", 0, (None, b"a", (), 1), 0.0, 5.0)
    assert core.append("t", 0, (None, b"b", (), 1), 0.0, 60.0)[0] is not first


def test_the_sequence_wraps_behind_two_to_the_thirty_first() -> None:
    core = connected_core()
    add(core)
    queue = core.unfinished_batches()[0].queue
    queue.base_sequence = 0x7FFFFFFF
    second = add(core)
    core.poll(0.0)
    assert sequence_of(second) == (7, 0, 0)


def test_no_more_than_in_flight_max_go_unanswered() -> None:
    core = connected_core(in_flight_max=2)
    batches = [add(core) for _ in range(3)]
    assert core.poll(0.0) == batches[:2]
    core.answered(batches[0], 0)
    assert core.poll(0.0) == batches[2:]


def test_unanswered_batches_go_out_again_unchanged_after_a_lost_connection() -> None:
    core = connected_core()
    batches = [add(core, b"%d" % number) for number in range(3)]
    core.poll(0.0)
    before = [bytes(batch.content or b"") for batch in batches]
    core.disconnected()
    assert core.poll(0.0) == []
    core.connected(7, 0, 8)
    assert core.poll(0.0) == batches
    assert [bytes(batch.content or b"") for batch in batches] == before


def test_batches_of_a_lost_session_are_unknown_and_never_resent() -> None:
    core = connected_core(in_flight_max=1)
    sent, unsent = add(core), add(core)
    core.poll(0.0)
    core.disconnected()
    core.connected(8, 0, 8)
    assert core.take_finished() == [sent]
    assert isinstance(sent.error, DeliveryUnknownError)
    assert core.poll(0.0) == [unsent]
    assert sequence_of(unsent) == (8, 0, 0)


def test_a_dropped_batch_gives_its_number_to_the_next() -> None:
    core = connected_core()
    first, second = add(core), add(core)
    core.poll(0.0)
    core.refused(first, 1, TopicClosedError("closed"), 0.0)
    assert core.poll(0.0) == []  # the flight is not over: the second may still be refused
    core.refused(second, 1, SequenceError("gap"), 0.0)
    assert core.poll(0.0) == [second]
    assert sequence_of(second) == (7, 0, 0)
    assert [(batch, type(batch.error)) for batch in core.take_finished()] == [(first, TopicClosedError)]


def test_retried_batch_keeps_its_number_and_its_place() -> None:
    core = connected_core()
    first, second = add(core), add(core)
    core.poll(0.0)
    core.refused(first, 1, DiskFullError("full"), 0.0)
    core.refused(second, 1, SequenceError("gap"), 0.0)
    assert core.poll(0.001) == []
    assert core.next_wakeup() == pytest.approx(0.02)
    assert core.poll(0.02) == [first, second]
    assert (sequence_of(first)[2], sequence_of(second)[2]) == (0, 1)


def test_an_unexplained_sequence_error_asks_for_another_session() -> None:
    core = connected_core()
    batch = add(core)
    core.poll(0.0)
    core.refused(batch, 1, SequenceError("?"), 0.0)
    assert core.needs_session
    assert core.poll(0.0) == []
    core.disconnected()
    core.connected(8, 0, 8)
    assert core.poll(0.0) == [batch]  # it was refused: it is sent, as the new session's first


def test_topic_made_anew_under_its_name_is_numbered_from_zero() -> None:
    core = connected_core()
    add(core)
    core.answered(core.poll(0.0)[0], 0)
    batch = add(core)
    core.poll(0.0)
    assert sequence_of(batch)[2] == 1
    core.refused(batch, 1, SequenceError("0 is next"), 0.0)
    assert not core.needs_session
    assert core.poll(0.0) == [batch]
    assert sequence_of(batch)[2] == 0


def test_guessed_number_goes_alone_until_broker_has_taken_it() -> None:
    """A broker that lost an acknowledged batch (sync = never) expects the number that the second one would get."""
    core = connected_core()
    for offset in range(2):
        add(core)
        core.answered(core.poll(0.0)[0], offset)
    first, second = add(core, b"1"), add(core, b"2")
    assert core.poll(0.0) == [first, second]
    for batch in (first, second):
        core.refused(batch, 1, SequenceError("1 is next"), 0.0)
    assert core.poll(0.0) == [first]
    assert core.next_wakeup() > 0.0
    core.refused(first, 2, SequenceError("used for another batch"), 0.0)
    assert core.needs_session
    core.connected(2, 0, 8)
    assert core.poll(0.0) == [first, second]
    assert [sequence_of(batch)[2] for batch in (first, second)] == [0, 1]


def test_with_its_topic_the_numbers_of_a_partition_are_gone() -> None:
    core = connected_core()
    add(core)
    core.answered(core.poll(0.0)[0], 0)
    batch = add(core)
    core.poll(0.0)
    core.refused(batch, 1, UnknownTopicError("t"), 0.0)
    later = add(core)
    core.poll(0.0)
    assert isinstance(batch.error, UnknownTopicError)
    assert sequence_of(later)[2] == 0


def test_deadline_before_anything_was_sent_says_that_nothing_was_stored() -> None:
    core = ProducerCore(ProducerLimits())
    batch = add(core, deadline=1.0)
    core.expire(1.0, ConnectionLostError("refused"))
    assert isinstance(batch.error, ConnectionLostError)
    assert "nothing was stored" in str(batch.error)
    core.connected(7, 0, 8)
    assert core.poll(1.0) == []


def test_missed_deadline_is_unknown_and_later_batches_stay_behind() -> None:
    core = connected_core()
    first = add(core, deadline=1.0)
    core.poll(0.0)
    core.expire(1.0)
    assert isinstance(first.error, DeliveryUnknownError)
    second = add(core)
    core.disconnected()
    core.connected(7, 0, 8)
    assert core.poll(1.0) == [first, second]
    core.answered(first, 5)
    core.answered(second, 6)
    assert (first.base_offset, second.base_offset) == (None, 6)
    assert core.take_finished() == [first, second]


def test_refusal_of_first_transmission_heard_after_second_counts_for_nothing() -> None:
    core = connected_core()
    batch = add(core)
    core.poll(0.0)
    core.disconnected()
    core.connected(7, 0, 8)
    core.poll(0.0)
    core.refused(batch, 1, TopicClosedError(""), 0.0)
    assert batch.error is None
    core.answered(batch, 3)
    assert batch.base_offset == 3


def test_unavailable_says_nothing_about_the_fate() -> None:
    core = connected_core()
    batch = add(core, deadline=1.0)
    core.poll(0.0)
    core.refused(batch, 1, UnavailableError(""), 0.0)
    core.expire(1.0)
    assert isinstance(batch.error, DeliveryUnknownError)


def test_memory_is_given_back_with_the_last_batch() -> None:
    core = connected_core()
    batches = [add(core), core.append("t", 1, (b"k", b"v", [("h", b"x")], 1), 0.0, 9.0)[0]]
    assert core.buffered_bytes > 0
    core.poll(0.0)
    for batch in batches:
        core.answered(batch, 0)
    assert (core.buffered_bytes, core.unfinished) == (0, 0)


def test_abort_finishes_everything_and_tells_apart_what_was_sent() -> None:
    core = connected_core(in_flight_max=1)
    sent, unsent = add(core), add(core)
    core.poll(0.0)
    core.abort("closed")
    assert (type(sent.error), type(unsent.error)) == (DeliveryUnknownError, RequestTimeoutError)
    assert core.buffered_bytes == 0
