"""The senders of a producer, one for each home that it sends to; and the client's pool that they come from.

Theory of operation. A session belongs to one home, so batches are numbered per home: each home has a sender, with a
connection and a session of its own. A partition's messages go to one sender. A lone broker has one home, so its
producers have one sender (``single``) and pass by everything else here.

*Another home's partition* (not-owner), *another topic of that name* (stale-topic). Batches carry the id of the topic
that their partition was chosen for. A partition never moves, so either the routes were wrong, or the topic was created
anew under its name. The routes are corrected, and the batches go to the new sender, in order, before any later message
does. If the topic was created anew with another number of partitions, their keys may belong elsewhere: they fail, and
nothing of them was stored. A queue without batches follows the new topic as soon as the client knows it.

*A home that is away.* Messages that choose their partition in turn leave it: new ones pass it over, and those that were
never written to a socket are given to partitions of other homes. All others wait for their home.

*Transactions.* A commit may be on its way when its block has ended (``PendingCommits``). To a lone broker a message for
the same partition waits for the answer. Over homes one with a key does, so that it passes none of that key.

Invariants:
    * A batch that was ever given to a connection keeps its partition.
    * ``_lock`` is held while batches change senders, so that nothing waits for half of a change. It is taken before a
      sender's own lock, and nothing blocks while it is held.
    * Ctrl-C loses no batch between two senders: it strikes the main thread, on which none changes senders.
    * All senders together hold at most ``buffer_size_bytes`` and one message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Final, NamedTuple

from txmq.client.producer.core import Batch, BatchQueue, BatchState, ProducerLimits, Record, TopicRef
from txmq.client.producer.sender import LEFTOVERS_POLL_S, Completion, Sender, completion_of, unsent
from txmq.client.transaction.homes import PendingCommits
from txmq.client.transport.connection import Waiter
from txmq.client.transport.reconnecting import AWAY_S_MAX, END_S_MAX, ReconnectingConnection, have_ended
from txmq.errors import (
    BrokerAwayError,
    ClosedError,
    ConnectionLostError,
    DeliveryUnknownError,
    NotOwnerError,
    RequestTimeoutError,
    TxmqError,
    UnknownTopicError,
)
from txmq.model import SendResult, TopicPartition
from txmq.registry.topics import Topic
from txmq.runtime.ports import Clock
from txmq.runtime.threads import Future, Lock, sheltered, watch_forks

if TYPE_CHECKING:
    from txmq.client.client import Client
    from txmq.client.home_link import HomeLink

SILENT_S_MAX = 1.0  # a home that has answered nothing for so long counts as away
IDLE_MAX: Final = 8


class HomeSender(Sender):
    """The sender to one home of several: batches may come from the senders to other homes, and go to them.

    A batch changes senders between two homes as a value: the old core lets it go, the new one adopts it, and the
    threads that wait for it are nudged and go on at the new sender (``Completion.moved_to``). Which batch goes where is
    decided by ``HomeSenders``.

    Thread safety: any thread.

    Attributes:
        router: what it is one of; set before the first message.
    """

    router: HomeSenders | None = None

    def step(self, waiter: Waiter, deadline: float) -> float:
        """As ``Sender.step``; takes batches elsewhere that are not sent here."""
        if self.core.returned and self.router is not None:
            with self._lock:
                due = self.core.due_returned()
            if due:
                self.router.rehome(self, due)
                return self.clock.monotonic()
        begun = super().step(waiter, deadline)
        if self._failure is not None and self.router is not None:
            self.router.leave(self)
        return begun

    def _connect_s_max(self) -> float:
        """Batches that may go elsewhere do not wait long for this home."""
        with self._lock:
            return AWAY_S_MAX if self.core.movable() else super()._connect_s_max()

    def _look_at_ended(self, ended: list[Batch], now: float) -> None:
        """A home that answers nothing may be frozen: without the connection it counts as away."""
        connection, router = self._connection, self.router
        if connection is None or router is None or not router.has_many:
            return
        since = [batch.created_at for batch in ended if isinstance(batch.error, DeliveryUnknownError)]
        if since and now - max(min(since), connection.lived_at) >= SILENT_S_MAX:
            connection.fail(ConnectionLostError(f"{connection.address} has not answered for {SILENT_S_MAX:g} s"))
            router.leave(self)

    def movable(self) -> list[Batch]:
        """Batches that may go to another partition, if they are not sent meanwhile."""
        with self._lock:
            return self.core.movable()

    def withdraw(self, batch: Batch) -> bool:
        """Let go of a movable batch; False if it has been sent meanwhile, ended, or another thread has taken it."""
        queue = batch.queue
        with self._lock:
            is_here = self.core.queue_of(queue.topic, queue.partition) is queue  # a core has queues of its own
            if not is_here or batch.transmission or batch.state is not BatchState.WAITING:
                return False
            self.core.withdraw([batch])
            self._futures -= len(completion_of(batch).futures)
        return True

    def take_returned(self, queue: BatchQueue) -> list[Batch]:
        """See ``ProducerCore.take_returned``; nothing if another thread has done so."""
        with self._lock:
            taken = self.core.take_returned(queue) if queue in self.core.returned else []
            self._futures -= sum(len(completion_of(batch).futures) for batch in taken)
            finished = self._take_finished()
        self._notify(finished)
        return taken

    def keep_returned(self, queue: BatchQueue, error: TxmqError | None) -> None:
        """See ``ProducerCore.keep_returned``."""
        with self._lock:
            if queue in self.core.returned:
                self.core.keep_returned(queue, self.clock.monotonic(), error)

    def fail_returned(self, queue: BatchQueue, error: TxmqError) -> None:
        """See ``ProducerCore.fail_returned``."""
        with self._lock:
            if queue in self.core.returned:
                self.core.fail_returned(queue, error)
            finished = self._take_finished()
        self._notify(finished)

    def bind_topic(self, topic: Topic, partition: int) -> bool:
        """See ``BatchQueue.bind_topic``."""
        with self._lock:
            topic_ref = TopicRef(topic.topic_id, topic.config.partitions)
            return self.core.queue_of(topic.config.name, partition).bind_topic(topic_ref)

    def adopt(self, topic: str, partition: int, batches: list[Batch]) -> None:
        """Send batches that another sender let go; the threads that wait for them go on here."""
        completions = [completion_of(batch) for batch in batches]
        with self._lock:
            self.core.adopt(topic, partition, batches)
            for completion in completions:
                completion.moved_to = self
                self._futures += len(completion.futures)
            self._pump(self.clock.monotonic())
        if any(completion.futures for completion in completions):
            self._start_background()
        for completion in completions:
            for waiter in completion.waiters:
                waiter.nudge()


class _Destination(NamedTuple):
    """Where a partition's messages go, and the topic that the partition was chosen for."""

    sender: HomeSender
    topic: Topic
    link: HomeLink


