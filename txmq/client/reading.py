"""Reading without a group: ``fetch``, ``fetch_raw``, ``browse``, offsets.

``get`` returns whole batches, the first of which holds the wanted offset; messages before that offset are dropped here.
Each batch is checked against its position (topic id, partition, offset) and its CRC before its messages are returned:
damage on the broker's disk or on the way is found, not served. Sound messages before the damage are returned.

A read waits, within its timeout, for commits of this client that the broker has yet to answer (``PendingCommits``).

``browse`` asks for the next answer when it begins to give out the one before: the broker works, and the network
carries, while the caller looks at messages. It does so once its caller has come back for more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from typing import TYPE_CHECKING

from txmq.client.topics import Topics
from txmq.errors import (
    ConnectionLostError,
    InvalidBatchError,
    OffsetOutOfRangeError,
    PartialResultError,
    RemoteProtocolError,
    RequestTimeoutError,
    TxmqError,
    UnavailableError,
)
from txmq.log import records
from txmq.log.history import LogHistory, parsed
from txmq.model import Message, PartitionRange, TopicPartition
from txmq.runtime.ports import Clock
from txmq.xa.resolver_ports import Answer

if TYPE_CHECKING:
    from txmq.client.home_link import HomeLink
    from txmq.client.routes import Routes

FETCH_SIZE_BYTES = 1 << 20
PAGE_MESSAGES = 256  # made together: more would outlive the garbage collector's youngest generation
POLL_WAIT_S_MAX = 30.0  # the longest wait of a get in the broker


class Fetcher:
    """Reads on a link's connection for reads, so that a long poll delays no send. Thread safety: any thread."""

    def __init__(self, routes: Routes, topics: Topics, clock: Clock, timeout: float) -> None:
        self._routes, self._topics, self._clock, self._timeout = routes, topics, clock, timeout

    def fetch_raw(self, topic: str, partition: int, offset: int, max_bytes: int, timeout: float) -> bytes:
        """As ``Client.fetch_raw``."""
        deadline = self._clock.monotonic() + timeout
        self._let_commits_pass(topic, partition, deadline)
        while True:
            wait_s = min(max(deadline - self._clock.monotonic(), 0.0), POLL_WAIT_S_MAX)
            body = self._get((topic, partition, offset, max_bytes), wait_s)
            if body or self._clock.monotonic() + 0.001 >= deadline:
                return body

    def _let_commits_pass(self, topic: str, partition: int, deadline: float) -> None:
        """Wait for what this client has committed there, so that it is found; not beyond the deadline."""
        commits = self._routes.link_for(topic, partition).pending_commits
        if commits:
            with suppress(TxmqError):
                commits.wait((topic, partition), deadline)

    def _get(self, wanted: tuple[str, int, int, int], wait_s: float) -> bytes:
        wait_ms = int(wait_s * 1000)
        extensions = {"wait": wait_ms} if wait_ms else None
        timeout = wait_s + self._timeout
        return self._routes.ask_owner(
            *wanted[:2], lambda link: link.reader.repeat("get", *wanted, extensions=extensions, timeout=timeout)
        )

    def fetch(self, topic: str, partition: int, offset: int, max_bytes: int, timeout: float) -> list[Message]:
        """As ``Client.fetch``."""
        topic_id = self._topics.known(topic).topic_id
        body = self.fetch_raw(topic, partition, offset, max_bytes, timeout)
        return list(chain.from_iterable(self._opened((topic, partition), topic_id, offset, body)[1]))

    def _opened(
        self, slot: TopicPartition, topic_id: int, offset: int, body: bytes
    ) -> tuple[int, Iterator[list[Message]]]:
        """The offset after the sound batches of an answer, and their messages by pages, opened when it is their turn.

        Raises:
            InvalidBatchError: there is damage before ``offset``.
        """
        if not body:
            return offset, iter(())
        try:
            return _from(offset, body, slot, topic_id)
        except InvalidBatchError as damage:
            # The topic may have been created anew since its id was asked for.
            current_id = self._topics.refresh(slot[0]).topic_id
            if current_id == topic_id:
                raise InvalidBatchError(f"at offset {offset}: {damage}; {records.DAMAGED}") from damage
            return _from(offset, body, slot, current_id)

    def browse(self, topic: str) -> Iterator[Sequence[Message]]:
        """As ``Client.browse_pages``."""
        away = _AwayHomes(self._routes, topic)
        for held in self._ranges(topic, away):
            with away.noted(held.partition):
                yield from self._browse_partition(held)
        away.tell()

    def ranges(self, topic: str) -> list[PartitionRange]:
        """As ``Client.ranges``."""
        away = _AwayHomes(self._routes, topic)
        found = self._ranges(topic, away)
        away.tell(found)
        return found

    def _ranges(self, topic: str, away: _AwayHomes) -> list[PartitionRange]:
        found = []
        for partition in self._routes.kept_partitions(topic, self._topics.refresh(topic).config.partitions):
            with away.noted(partition):
                away.look(partition)
                found.append(self.offsets(topic, partition))
        return found

    def _browse_partition(self, held: PartitionRange) -> Iterator[Sequence[Message]]:
        slot, offset, has_come_back = (held.topic, held.partition), held.start, False
        ahead = _NextAnswer(self._routes, slot, self._timeout)
        while offset < held.end:
            asked_for = offset
            try:
                topic_id = self._topics.known(held.topic).topic_id
                body = ahead.take(offset) or self.fetch_raw(*slot, offset, FETCH_SIZE_BYTES, self._timeout)
                end, pages = self._opened(slot, topic_id, offset, body)
                for messages in pages:
                    if has_come_back and end < held.end:
                        ahead.ask(end)
                    offset = messages[-1].offset + 1
                    yield messages if offset <= held.end else messages[: held.end - messages[0].offset]
                    if offset >= held.end:
                        return
                    has_come_back = True
            except OffsetOutOfRangeError:
                # Retention was faster than the reader: go on with what is left.
                offset = max(offset + 1, self.offsets(held.topic, held.partition).start)
                continue
            if offset == asked_for:
                raise RemoteProtocolError(f"{held.topic}-{held.partition}: nothing at {offset}, below end {held.end}")

    def offsets(self, topic: str, partition: int) -> PartitionRange:
        """As ``Client.offsets``."""
        self._let_commits_pass(topic, partition, self._clock.monotonic() + self._timeout)
        _, start, end = self._ask_offset(topic, partition, "latest")
        return PartitionRange(topic, partition, start, end)

    def offset_for(self, topic: str, partition: int, timestamp_ms: int) -> int:
        """As ``Client.offset_for``."""
        return self._ask_offset(topic, partition, timestamp_ms)[0]

    def log_of(self, topic: str, partition: int) -> tuple[PartitionRange, LogHistory]:
        """As ``Client.log_of``."""
        body = self._asked_offset(topic, partition, "latest", {"log": None})
        _, start, end, text = _split(body, 4)
        return PartitionRange(topic, partition, int(start), int(end)), parsed(text.decode())

    def _ask_offset(self, topic: str, partition: int, where: str | int) -> tuple[int, int, int]:
        found, start, end = _split(self._asked_offset(topic, partition, where), 3)
        return int(found), int(start), int(end)

    def _asked_offset(
        self, topic: str, partition: int, where: str | int, extensions: dict[str, str | int | None] | None = None
    ) -> bytes:
        asked = ("offset", topic, partition, where)
        return self._routes.ask_owner(
            topic, partition, lambda link: link.reader.repeat(*asked, extensions=extensions, timeout=self._timeout)
        )


