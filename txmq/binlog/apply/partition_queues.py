"""Queues: the messages of each partition that wait for the target, and which thread may take which.

Theory of operation. The consumer's messages are put into the queue of their partition. A thread takes the next ones of
a queue, writes them to the target, and says so; meanwhile no other thread takes of that queue. A queue whose next
message is a statement is taken with that message alone, and then waits at the *barrier* of the statement: when all
queues that have the statement wait there, the thread that came last runs it, and all go on.

Partitions are written at the same time, and the topic's *cuts* hold them together: the messages below a cut, in all
partitions, are what the source had at one moment (``publish.cuts``). A queue hands out a message when everything below
the message's cut is in the queues, or applied. So whatever is applied of a topic, all that leads to a cut is in memory.
``hold`` hands that out to one thread, when no other one has a queue of the topic. Written in one transaction it fits a
target that agrees with the source: no value is in two rows there, in whatever order it went round between them.

A message that no cut follows is of somebody else, or its slice has not come whole. After a while it is handed out.

If a batch fails even so, its queue goes on one message at a time, until the batch is passed: so the message is found.

Invariants:
    * a queue hands out its messages in order, without a gap, each until it is done;
    * a queue at a barrier hands out nothing, and one of a topic that is held neither;
    * memory is bounded, by messages and by bytes: the caller stops the delivery of a queue that ``add`` names. What
      leads to a cut fits: it did when it was handed out first, perhaps to a process that has died since.

Thread safety: any thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from txmq.binlog.errors import TargetError
from txmq.binlog.event_json import CUT_HEADER, DDL, OP_HEADER, TRUNCATE, read_cut
from txmq.errors import FencedError
from txmq.model import Message, TopicPartition
from txmq.runtime.ports import Clock
from txmq.runtime.threads import Condition

QUEUE_MAX, QUEUE_BYTES_MAX = 2000, 16 << 20  # of a queue, and as much as one more poll brings
BATCH_BYTES_MAX = 4 << 20  # below the least max_allowed_packet that is common, also when escaped
IDLE_S = 1.0
UNCUT_S = 1.0  # for which a message that no cut follows is not handed out
_STATEMENTS = frozenset({DDL.encode(), TRUNCATE.encode()})


class Cut(NamedTuple):
    """A cut that a partition's message has.

    Args:
        end: the offset after that message.
        ends: the offset in each partition of the topic, as the reader counts them.
    """

    end: int
    ends: tuple[int, ...]


class Window(NamedTuple):
    """What leads to a cut, of each queue that has some of it.

    Args:
        is_whole: the cut is reached by all partitions then, and passed by none.
    """

    queues: list[tuple[PartitionQueue, list[Message]]]
    is_whole: bool


class PartitionQueue:
    """The messages of one partition, under one generation.

    Attributes:
        next: the offset of the next message; None if nothing was ever saved, before the first message.
        delivered: the offset after all that has come.
        opened, ahead: the cuts of messages that are not applied: up to which it hands out, and others.
        passed: the newest cut of messages that are applied, since it was granted.
        limit: what is below may be handed out.
        drift: by how much the offsets of its messages are above those that the reader counts.
        uncut_since: when the newest message came.
        blocked_since: since when it has messages and may hand out none.
        is_busy: a thread has messages of it.
        at: the statement at whose barrier it waits.
        single_until: messages below this offset are handed out one by one.
        due_at: monotonic time before which nothing is handed out.
        refused_since: when the next message was refused first.
    """

    __slots__ = (
        "ahead",
        "at",
        "blocked_since",
        "delivered",
        "drift",
        "due_at",
        "generation",
        "is_busy",
        "is_paused",
        "limit",
        "messages",
        "next",
        "opened",
        "passed",
        "refused_since",
        "single_until",
        "size_bytes",
        "slot",
        "uncut_since",
    )  # fmt: skip

    def __init__(self, slot: TopicPartition, generation: int, offset: int | None, start: int) -> None:
        self.slot, self.generation, self.next = slot, generation, offset
        self.delivered = self.limit = start if offset is None else offset
        self.opened, self.ahead = deque[Cut](), deque[Cut]()
        self.passed: Cut | None = None
        self.drift, self.uncut_since = 0, 0.0
        self.blocked_since: float | None = None
        self.messages: deque[Message] = deque()
        self.size_bytes = 0
        self.is_busy = self.is_paused = False
        self.at: str | None = None
        self.single_until, self.due_at = 0, 0.0
        self.refused_since: float | None = None

    def __str__(self) -> str:
        return f"{self.slot[0]}-{self.slot[1]}"

    def holds(self, part: float) -> bool:
        """Whether this part of what a queue may hold is in it, or more."""
        return len(self.messages) >= part * QUEUE_MAX or self.size_bytes >= part * QUEUE_BYTES_MAX


def is_statement(message: Message) -> bool:
    """Whether a message is of every partition, and is run once."""
    return message.headers.get(OP_HEADER) in _STATEMENTS


class PartitionQueues:
    """See the module's docstring.

    Args:
        batch_rows_max: messages that are handed out together.
    """

    def __init__(self, batch_rows_max: int, clock: Clock) -> None:
        self._rows_max, self._clock = batch_rows_max, clock
        self._changed = Condition()
        self._queues: dict[TopicPartition, PartitionQueue] = {}
        self._topics: dict[str, dict[int, PartitionQueue]] = {}
        self._held: set[str] = set()
        self._growing: set[str] = set()  # topics that need more than their queues hold, to reach a cut
        self._barriers: dict[str, dict[TopicPartition, PartitionQueue]] = {}
        self._said: dict[str, str] = {}
        self._awaited: dict[str, tuple[float, set[TopicPartition]]] = {}  # since when, and all that have it
        self._turn = 0
        self._failure: BaseException | None = None
        self._is_stopped = False
        self._working = 0

    # --- the consumer's side -----------------------------------------------------------------------------------------

    def granted(self, slot: TopicPartition, generation: int, offset: int | None, start: int = 0) -> None:
        """A partition was handed to this process, to go on at an offset; if there is none, where it starts.

        A partition that comes a second time was another process's meanwhile. What is in its queue is of no use, and its
        messages may still be on their way: the queues end, and the applier begins anew.
        """
        with self._changed:
            if slot in self._queues:
                self._fail(FencedError(f"{slot[0]}-{slot[1]} was another process's meanwhile"))
            else:
                queue = self._queues[slot] = PartitionQueue(slot, generation, offset, start)
                self._topics.setdefault(slot[0], {})[slot[1]] = queue

    def goes_back(self, slot: TopicPartition, offset: int) -> None:
        """A partition that was granted begins at a lower offset, before its first message has come."""
        with self._changed:
            queue = self._queues[slot]
            queue.next = queue.delivered = queue.limit = offset

    def add(self, messages: Iterable[Message]) -> list[TopicPartition]:
        """Append messages; returns partitions that are full now. Once the queues have ended, nothing is appended.

        Raises:
            TargetError: messages are missing: they were deleted before they were applied.
        """
        full = []
        with self._changed:
            if self._failure is not None:
                return []  # the poll that handed a partition out anew may have brought its messages, too
            now = self._clock.monotonic()
            for message in messages:
                queue = self._queues[message.topic, message.partition]
                end = queue.messages[-1].offset + 1 if queue.messages else queue.next
                if end is not None and message.offset != end:
                    raise TargetError(
                        f"{queue}: messages {end} to {message.offset - 1} are gone: the topic's retention deleted them "
                        "before they were applied. Begin the target anew from a snapshot"
                    )
                if queue.next is None:
                    queue.next = message.offset
                queue.messages.append(message)
                queue.size_bytes += len(message.value or b"")
                queue.delivered, queue.uncut_since = message.offset + 1, now
                if (header := message.headers.get(CUT_HEADER)) is not None:
                    _note_cut(queue, header)
            for queue in self._queues.values():
                if not queue.is_paused and queue.holds(2.0 if queue.slot[0] in self._growing else 1.0):
                    queue.is_paused = True
                    full.append(queue.slot)
            self._changed.notify_all()
        return full

    def with_room(self) -> list[TopicPartition]:
        """Partitions that were full, and are half empty now."""
        with self._changed:
            found = [
                queue
                for queue in self._queues.values()
                if queue.is_paused and not queue.holds(1.5 if queue.slot[0] in self._growing else 0.5)
            ]
            for queue in found:
                queue.is_paused = False
            return [queue.slot for queue in found]

    def has_passed(self, ends: dict[TopicPartition, int]) -> bool:
        """Whether everything below these offsets is applied."""
        with self._changed:
            return all(
                (queue := self._queues.get(slot)) is not None and (queue.next or 0) >= end for slot, end in ends.items()
            )

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
                now = self._clock.monotonic()
                ready = [
                    queue
                    for queue in self._queues.values()
                    if queue.messages
                    and not queue.is_busy
                    and queue.at is None
                    and queue.slot[0] not in self._held
                    and (queue.messages[0].offset < queue.limit or self._opens(queue, now))
                ]
                due = [queue for queue in ready if queue.due_at <= now]
                if due:
                    self._turn += 1
                    queue = due[self._turn % len(due)]
                    queue.is_busy = True
                    return queue, self._batch(queue)
                wait_s = min((queue.due_at - now for queue in ready), default=IDLE_S)
                self._changed.wait(min(wait_s, IDLE_S))
        return None

    # --- cuts --------------------------------------------------------------------------------------------------------

    def _opens(self, queue: PartitionQueue, now: float) -> bool:
        """Whether a queue may hand out its next message: sets its limit."""
        while queue.ahead and self._is_delivered(queue.slot[0], queue.ahead[0]):
            cut = queue.ahead.popleft()
            queue.opened.append(cut)
            queue.limit = cut.end
        if not queue.ahead and queue.limit < queue.delivered and now - queue.uncut_since >= UNCUT_S:
            queue.limit = queue.delivered
        is_open = queue.messages[0].offset < queue.limit
        if is_open or queue.blocked_since is None:
            queue.blocked_since = None if is_open else now
        return is_open

    def _is_delivered(self, topic: str, cut: Cut) -> bool:
        return not self._missing(topic, cut)

    def _missing(self, topic: str, cut: Cut) -> list[int]:
        """The partitions of which not all below a cut has come."""
        queues = self._topics[topic]
        return [
            partition
            for partition, end in enumerate(cut.ends)
            if end and ((queue := queues.get(partition)) is None or queue.delivered < end + queue.drift)
        ]

    def blocked(self, seconds: float) -> dict[str, list[TopicPartition]]:
        """The topics of which messages have waited for so long, each with the partitions that have to come first."""
        with self._changed:
            before = self._clock.monotonic() - seconds
            return {
                queue.slot[0]: [(queue.slot[0], one) for one in missing]
                for queue in self._queues.values()
                if queue.ahead and queue.blocked_since is not None and queue.blocked_since <= before
                if (missing := self._missing(queue.slot[0], queue.ahead[0]))
            }

    def hold(self, queue: PartitionQueue) -> Window | None:
        """Wait until no other thread has a queue of this one's topic; what leads to a cut, for this thread alone.

        None: another thread holds the topic, or the queues end; the queue was given back. Else ``release`` comes next.
        """
        topic = queue.slot[0]
        with self._changed:
            is_ours = topic not in self._held
            if is_ours:
                self._held.add(topic)
                queues = self._topics[topic].values()
                while not self._is_stopped and any(one.is_busy for one in queues if one is not queue):
                    self._changed.wait(IDLE_S)
            if not is_ours or self._is_stopped:
                queue.is_busy = False
                self._changed.notify_all()
                return None
            window = self._window(topic, queue)
            if not window.is_whole:
                self._growing.add(topic)
            for one, _ in window.queues:
                one.is_busy = True
            return window

    def _window(self, topic: str, refused: PartitionQueue) -> Window:
        """What leads to the first cut that no partition has passed; to the last one that is known, if they all have."""
        queues = self._topics[topic]
        stops = {
            partition: next((one.offset for one in queue.messages if is_statement(one)), queue.delivered)
            for partition, queue in queues.items()
        }
        found: dict[int, int] = {}
        is_whole = False
        for cut in sorted({ends for queue in queues.values() for ends in _known(queue)}):
            ends = {number: end + queues[number].drift for number, end in enumerate(cut) if number in queues}
            if any(end > stops[number] for number, end in ends.items()):
                break
            found = ends
            is_whole = refused.messages[0].offset < ends.get(refused.slot[1], 0) and all(
                (queue.next or 0) <= ends.get(number, queue.next or 0) for number, queue in queues.items()
            )
            if is_whole:
                break
        taken = [
            (queue, messages)
            for number, queue in queues.items()
            if (messages := [one for one in queue.messages if one.offset < found.get(number, 0)])
        ]
        return Window(taken, is_whole)

    def release(self, window: Window, queue: PartitionQueue, *, keeps: bool) -> None:
        """A held topic goes on.

        Args:
            keeps: the thread still has the queue with which it began.
        """
        with self._changed:
            for one, _ in window.queues:
                one.is_busy = False
            queue.is_busy = keeps
            self._held.discard(queue.slot[0])
            self._changed.notify_all()

    # --- what becomes of messages ------------------------------------------------------------------------------------

    def _batch(self, queue: PartitionQueue) -> list[Message]:
        batch: list[Message] = []
        size = 0
        rows_max = self._rows_max
        if queue.messages[0].offset < queue.single_until:
            rows_max = 1
        self._opens(queue, self._clock.monotonic())
        for message in queue.messages:
            size += len(message.value or b"")
            if message.offset >= queue.limit:
                break
            if batch and (len(batch) >= rows_max or size > BATCH_BYTES_MAX or is_statement(message)):
                break
            batch.append(message)
            if is_statement(message):
                break
        return batch

    def done(self, queue: PartitionQueue, offset: int) -> list[Message]:
        """A queue's messages below an offset are in the target; returns them."""
        with self._changed:
            queue.is_busy, queue.refused_since, queue.due_at = False, None, 0.0
            found = self._drop(queue, offset)
            self._growing.discard(queue.slot[0])
            self._changed.notify_all()
            return found

    def _drop(self, queue: PartitionQueue, offset: int) -> list[Message]:
        found = []
        while queue.messages and queue.messages[0].offset < offset:
            found.append(queue.messages.popleft())
            queue.size_bytes -= len(found[-1].value or b"")
        queue.next = offset
        for cuts in (queue.opened, queue.ahead):
            while cuts and cuts[0].end <= offset:
                queue.passed = cuts.popleft()
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

    def refused(self, queue: PartitionQueue, count: int) -> None:
        """Hand out a queue's messages again, one by one: so many were refused together."""
        with self._changed:
            queue.single_until = queue.messages[count - 1].offset + 1
            queue.is_busy = False
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

    def passed(self, queues: Iterable[PartitionQueue], statement: str) -> list[Message]:
        """The statement was run: the queues go on behind it; returns its messages."""
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


def _known(queue: PartitionQueue) -> list[tuple[int, ...]]:
    """The cuts that a queue knows of."""
    return [cut.ends for cut in (queue.passed, *queue.opened, *queue.ahead) if cut is not None]


def _note_cut(queue: PartitionQueue, header: bytes) -> None:
    """Note the cut of a queue's newest message, unless somebody else has made it up."""
    ends = read_cut(header)
    if ends is not None and len(ends) > queue.slot[1]:
        queue.drift = queue.delivered - ends[queue.slot[1]]
        queue.ahead.append(Cut(queue.delivered, ends))
