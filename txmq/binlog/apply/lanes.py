"""Lanes: the messages of each partition that wait for the target, and which thread may take which.

Theory of operation. The consumer's messages are put into the lane of their partition. A thread takes the next ones of a
lane, writes them to the target, and says so; meanwhile no other thread takes of that lane. A lane whose next message
is a statement is taken with that message alone, and then waits at the *barrier* of the statement: when all lanes that
have the statement wait there, the thread that came last runs it, and all go on.

If a batch fails, its lane goes on one message at a time, until the batch is passed.

Invariants:
    * a lane hands out its messages in order, without a gap, each until it is done;
    * a lane at a barrier hands out nothing;
    * memory is bounded, by messages and by bytes: the caller stops the delivery of a lane that ``add`` names.

Thread safety: any thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from txmq.binlog.errors import TargetError
from txmq.binlog.event_json import DDL, OP_HEADER, TRUNCATE
from txmq.errors import FencedError
from txmq.model import Message, TopicPartition
from txmq.runtime.ports import Clock
from txmq.runtime.threads import Condition

QUEUE_MAX, QUEUE_BYTES_MAX = 2000, 16 << 20  # of a lane, and as much as one more poll brings
BATCH_BYTES_MAX = 4 << 20  # below the least max_allowed_packet that is common, also when escaped
IDLE_S = 1.0
_STATEMENTS = frozenset({DDL.encode(), TRUNCATE.encode()})


class Lane:
    """The messages of one partition, under one generation.

    Attributes:
        next: the offset of the next message; None if nothing was ever saved, before the first message.
        is_busy: a thread has messages of it.
        at: the statement at whose barrier it waits.
        single_until: messages below this offset are handed out one by one.
        due_at: monotonic time before which nothing is handed out.
        refused_since: when the next message was refused first.
    """

    __slots__ = (
        "at", "due_at", "generation", "is_busy", "is_paused", "next", "queue", "queue_bytes",
        "refused_since", "single_until", "slot",
    )  # fmt: skip

    def __init__(self, slot: TopicPartition, generation: int, offset: int | None) -> None:
        self.slot, self.generation, self.next = slot, generation, offset
        self.queue: deque[Message] = deque()
        self.queue_bytes = 0
        self.is_busy = self.is_paused = False
        self.at: str | None = None
        self.single_until, self.due_at = 0, 0.0
        self.refused_since: float | None = None

    def __str__(self) -> str:
        return f"{self.slot[0]}-{self.slot[1]}"

    def holds(self, part: float) -> bool:
        """Whether this part of what a lane may hold is in it, or more."""
        return len(self.queue) >= part * QUEUE_MAX or self.queue_bytes >= part * QUEUE_BYTES_MAX


def is_statement(message: Message) -> bool:
    """Whether a message is of every partition, and is run once."""
    return message.headers.get(OP_HEADER) in _STATEMENTS


class Lanes:
    """See the module's docstring.

    Args:
        batch_rows_max: messages that are handed out together.
    """

    def __init__(self, batch_rows_max: int, clock: Clock) -> None:
        self._rows_max, self._clock = batch_rows_max, clock
        self._changed = Condition()
        self._lanes: dict[TopicPartition, Lane] = {}
        self._barriers: dict[str, dict[TopicPartition, Lane]] = {}
        self._turn = 0
        self._failure: BaseException | None = None
        self._is_stopped = False
        self._working = 0

    # --- the consumer's side -----------------------------------------------------------------------------------------

    def granted(self, slot: TopicPartition, generation: int, offset: int | None) -> None:
        """A partition was handed to this process, to go on at an offset.

        A partition that comes a second time was another process's meanwhile. What is in its lane is of no use any more,
        and its messages may still be on their way: the lanes end, and the applier begins anew.
        """
        with self._changed:
            if slot in self._lanes:
                self._fail(FencedError(f"{slot[0]}-{slot[1]} was another process's meanwhile"))
            else:
                self._lanes[slot] = Lane(slot, generation, offset)

    def add(self, messages: Iterable[Message]) -> list[TopicPartition]:
        """Append messages; returns partitions that are full now.

        Raises:
            TargetError: messages are missing: they were deleted before they were applied.
        """
        full = []
        with self._changed:
            for message in messages:
                lane = self._lanes[message.topic, message.partition]
                end = lane.queue[-1].offset + 1 if lane.queue else lane.next
                if end is not None and message.offset != end:
                    raise TargetError(
                        f"{lane}: messages {end} to {message.offset - 1} are gone: the topic's retention deleted them "
                        "before they were applied. Begin the target anew from a snapshot"
                    )
                if lane.next is None:
                    lane.next = message.offset
                lane.queue.append(message)
                lane.queue_bytes += len(message.value or b"")
            for lane in self._lanes.values():
                if lane.holds(1.0) and not lane.is_paused:
                    lane.is_paused = True
                    full.append(lane.slot)
            self._changed.notify_all()
        return full

    def with_room(self) -> list[TopicPartition]:
        """Partitions that were full, and are half empty now."""
        with self._changed:
            found = [lane for lane in self._lanes.values() if lane.is_paused and not lane.holds(0.5)]
            for lane in found:
                lane.is_paused = False
            return [lane.slot for lane in found]

    def has_passed(self, ends: dict[TopicPartition, int]) -> bool:
        """Whether everything below these offsets is applied."""
        with self._changed:
            return all(
                (lane := self._lanes.get(slot)) is not None and (lane.next or 0) >= end for slot, end in ends.items()
            )

    def refuse_failed(self) -> None:
        """Raise what ended the lanes, if anything did."""
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

    def take(self) -> tuple[Lane, list[Message]] | None:
        """Wait for messages of a lane that no thread has; None at the end."""
        with self._changed:
            while not self._is_stopped:
                now = self._clock.monotonic()
                ready = [lane for lane in self._lanes.values() if lane.queue and not lane.is_busy and lane.at is None]
                due = [lane for lane in ready if lane.due_at <= now]
                if due:
                    self._turn += 1
                    lane = due[self._turn % len(due)]
                    lane.is_busy = True
                    return lane, self._batch(lane)
                wait_s = min((lane.due_at - now for lane in ready), default=IDLE_S)
                self._changed.wait(min(wait_s, IDLE_S))
        return None

    def _batch(self, lane: Lane) -> list[Message]:
        batch: list[Message] = []
        size = 0
        rows_max = 1 if lane.queue[0].offset < lane.single_until else self._rows_max
        for message in lane.queue:
            size += len(message.value or b"")
            if batch and (len(batch) >= rows_max or size > BATCH_BYTES_MAX or is_statement(message)):
                break
            batch.append(message)
            if is_statement(message):
                break
        return batch

    def done(self, lane: Lane, offset: int) -> list[Message]:
        """A lane's messages below an offset are in the target; returns them."""
        with self._changed:
            lane.is_busy, lane.refused_since, lane.due_at = False, None, 0.0
            found = self._drop(lane, offset)
            self._changed.notify_all()
            return found

    def _drop(self, lane: Lane, offset: int) -> list[Message]:
        found = []
        while lane.queue and lane.queue[0].offset < offset:
            found.append(lane.queue.popleft())
            lane.queue_bytes -= len(found[-1].value or b"")
        lane.next = offset
        return found

    def refused_for(self, lane: Lane) -> float:
        """For how many seconds the target has refused a lane's next message; 0 at its first refusal."""
        with self._changed:
            now = self._clock.monotonic()
            if lane.refused_since is None:
                lane.refused_since = now
            return now - lane.refused_since

    def again(self, lane: Lane, pause_s: float, *, single_until: int = 0) -> None:
        """Hand a lane's messages out again after a pause.

        Args:
            single_until: one by one up to this offset.
        """
        with self._changed:
            lane.is_busy, lane.due_at = False, self._clock.monotonic() + pause_s
            lane.single_until = max(lane.single_until, single_until)
            self._changed.notify_all()

    def arrive(self, lane: Lane, statement: str, wanted: set[TopicPartition]) -> list[Lane] | None:
        """A lane has reached a statement: all lanes that have it, if this is the last one to come; else None.

        Args:
            statement: its id.
            wanted: the partitions that have it.
        """
        with self._changed:
            lane.is_busy, lane.at = False, statement
            arrived = self._barriers.setdefault(statement, {})
            arrived[lane.slot] = lane
            return [arrived[slot] for slot in sorted(wanted)] if wanted <= arrived.keys() else None

    def passed(self, lanes: Iterable[Lane], statement: str) -> list[Message]:
        """The statement was run: the lanes go on behind it; returns its messages."""
        with self._changed:
            messages = [message for lane in lanes for message in self._drop(lane, (lane.next or 0) + 1)]
            for lane in lanes:
                lane.at = None
            self._barriers.pop(statement, None)
            self._changed.notify_all()
            return messages

    def _fail(self, failure: BaseException) -> None:
        self._failure = self._failure or failure
        self._is_stopped = True
        self._changed.notify_all()