def _split(body: bytes, count: int) -> list[bytes]:
    words = body.split()
    if len(words) != count or not all(word.isdigit() for word in words[:3]):
        raise RemoteProtocolError(f"not an answer to offset: {body[:80]!r}")
    return words


class _AwayHomes:
    """Partitions of a topic that cannot be read, because their homes are away: each home is waited for once."""

    def __init__(self, routes: Routes, topic: str) -> None:
        self._routes, self._topic = routes, topic
        self._errors: dict[HomeLink, TxmqError] = {}
        self._partitions: list[int] = []

    def look(self, partition: int) -> None:
        """See ``HomeLink.look``; a broker that is alone is not looked at."""
        link = self._routes.link_for(self._topic, partition)
        if link in self._errors:
            raise self._errors[link]
        link.look()

    @contextmanager
    def noted(self, partition: int) -> Iterator[None]:
        """A block that reads the partition: it ends early if its home is away."""
        try:
            yield
        except (ConnectionLostError, RequestTimeoutError, UnavailableError) as error:
            if self._routes.is_single_home:
                raise
            self._errors.setdefault(self._routes.link_for(self._topic, partition), error)
            self._partitions.append(partition)

    def tell(self, found: Sequence[PartitionRange] = ()) -> None:
        """Say what is missing.

        Raises:
            PartialResultError: something is.
        """
        if self._partitions:
            numbers = ", ".join(map(str, self._partitions))
            reasons = "; ".join(dict.fromkeys(str(error) for error in self._errors.values()))
            away = [self._routes.name_of(link) for link in self._errors]
            raise PartialResultError(
                f"topic {self._topic}, partition {numbers}: home {', '.join(away)} is away ({reasons})", found, away
            )


