"""Reading without a group: ``fetch``, ``fetch_raw``, ``browse``, offsets.

``get`` returns whole batches, the first of which holds the wanted offset; messages before that offset are dropped here.
Each batch is checked against its position (topic id, partition, offset) and its CRC before its messages are returned:
damage on the broker's disk or on the way is found, not served. Sound messages before the damage are returned.

A read waits, within its timeout, for commits of this client that the broker has yet to answer (``branch_commits``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain

from txmq.client.topics import Topics
from txmq.client.transport.ports import Asking
from txmq.errors import InvalidBatchError, OffsetOutOfRangeError, RemoteProtocolError, TxmqError
from txmq.log import records
from txmq.model import Message, PartitionRange
from txmq.runtime.ports import Clock

FETCH_SIZE_BYTES = 1 << 20
PAGE_MESSAGES = 256  # made together: more would outlive the garbage collector's youngest generation
POLL_WAIT_S_MAX = 30.0  # the longest wait of a get in the broker


class Fetcher:
    """Reads on a link's connection for reads, so that a long poll delays no send. Thread safety: any thread."""

    def __init__(self, routes: Asking, topics: Topics, clock: Clock, timeout: float) -> None:
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
        commits = self._routes.link_for(topic, partition).branch_commits
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
        return list(chain.from_iterable(self._fetch(topic, partition, offset, max_bytes, timeout)))

    def _fetch(
        self, topic: str, partition: int, offset: int, max_bytes: int, timeout: float
    ) -> Iterator[list[Message]]:
        """Pages of the messages up to damage; batches are checked and opened when their page's turn comes."""
        topic_id = self._topics.known(topic).topic_id
        body = self.fetch_raw(topic, partition, offset, max_bytes, timeout)
        if not body:
            return
        batches = _opened(body, topic, partition, topic_id)
        try:
            messages = _with(offset, batches)
        except InvalidBatchError as damage:
            # The topic may have been created anew since its id was asked for.
            current_id = self._topics.refresh(topic).topic_id
            if current_id == topic_id:
                raise InvalidBatchError(f"at offset {offset}: {damage}; {records.DAMAGED}") from damage
            batches = _opened(body, topic, partition, current_id)
            messages = _with(offset, batches)
        first = messages[0].offset
        yield messages[offset - first :] if offset > first else messages
        with suppress(InvalidBatchError):  # it comes first in the next answer
            yield from batches

    def browse(self, topic: str) -> Iterator[Sequence[Message]]:
        """As ``Client.browse_pages``."""
        partitions = self._topics.refresh(topic).config.partitions
        ranges = [self.offsets(topic, partition) for partition in range(partitions)]
        for held in ranges:
            yield from self._browse_partition(held)

    def _browse_partition(self, held: PartitionRange) -> Iterator[Sequence[Message]]:
        offset = held.start
        while offset < held.end:
            asked_for = offset
            try:
                for messages in self._fetch(held.topic, held.partition, offset, FETCH_SIZE_BYTES, self._timeout):
                    offset = messages[-1].offset + 1
                    yield messages if offset <= held.end else messages[: held.end - messages[0].offset]
                    if offset >= held.end:
                        return
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

    def _ask_offset(self, topic: str, partition: int, where: str | int) -> tuple[int, int, int]:
        body = self._routes.ask_owner(
            topic, partition, lambda link: link.reader.repeat("offset", topic, partition, where, timeout=self._timeout)
        )
        words = body.split()
        if len(words) != 3 or not all(word.isdigit() for word in words):
            raise RemoteProtocolError(f"not an answer to offset: {body[:80]!r}")
        return int(words[0]), int(words[1]), int(words[2])


def _opened(body: bytes, topic: str, partition: int, topic_id: int) -> Iterator[list[Message]]:
    """Whole batches, a page at a time; sound ones before the damage is raised."""
    messages: list[Message] = []
    try:
        for batch in records.decode_raw(body, topic, partition, topic_id=topic_id):
            messages += records.decode_batch(batch, topic, partition)
            if len(messages) >= PAGE_MESSAGES:
                yield messages
                messages = []
    except InvalidBatchError:
        if messages:
            yield messages
        raise
    if messages:
        yield messages


def _with(offset: int, batches: Iterator[list[Message]]) -> list[Message]:
    """The page that holds an offset."""
    for messages in batches:
        if messages[-1].offset >= offset >= messages[0].offset:
            return messages
        if messages[0].offset > offset:
            raise RemoteProtocolError(f"offset {offset} asked for, {messages[0].offset} answered")
    raise RemoteProtocolError(f"offset {offset} asked for, lower ones answered")