class _Rotation(NamedTuple):
    """The partitions of a topic in the order of their turns: by home, then by number."""

    topic: Topic
    partitions: tuple[tuple[int, HomeLink], ...]
    links: tuple[HomeLink, ...]


class HomeSenders:
    """See the module's docstring. Thread safety: any thread."""

    def __init__(self, client: Client, limits: ProducerLimits) -> None:
        self._client, self._limits = client, limits
        self.single: HomeSender | None = None  # the sender to a lone broker, once there is one
        self._single_home_commits: PendingCommits | None = None
        self._of_links: dict[HomeLink, HomeSender] = {}
        self._destinations: dict[TopicPartition, _Destination] = {}
        self._rotations: dict[str, _Rotation] = {}
        self._numbers = count()
        self._closed = False
        self._lock = Lock()
        watch_forks(self)

    # --- the senders -------------------------------------------------------------------------------------------------

    @property
    def has_many(self) -> bool:
        """Whether there is more than one home to send to."""
        return not self._client.routes.is_single_home

    def open_single(self) -> HomeSender | None:
        """The sender to a lone broker; None if there are several homes.

        Raises:
            ClosedError: the producer or the client is closed.
        """
        if not self._client.routes.is_single_home:
            self.single = None
        elif self.single is None:
            link = self._client.routes.any_link()
            self._single_home_commits, self.single = link.pending_commits, self._sender_of(link)
        return self.single

    def let_commits_pass(self, topic: str, partition: int, deadline: float) -> None:
        """To a lone broker: what is sent next does not overtake a transaction of this client.

        Raises:
            BrokerAwayError: the broker has not answered before the deadline.
        """
        if self._single_home_commits:
            self._await_commits(self._single_home_commits, (topic, partition), deadline)

    def _sender_of(self, link: HomeLink) -> HomeSender:
        sender = self._of_links.get(link)
        if sender is None:
            with self._lock:
                if self._closed:
                    raise ClosedError("the producer is closed")
                sender = self._of_links.get(link)
                if sender is None:
                    sender = self._of_links[link] = link.senders.take(self._limits)
                    sender.router = self
        return sender

    def _destination_of(self, topic: str, partition: int) -> _Destination:
        slot = (topic, partition)
        destination, held = self._destinations.get(slot), self._client.topics.held(topic)
        if destination is not None and (
            held is None or held is destination.topic or not destination.sender.bind_topic(held, partition)
        ):
            return destination  # of batches for a topic that is gone the broker tells, and of this one with them
        known = held or self._client.topics.known(topic)
        if destination is not None and known.topic_id == destination.topic.topic_id:
            found = destination._replace(topic=known)  # its settings may be others
        else:
            link = self._client.routes.link_for(topic, partition)
            found = _Destination(self._sender_of(link), known, link)
            found.sender.bind_topic(known, partition)
        with self._lock:
            if self._destinations.get(slot) is destination:  # no other thread has changed it meanwhile
                self._destinations[slot] = found
            return self._destinations[slot]

    def _sender_for(self, topic: str, partition: int, key: bytes | None, deadline: float) -> HomeSender:
        """The sender of a partition, once no message of the key is on its way there in a transaction."""
        destination = self._destination_of(topic, partition)
        if key is not None:
            self._await_commits(destination.link.pending_commits, (topic, partition), deadline)
        return destination.sender

    def _await_commits(self, commits: PendingCommits, slot: TopicPartition, deadline: float) -> None:
        if commits:
            try:
                commits.wait(slot, deadline)
            except (ConnectionLostError, RequestTimeoutError) as error:
                raise BrokerAwayError(
                    f"not sent, nothing was stored: messages of a transaction have to arrive before it: {error}"
                ) from error

    @property
    def request_size_bytes_max(self) -> int | None:
        """The smallest limit of the homes that are known; None if none is."""
        if not self._of_links:
            return None
        sessions = (sender.reconnecting.session for sender in tuple(self._of_links.values()))
        return min((session.request_size_bytes_max for session in sessions if session is not None), default=None)

    # --- sending -----------------------------------------------------------------------------------------------------

    def send(self, topic: str, partition: int, record: Record, deadline: float, *, is_movable: bool) -> SendResult:
        """Send one message and wait for its acknowledgement."""
        self._wait_for_room(len(record[1]), deadline)
        sender = self._sender_for(topic, partition, record[0], deadline)
        return sender.send(topic, partition, record, deadline, is_movable)

    def send_async(
        self, topic: str, partition: int, record: Record, deadline: float, *, is_movable: bool
    ) -> Future[SendResult]:
        """Send one message; the future is done when it is acknowledged or failed."""
        self._wait_for_room(len(record[1]), deadline)
        sender = self._sender_for(topic, partition, record[0], deadline)
        return sender.send_async(topic, partition, record, deadline, is_movable)

    def add(
        self, topic: str, partition: int, content: bytearray, size: int, deadline: float, *, is_movable: bool,
        overdue: set[PendingCommits],
    ) -> Completion:  # fmt: skip
        """Send an encoded batch in the background; its one future tells its end. It has keys unless it is movable.

        Args:
            overdue: commits that batches before it waited for in vain: it fails as they did, and does not wait as long.
        """
        self._wait_for_room(len(content), deadline)
        destination = self._destination_of(topic, partition)
        if not is_movable and destination.link.pending_commits:
            error = self._vain_wait(destination.link.pending_commits, (topic, partition), deadline, overdue)
            if error is not None:
                return unsent(topic, partition, size, error)
        return destination.sender.add_async(topic, partition, content, size, deadline, is_movable)

    def add_to_single(
        self, single: Sender, topic: str, partition: int, content: bytearray, size: int, deadline: float,
        overdue: set[PendingCommits],
    ) -> Completion:  # fmt: skip
        """As ``add``, to a lone broker; ``single.drive`` waits for it."""
        if self._single_home_commits:
            error = self._vain_wait(self._single_home_commits, (topic, partition), deadline, overdue)
            if error is not None:
                return unsent(topic, partition, size, error)
        return single.add(topic, partition, content, size, deadline)

    def _vain_wait(
        self, commits: PendingCommits, slot: TopicPartition, deadline: float, overdue: set[PendingCommits]
    ) -> BrokerAwayError | None:
        """Wait for commits; the error if that was in vain."""
        try:
            self._await_commits(commits, slot, self._client.clock.monotonic() if commits in overdue else deadline)
        except BrokerAwayError as error:
            overdue.add(commits)
            return error
        return None

    def _wait_for_room(self, size: int, deadline: float) -> None:
        """Wait until the buffers of all senders together have room."""
        limit = self._limits.buffer_size_bytes
        while (used := [(sender.core.buffered_bytes, sender) for sender in tuple(self._of_links.values())]) and (
            (total := sum(size_bytes for size_bytes, _ in used)) > 0 and total + size > limit
        ):
            now = self._client.clock.monotonic()
            if now >= deadline:
                raise RequestTimeoutError(f"buffer_size_bytes {limit} is in use: nothing was sent")
            # No home is waited for long: another one may make room meanwhile.
            for _, sender in used:
                sender.make_room(min(deadline, now + LEFTOVERS_POLL_S))

    # --- choosing in turn --------------------------------------------------------------------------------------------

    def is_filling(self, topic: str, partition: int) -> bool:
        """Whether a partition has unfinished messages, and its home is there."""
        single = self.single
        if single is not None:
            return single.core.has_unfinished(topic, partition)
        destination = self._destinations.get((topic, partition))
        if destination is None or destination.link.is_away:
            return False
        return destination.sender.core.has_unfinished(topic, partition)

    def next_partition(self, topic: Topic) -> int:
        """The next partition in turn, of a home that is not away if there is one."""
        writable = self._writable(topic)
        return writable[next(self._numbers) % len(writable)][0]

    def _writable(self, topic: Topic) -> Sequence[tuple[int, HomeLink]]:
        rotation = self._rotations.get(topic.config.name)
        if rotation is None or rotation.topic != topic:
            rotation = self._rotations[topic.config.name] = self._rotation_of(topic)
        away = {link for link in rotation.links if link.is_away}
        if not away:
            return rotation.partitions
        return [place for place in rotation.partitions if place[1] not in away] or rotation.partitions

    def _rotation_of(self, topic: Topic) -> _Rotation:
        name = topic.config.name
        places = [(number, self._client.routes.link_for(name, number)) for number in range(topic.config.partitions)]
        places.sort(key=lambda place: (place[1].home, place[0]))
        return _Rotation(topic, tuple(places), tuple({link: None for _, link in places}))

    # --- for the senders, on threads that wait -----------------------------------------------------------------------

    def leave(self, sender: HomeSender) -> None:
        """The sender's home is away: give what was never sent of it, and may go anywhere, to other partitions."""
        if not self.has_many:
            return
        self.single = None
        for link, known in tuple(self._of_links.items()):
            if known is sender and not link.is_away:
                link.was_silent()
        batches = sender.movable()
        if batches:
            sheltered("txmq-move", lambda: self._move_all(sender, batches))

    def _move_all(self, sender: HomeSender, batches: Iterable[Batch]) -> None:
        for batch in batches:
            with suppress(TxmqError):  # where else it could go is not known now: it waits, and is tried again
                self._move(sender, batch)

    def _move(self, sender: HomeSender, batch: Batch) -> None:
        name = batch.queue.topic
        rotation = self._rotations.get(name)
        if rotation is None:
            return
        there = [place for place in rotation.partitions if not place[1].is_away]
        if not there:
            return
        partition, _ = there[next(self._numbers) % len(there)]
        target = self._destination_of(name, partition).sender
        if target is sender:
            return
        with self._lock:
            if sender.withdraw(batch):
                target.adopt(name, partition, [batch])

    def rehome(self, sender: HomeSender, queues: Iterable[BatchQueue]) -> None:
        """Take the batches of these queues to the homes that own their partitions."""
        self.single = None
        sheltered("txmq-move", lambda: self._rehome_all(sender, queues))

    def _rehome_all(self, sender: HomeSender, queues: Iterable[BatchQueue]) -> None:
        for queue in queues:
            try:
                self._rehome(sender, queue)
            except (UnknownTopicError, NotOwnerError) as error:
                sender.fail_returned(queue, error)
            except TxmqError as error:  # no broker answers now
                sender.keep_returned(queue, error)

    def _rehome(self, sender: HomeSender, queue: BatchQueue) -> None:
        name, partition = queue.topic, queue.partition
        self._client.routes.corrected(name)
        found, topic_ref = self._client.topics.known(name), queue.topic_ref
        is_stale = topic_ref.topic_id not in (0, found.topic_id)
        if is_stale and found.config.partitions != topic_ref.partitions:
            raise NotOwnerError(
                f"topic {name!r} was created anew with {found.config.partitions} partitions: nothing was stored, "
                "send it again"
            )
        link = self._client.routes.link_for(name, partition)
        target = self._sender_of(link)
        if target is sender and not is_stale:
            sender.keep_returned(queue, None)
            return
        with self._lock:
            taken = sender.take_returned(queue)
            target.bind_topic(found, partition)
            target.adopt(name, partition, taken)
            self._destinations[name, partition] = _Destination(target, found, link)

    # --- ends --------------------------------------------------------------------------------------------------------

    def flush(self, deadline: float) -> None:
        """Wait until everything sent so far is acknowledged or failed. Raises as ``Sender.flush``."""
        with self._lock:  # a batch that moves meanwhile is seen
            unfinished = [(sender, sender.unfinished()) for sender in self._of_links.values()]
        for sender, completions in unfinished:
            sender.await_all(completions, deadline)

    def close(self, deadline: float) -> None:
        """Flush, and give back the senders. Raises as ``flush``."""
        try:
            self.flush(deadline)
        finally:
            with self._lock:
                self._closed = True
                of_links, self._of_links = self._of_links, {}
            self.single = None
            for link, sender in of_links.items():
                link.senders.give_back(sender)

    def forked(self) -> None:
        """In a forked child: replace the lock, which a thread of the parent may hold."""
        self._lock = Lock()