class _NextAnswer:
    """The next answer of a partition that is browsed; asked for before it is needed, and never the only attempt."""

    def __init__(self, routes: Routes, slot: TopicPartition, timeout: float) -> None:
        self._routes, self._slot, self._timeout = routes, slot, timeout
        self._reply: Answer | None = None
        self._offset = -1

    def ask(self, offset: int) -> None:
        """Send a get, unless this one is under way, or there is no connection for now."""
        if self._offset == offset:
            return
        self._offset, self._reply = offset, None
        with suppress(TxmqError):
            reader = self._routes.link_for(*self._slot).reader
            if reader.live is not None:
                self._reply = reader.submit("get", *self._slot, offset, FETCH_SIZE_BYTES, timeout=self._timeout)

    def take(self, offset: int) -> bytes:
        """The answer from ``offset`` on; empty if none was asked for, or it failed: then ask for it anew.

        Raises:
            RequestTimeoutError: the broker does not answer.
        """
        reply, self._reply = self._reply, None
        if reply is None or self._offset != offset:
            return b""
        try:
            return reply.result(self._timeout)
        except RequestTimeoutError:
            raise
        except TxmqError:
            return b""


def _from(offset: int, body: bytes, slot: TopicPartition, topic_id: int) -> tuple[int, Iterator[list[Message]]]:
    batches, damage = records.sound_batches(body, *slot, topic_id=topic_id)
    pages = _paged(batches, damage, slot)
    first = _with(offset, pages)
    begin = offset - first[0].offset
    return batches[-1].end_offset, chain((first[begin:] if begin else first,), _until_damage(pages))


def _paged(
    batches: Sequence[records.RawBatch], damage: InvalidBatchError | None, slot: TopicPartition
) -> Iterator[list[Message]]:
    """Whole batches, a page at a time; sound ones before the damage is raised."""
    messages: list[Message] = []
    try:
        for batch in batches:
            messages += records.decode_batch(batch, *slot)
            if len(messages) >= PAGE_MESSAGES:
                yield messages
                messages = []
    except InvalidBatchError as found:
        damage = found
    if messages:
        yield messages
    if damage is not None:
        raise damage


def _until_damage(pages: Iterator[list[Message]]) -> Iterator[list[Message]]:
    with suppress(InvalidBatchError):  # it comes first in the next answer
        yield from pages


def _with(offset: int, batches: Iterator[list[Message]]) -> list[Message]:
    """The page that holds an offset."""
    for messages in batches:
        if messages[-1].offset >= offset >= messages[0].offset:
            return messages
        if messages[0].offset > offset:
            raise RemoteProtocolError(f"offset {offset} asked for, {messages[0].offset} answered")
    raise RemoteProtocolError(f"offset {offset} asked for, lower ones answered")
