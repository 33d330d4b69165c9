"""Queues: the messages of each partition that wait for the target, and which thread may take which.

Theory of operation. The consumer's messages are put into the queue of their partition. A thread takes the next ones of
a queue, writes them to the target, and says so; meanwhile no other thread takes of that queue. A queue whose next
message is a statement is taken with that message alone, and then waits at the *barrier* of the statement: when all
queues that have the statement wait there, the thread that came last runs it, and all go on.

Partitions have no order between them, but each message says its *epoch*, some hundred changes of the binlog's order
(``publish.publisher``). Of a topic only epochs are handed out that are whole: all of their messages are in the queues,
in every partition, or applied. A partition has an epoch whole when it has a message of a later one; or when it has
reached where it ended after the epoch was seen in any partition (``unasked``, ``seen``): an idle partition holds nobody
up. So no partition passes another one by more than what is in memory, and all of it can be applied together.
If a batch fails, its queue goes on one message at a time, until the batch is passed. A message that is refused even so
is handed out again together with the next one, then with four, eight, and so on, and by itself again: a change after
it may take back what is in the way of another partition, which is further. If that does not help, all of the topic's
whole epochs are handed out to one thread (``take_together``): values may have gone round between rows of several
partitions, of which no one can go first. After them the partitions are where the source once was.

Invariants:
    * a queue hands out its messages in order, without a gap, each until it is done;
    * a queue at a barrier hands out nothing;
    * no message is handed out before its epoch is whole; every epoch becomes so;
    * memory is bounded, by messages and by bytes: the caller stops the delivery of a queue that ``add`` names.

Thread safety: any thread.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from txmq.binlog.errors import TargetError
from txmq.binlog.event_json import DDL, EPOCH_HEADER, OP_HEADER, TRUNCATE
from txmq.errors import FencedError
from txmq.model import Message, TopicPartition
from txmq.runtime.ports import Clock
from txmq.runtime.threads import Condition

QUEUE_MAX, QUEUE_BYTES_MAX = 2000, 16 << 20  # of a queue, and as much as one more poll brings
BATCH_BYTES_MAX = 4 << 20  # below the least max_allowed_packet that is common, also when escaped
IDLE_S = 1.0
AGAIN_S = 1.0  # between two asks, while what was asked for has not come
_EPOCH = re.compile(rb"\d{1,18}")
_STATEMENTS = frozenset({DDL.encode(), TRUNCATE.encode()})


class Seen(NamedTuple):
    """Where a partition ended after an epoch was seen in its topic."""

    epoch: int
    end: int


class PartitionQueue:
    """The messages of one partition, under one generation.

    Attributes:
        next: the offset of the next message; None if nothing was ever saved, before the first message.
        is_busy: a thread has messages of it.
        at: the statement at whose barrier it waits.
        epochs: of its messages.
        newest: the epoch of the newest message that it had.
        whole: all of its messages of this epoch, and of those before, have come.
        seen: where the partition ended after an epoch was seen.
        single_until: messages below this offset are handed out one by one.
        tries: how often the next message was refused, in this round of sizes.
        due_at: monotonic time before which nothing is handed out.
        refused_since: when the next message was refused first.
    """

    __slots__ = (
        "at",
        "due_at",
        "epochs",
        "generation",
        "is_busy",
        "is_paused",
        "messages",
        "newest",
        "next",
        "refused_since",
        "seen",
        "single_until",
        "size_bytes",
        "slot",
        "tries",
        "whole",
    )  # fmt: skip

    def __init__(self, slot: TopicPartition, generation: int, offset: int | None) -> None:
        self.slot, self.generation, self.next = slot, generation, offset
        self.messages: deque[Message] = deque()
        self.epochs: deque[int] = deque()
        self.newest, self.whole = 0, -1
        self.seen = Seen(-1, 0)
        self.size_bytes = 0
        self.is_busy = self.is_paused = False
        self.at: str | None = None
        self.single_until, self.due_at = 0, 0.0
        self.tries = 0
        self.refused_since: float | None = None

    def __str__(self) -> str:
        return f"{self.slot[0]}-{self.slot[1]}"

    @property
    def end(self) -> int:
        """The offset after all that has come."""
        return self.messages[-1].offset + 1 if self.messages else self.next or 0

    def append(self, message: Message) -> None:
        """Add the next message. One without a number, which somebody else has written, is of the epoch before it."""
        if self.next is None:
            self.next = message.offset
        self.messages.append(message)
        self.size_bytes += len(message.value or b"")
        number = message.headers.get(EPOCH_HEADER, b"")
        self.newest = max(self.newest, int(number) if _EPOCH.fullmatch(number) else 0)
        self.epochs.append(self.newest)
        self.note_whole(self.newest - 1)

    def note_whole(self, epoch: int) -> None:
        """Its messages of an epoch have come, perhaps also those of a later one."""
        self.whole = max(self.whole, epoch, self.seen.epoch if self.end >= self.seen.end else -1)

    def holds(self, part: float) -> bool:
        """Whether this part of what a queue may hold is in it, or more."""
        return len(self.messages) >= part * QUEUE_MAX or self.size_bytes >= part * QUEUE_BYTES_MAX


def is_statement(message: Message) -> bool:
    """Whether a message is of every partition, and is run once."""
    return message.headers.get(OP_HEADER) in _STATEMENTS


def _gone(queue: PartitionQueue, first: int, end: int) -> TargetError:
    return TargetError(
        f"{queue}: messages {first} to {end - 1} are gone: the topic's retention deleted them before they were "
        "applied. Begin the target anew from a snapshot"
    )


def _changes_of(queue: PartitionQueue, whole: int) -> list[Message]:
    """A queue's messages of whole epochs, before the first statement."""
    found: list[Message] = []
    for message, epoch in zip(queue.messages, queue.epochs, strict=True):
        if epoch > whole or is_statement(message):
            break
        found.append(message)
    return found