class SenderPool:
    """The senders of a client: one for each producer that is open.

    One session numbers the batches of one sender only. So the first sender uses the client's own connection and
    session, and each further one gets a connection of its own. Senders are kept and used again when producers close,
    ``IDLE_MAX`` at most: beyond that a sender's session ends with its producer.

    Args:
        control: returns the client's own connection of the moment.
        new_connection: makes one more connection.
        on_unknown_topic: called with the topic's name if the broker does not know it.
        new_sender: makes a sender.

    Thread safety: any thread.
    """

    def __init__(
        self, control: Callable[[], ReconnectingConnection], new_connection: Callable[[], ReconnectingConnection],
        clock: Clock, on_unknown_topic: Callable[[str], None], new_sender: type[HomeSender] = HomeSender,
    ) -> None:  # fmt: skip
        self._control, self._new_connection, self._clock = control, new_connection, clock
        self._on_unknown_topic, self._new_sender = on_unknown_topic, new_sender
        self._lock = Lock()
        self._senders: list[HomeSender] = []
        self._idle: list[HomeSender] = []
        self._closed = False
        watch_forks(self)

    def take(self, limits: ProducerLimits) -> HomeSender:
        """A sender that no other producer uses.

        Raises:
            ClosedError: the client is closed.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("the client is closed")
            if self._idle:
                sender = self._idle.pop()
                sender.limits = limits
                return sender
            connection = self._new_connection() if self._senders else self._control()
            sender = self._new_sender(connection, self._clock, limits)
            sender.on_unknown_topic = self._on_unknown_topic
            self._senders.append(sender)
            return sender

    def give_back(self, sender: HomeSender) -> None:
        """A producer is closed. A sender that holds a batch of unknown outcome is not used again."""
        with self._lock:
            if self._closed or not sender.is_idle or sender not in self._senders:
                return
            is_first = sender is self._senders[0]  # its connection may be the client's own
            if is_first or len(self._idle) < IDLE_MAX:
                self._idle.append(sender)
                return
            self._senders.remove(sender)
        sender.stop()
        try:
            have_ended([sender.reconnecting.end_session(self._clock.monotonic() + END_S_MAX)])
        finally:
            sender.reconnecting.close()

    def stop(self) -> list[ReconnectingConnection]:
        """Give up what is unfinished; no sender is given out any more. Returns their connections, to be closed."""
        with self._lock:
            self._closed = True
            senders, self._idle = list(self._senders), []
        for sender in senders:
            sender.stop()
        return [sender.reconnecting for sender in senders]

    def forked(self) -> None:
        """In a forked child: replace the lock, which a thread of the parent may hold."""
        self._lock = Lock()