class PartitionQueues:
    """See the module's docstring.

    Args:
        batch_rows_max: messages that are handed out together.
    """

    def __init__(self, batch_rows_max: int, clock: Clock) -> None:
        self._rows_max, self._clock = batch_rows_max, clock
        self._changed = Condition()
        self._queues: dict[TopicPartition, PartitionQueue] = {}
        self._barriers: dict[str, dict[TopicPartition, PartitionQueue]] = {}
        self._said: dict[str, str] = {}
        self._awaited: dict[str, tuple[float, set[TopicPartition]]] = {}  # since when, and all that have it
        self._asked: dict[str, float] = {}  # when
        self._missing: dict[str, set[TopicPartition]] = {}  # of a topic, with messages, and not granted yet
        self._together: set[str] = set()  # topics of which one thread waits to have all
        self._turn = 0
        self._failure: BaseException | None = None
        self._is_stopped = False
        self._working = 0

    # --- the consumer's side -----------------------------------------------------------------------------------------

    def granted(self, slot: TopicPartition, generation: int, offset: int | None) -> None:
        """A partition was handed to this process, to go on at an offset.

        A partition that comes a second time was another process's meanwhile. What is in its queue is of no use, and its
        messages may still be on their way: the queues end, and the applier begins anew.
        """
        with self._changed:
            if slot in self._queues:
                self._fail(FencedError(f"{slot[0]}-{slot[1]} was another process's meanwhile"))
            else:
                self._queues[slot] = PartitionQueue(slot, generation, offset)
                self._missing.get(slot[0], set()).discard(slot)

    def goes_back(self, slot: TopicPartition, offset: int) -> None:
        """A partition that was granted begins at a lower offset, before its first message has come."""
        with self._changed:
            queue = self._queues[slot]
            queue.next, queue.whole, queue.seen = offset, -1, Seen(-1, 0)

    def add(self, messages: Iterable[Message]) -> list[TopicPartition]:
        """Append messages; returns partitions that are full now. Once the queues have ended, nothing is appended.

        Raises:
            TargetError: messages are missing: they were deleted before they were applied.
        """
        full = []
        with self._changed:
            if self._failure is not None:
                return []  # the poll that handed a partition out anew may have brought its messages, too
            for message in messages:
                queue = self._queues[message.topic, message.partition]
                if queue.next is not None and message.offset != queue.end:
                    raise _gone(queue, queue.end, message.offset)
                queue.append(message)
            for queue in self._queues.values():
                if queue.holds(1.0) and not queue.is_paused:
                    queue.is_paused = True
                    full.append(queue.slot)
                    if queue.epochs[0] == queue.newest:  # more than the reader gives one number
                        queue.note_whole(queue.newest)
            self._changed.notify_all()
        return full

    def with_room(self) -> list[TopicPartition]:
        """Partitions that were full, and are half empty now, or need more to hand out anything."""
        with self._changed:
            found = [
                queue
                for queue in self._queues.values()
                if queue.is_paused and (not queue.holds(0.5) or queue.epochs[0] > queue.whole)
            ]
            for queue in found:
                queue.is_paused = False
            return [queue.slot for queue in found]

    def unasked(self) -> dict[str, int]:
        """The topics of which it must be asked where the partitions end, each with the newest epoch seen before."""
        with self._changed:
            now, whole, waiting = self._clock.monotonic(), self._whole(), set[str]()
            coming, newest = set[str](), dict[str, int]()
            for queue in self._queues.values():
                topic = queue.slot[0]
                newest[topic] = max(newest.get(topic, 0), queue.newest)
                if queue.messages and queue.newest > whole[topic]:
                    waiting.add(topic)
                if queue.end < queue.seen.end:
                    coming.add(topic)
            due = {topic for topic in waiting if topic not in coming or self._asked.get(topic, now) + AGAIN_S <= now}
            self._asked |= dict.fromkeys(due, now)
            return {topic: newest[topic] for topic in due}

    def seen(self, topic: str, epoch: int, ends: Mapping[int, tuple[int, int]]) -> None:
        """A topic's partitions have begun and ended there, after an epoch was seen: all of it is before the ends.

        A partition that has messages and was not handed to this process yet is waited for.
        """
        with self._changed:
            self._missing[topic] = {
                (topic, number) for number, (start, end) in ends.items()
                if end > start and (topic, number) not in self._queues
            }  # fmt: skip
            for number, (start, end) in ends.items():
                queue = self._queues.get((topic, number))
                if queue is not None:
                    queue.seen = Seen(epoch, 0 if start == end or (queue.next is None and end <= start) else end)
                    queue.note_whole(-1)
            self._changed.notify_all()

    def not_passed(self, ends: Mapping[TopicPartition, int]) -> list[TopicPartition]:
        """The partitions of which not everything below these offsets is applied."""
        with self._changed:
            return [
                slot
                for slot, end in ends.items()
                if (queue := self._queues.get(slot)) is None or (queue.next or 0) < end
            ]

    def begin_at(self, starts: Mapping[TopicPartition, int]) -> None:
        """Partitions have no messages before these offsets any more, and none of them came lately.

        Raises:
            TargetError: messages are missing: they were deleted before they were applied.
        """
        with self._changed:
            for slot, start in starts.items():
                queue = self._queues.get(slot)
                if queue is None or queue.messages:
                    continue
                if queue.next is None:
                    queue.next = start
                elif queue.next < start:
                    raise _gone(queue, queue.next, start)

    def refuse_failed(self) -> None:
        """Raise what ended the queues, if anything did."""
        if self._failure is not None:
            raise self._failure

    def stop(self, timeout: float) -> bool:
        """Hand out nothing more; whether all threads ended in time."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._working == 0, timeout)

    # --- the side of the threads -------------------------------------------------------------------------------------

    def began(self, threads: int) -> None:
        """So many threads are about to take messages."""
        self._working += threads

    def ended(self, failure: BaseException | None) -> None:
        """A thread has ended, perhaps because of a failure, which ends all."""
        with self._changed:
            self._working -= 1
            if failure is not None:
                self._fail(failure)
            self._changed.notify_all()

    def take(self) -> tuple[PartitionQueue, list[Message]] | None:
        """Wait for messages of a queue that no thread has; None at the end."""
        with self._changed:
            while not self._is_stopped:
                now, whole = self._clock.monotonic(), self._whole()
                ready = [
                    queue
                    for queue in self._queues.values()
                    if queue.messages and not queue.is_busy and queue.at is None
                    and queue.epochs[0] <= whole[queue.slot[0]] and queue.slot[0] not in self._together
                ]  # fmt: skip
                due = [queue for queue in ready if queue.due_at <= now]
                if due:
                    self._turn += 1
                    queue = due[self._turn % len(due)]
                    queue.is_busy = True
                    return queue, self._batch(queue, whole[queue.slot[0]])
                wait_s = min((queue.due_at - now for queue in ready), default=IDLE_S)
                self._changed.wait(min(wait_s, IDLE_S))
        return None

    def _whole(self) -> dict[str, int]:
        """Of each topic the newest epoch of which all messages are here, or applied, in all partitions."""
        found: dict[str, int] = {}
        for queue in self._queues.values():
            topic = queue.slot[0]
            found[topic] = min(found.get(topic, queue.whole), queue.whole)
        return found | {topic: -1 for topic, missing in self._missing.items() if missing}

    def take_together(self, queue: PartitionQueue) -> list[tuple[PartitionQueue, list[Message]]]:
        """All messages of the whole epochs of a queue's topic, before a statement; empty if another thread has them.

        Waits until no other thread has any of the topic. Each queue is given back by ``done`` or ``again``.
        """
        topic = queue.slot[0]
        with self._changed:
            if topic in self._together:
                return []
            self._together.add(topic)
            of_topic = [other for other in self._queues.values() if other.slot[0] == topic]
            try:
                while any(other.is_busy for other in of_topic if other is not queue):
                    if self._is_stopped:
                        return []
                    self._changed.wait(IDLE_S)
                whole = self._whole()[topic]
                found = [(one, _changes_of(one, whole)) for one in of_topic if one.at is None]
            finally:
                self._together.discard(topic)
            together = [(one, messages) for one, messages in found if messages]
            for one, _ in together:
                one.is_busy = True
            return together

    def _batch(self, queue: PartitionQueue, whole: int) -> list[Message]:
        batch: list[Message] = []
        size = 0
        rows_max = self._rows_max
        if queue.messages[0].offset < queue.single_until:
            rows_max = min(1 << queue.tries, rows_max)
        for message, epoch in zip(queue.messages, queue.epochs, strict=True):
            size += len(message.value or b"")
            if batch and (len(batch) >= rows_max or size > BATCH_BYTES_MAX or is_statement(message) or epoch > whole):
                break
            batch.append(message)
            if is_statement(message):
                break
        return batch

    def done(self, queue: PartitionQueue, offset: int) -> list[Message]:
        """A queue's messages below an offset are in the target; returns them."""
        with self._changed:
            queue.is_busy, queue.refused_since, queue.due_at, queue.tries = False, None, 0.0, 0
            found = self._drop(queue, offset)
            self._changed.notify_all()
            return found

    def _drop(self, queue: PartitionQueue, offset: int) -> list[Message]:
        found = []
        while queue.messages and queue.messages[0].offset < offset:
            found.append(queue.messages.popleft())
            queue.epochs.popleft()
            queue.size_bytes -= len(found[-1].value or b"")
        queue.next = offset
        return found

    def refused_for(self, queue: PartitionQueue) -> float:
        """For how many seconds the target has refused a queue's next message; 0 at its first refusal."""
        with self._changed:
            now = self._clock.monotonic()
            if queue.refused_since is None:
                queue.refused_since = now
            return now - queue.refused_since

    def again(self, queue: PartitionQueue, pause_s: float) -> None:
        """Hand a queue's messages out again after a pause."""
        with self._changed:
            queue.is_busy, queue.due_at = False, self._clock.monotonic() + pause_s
            self._changed.notify_all()

    def refused(self, queue: PartitionQueue, count: int, pause_s: float) -> None:
        """Hand out another number of a queue's messages: so many were refused together.

        Args:
            pause_s: before a round of sizes begins again.
        """
        with self._changed:
            is_batch = queue.messages[0].offset >= queue.single_until
            if is_batch:
                queue.single_until = queue.messages[count - 1].offset + 1
            queue.tries = 0 if is_batch else queue.tries + 1
            is_round_over = not is_batch and len(self._batch(queue, self._whole()[queue.slot[0]])) <= count
            if is_round_over:
                queue.tries = 0
            queue.is_busy, queue.due_at = False, self._clock.monotonic() + (pause_s if is_round_over else 0.0)
            self._changed.notify_all()

    def arrive(
        self, queue: PartitionQueue, statement: str, wanted: set[TopicPartition], said: str
    ) -> list[PartitionQueue] | None:
        """A queue has reached a statement: all queues that have it, if this is the last one to come; else None.

        Args:
            statement: its id.
            wanted: the partitions that have it.
            said: what it is; the same in all of them.

        Raises:
            TargetError: another partition says something else.
        """
        with self._changed:
            queue.is_busy, queue.at = False, statement
            if self._said.setdefault(statement, said) != said:
                other = next(iter(self._barriers[statement].values()))
                raise TargetError(
                    f"{queue} has another statement of transaction {statement} than {other}: somebody else than the "
                    f"reader has written one of them; to pass over it, start again with --skip-ddl {statement}"
                )
            self._awaited.setdefault(statement, (self._clock.monotonic(), wanted))
            arrived = self._barriers.setdefault(statement, {})
            arrived[queue.slot] = queue
            return [arrived[slot] for slot in sorted(wanted)] if wanted <= arrived.keys() else None

    def waiting(self, seconds: float) -> dict[str, list[TopicPartition]]:
        """The statements that have waited for so long, each with the partitions that have not reached it."""
        with self._changed:
            before = self._clock.monotonic() - seconds
            return {
                statement: missing
                for statement, (since, wanted) in self._awaited.items()
                if since <= before and (missing := sorted(wanted - self._barriers[statement].keys()))
            }

    def held_up(self) -> dict[tuple[str, int], list[TopicPartition]]:
        """Topics of which messages are here and none may be handed out, with the oldest epoch of them.

        Each with the partitions that lack older ones; none are named where the reader has to say how far it has sent.
        """
        with self._changed:
            whole, oldest = self._whole(), dict[str, int]()
            for queue in self._queues.values():
                if queue.messages:
                    topic = queue.slot[0]
                    oldest[topic] = min(oldest.get(topic, queue.epochs[0]), queue.epochs[0])
            held_up = {topic: epoch for topic, epoch in oldest.items() if epoch > whole[topic]}
            found = {(topic, epoch): list(self._missing.get(topic, ())) for topic, epoch in held_up.items()}
            for queue in self._queues.values():
                epoch = held_up.get(queue.slot[0], -1)
                if queue.whole < epoch and queue.end < queue.seen.end:
                    found[queue.slot[0], epoch].append(queue.slot)
            return found

    def passed(self, queues: Iterable[PartitionQueue], statement: str) -> list[Message]:
        """The statement was run: the queues go on after it; returns its messages."""
        with self._changed:
            messages = [message for queue in queues for message in self._drop(queue, (queue.next or 0) + 1)]
            for queue in queues:
                queue.at = None
            self._barriers.pop(statement, None)
            self._said.pop(statement, None)
            self._awaited.pop(statement, None)
            self._changed.notify_all()
            return messages

    def _fail(self, failure: BaseException) -> None:
        self._failure = self._failure or failure
        self._is_stopped = True
        self._changed.notify_all()
