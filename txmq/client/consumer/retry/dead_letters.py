"""Dead letters: messages that the group gave up, in the topic ``<group>.dead-letter``; and how they are sent again.

A dead letter is the message with its key, value, headers and tag, and headers that say why, from where and how often:
``txmq.dead.reason .topic .partition .offset .log .attempts .member``. If the content cannot come along,
``txmq.dead.value`` says why: ``null`` (the message had none), ``gone`` (retention removed it), ``too-large`` (with its
headers the broker would not take it; it is in the log at that offset, as long as retention leaves it there). ``batch``:
it is about a whole record batch that cannot be read, whose bytes are its value, unless they are too many; redrives
leave it out.

Invariants:
    * the dead letter is stored before the message is acknowledged: a crash in between leaves two of it, never none;
    * no message is too large for a dead letter, so none blocks its partition.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from txmq.client.consumer.options import DEAD_LETTERS_SUFFIX, REDRIVEN_SUFFIX
from txmq.client.partitioner import KeyHashSelector
from txmq.errors import (
    FencedError,
    OffsetOutOfRangeError,
    TooLargeError,
    TransactionStateError,
    UnknownGroupError,
    UnknownTopicError,
)
from txmq.log import records
from txmq.log.records import TAG_HEADER, RawBatch
from txmq.model import Message, Outcome, TopicPartition
from txmq.runtime.caller import run_alone
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.logging import Logger

if TYPE_CHECKING:
    from txmq.client.client import Client
    from txmq.client.producer.producer import Producer
    from txmq.client.transaction.block import Transaction

T = TypeVar("T")
HEADER = "txmq.dead."
VALUE = HEADER + "value"
REASON_BYTES_MAX = 1000
LogAt = Callable[[TopicPartition, int], str]  # ``AssignedPartitions.log_at``
KIND = "txmq.redrive"
REDRIVEN = "txmq.redriven"  # the header of a message that was redriven: of which dead letter
CHUNK_MESSAGES, CHUNK_BYTES = 100, 4 << 20
_LOOK_AGAIN_S = 0.01
Origin = tuple[str, int, int, str]  # topic, partition, offset, log


class TopicProducer:
    """A producer for one topic, made at the first message; what it sends joins no transaction block. Thread safety: any
    thread.
    """

    def __init__(self, client: Client, topic: str, **settings: Any) -> None:
        self._client, self._topic, self._settings = client, topic, settings
        self._producer: Producer | None = None

    def run(self, send: Callable[[Producer], T]) -> T:
        """Call ``send`` with the producer, alone: a block that rolls back takes nothing along."""
        if self._producer is None:
            self._client.topics.ensure(self._topic, **self._settings)
            self._producer = self._client.producer()
        return run_alone(partial(send, self._producer))

    def close(self) -> None:
        """Close the producer."""
        if self._producer is not None:
            self._producer.close()


class DeadLetters:
    """See the module's docstring. Thread safety: any thread."""

    def __init__(self, client: Client, group: str, member: str, log: Logger, log_at: LogAt = lambda *_: "") -> None:
        self.topic, self._member, self._log, self._log_at = group + DEAD_LETTERS_SUFFIX, member, log, log_at
        self._producer = TopicProducer(client, self.topic, storage="disk")

    def dead_letter(self, message: Message, failures: int, reason: str) -> None:
        """Send it to the dead-letter topic.

        Raises:
            TxmqError: the broker refused, or cannot be reached.

        Durability: in the broker's journal when this returns.
        """
        self._log.warning(
            "message becomes a dead letter", topic=message.topic, partition=message.partition, offset=message.offset,
            dead_letters=self.topic,
        )  # fmt: skip
        own = self._headers((message.topic, message.partition), message.offset, failures, reason)
        if message.value is None:
            own[VALUE] = b"null"
        try:
            self._send(message.value, message.key, {**message.headers, **own}, message.tag)
        except TooLargeError:
            self._send_without_reason(message, failures, reason, own)

    def _send_without_reason(self, message: Message, failures: int, reason: str, own: dict[str, bytes]) -> None:
        short = {name: text for name, text in own.items() if name not in (HEADER + "reason", HEADER + "member")}
        try:
            self._send(message.value, message.key, {**message.headers, **short}, message.tag)
        except TooLargeError:
            self._send(b"", None, {**own, VALUE: b"too-large"}, None)
            self._log.error(
                "a dead letter is too large: it names the message, which is in the log alone", topic=message.topic,
                partition=message.partition, offset=message.offset, dead_letters=self.topic,
            )  # fmt: skip

    def dead_letter_gone(self, slot: TopicPartition, offset: int, failures: int) -> None:
        """Send a dead letter about a message whose content is gone. As ``dead_letter``."""
        reason = "its content was gone, from the retry store and from the log, before it could be dealt with"
        self._send(b"", None, {**self._headers(slot, offset, failures, reason), VALUE: b"gone"}, None)

    def dead_letter_batch(self, slot: TopicPartition, batch: RawBatch, reason: str) -> None:
        """Send a dead letter about a batch that cannot be read, with its bytes. As ``dead_letter``."""
        own = {**self._headers(slot, batch.base_offset, 1, reason), VALUE: b"batch"}
        try:
            self._send(bytes(batch.content), None, own, None)
        except TooLargeError:
            self._send(b"", None, own, None)
        self._log.error(
            "a batch that cannot be read becomes a dead letter", topic=slot[0], partition=slot[1],
            offset=batch.base_offset, messages=batch.record_count, dead_letters=self.topic, error=reason,
        )  # fmt: skip

    def _headers(self, slot: TopicPartition, offset: int, failures: int, reason: str) -> dict[str, bytes]:
        fields = {
            "reason": reason, "topic": slot[0], "partition": slot[1], "offset": offset,
            "log": self._log_at(slot, offset), "attempts": failures, "member": self._member,
        }  # fmt: skip
        return {HEADER + name: str(value).encode()[:REASON_BYTES_MAX] for name, value in fields.items()}

    def _send(self, value: bytes | None, key: bytes | None, headers: Mapping[str, bytes], tag: str | None) -> None:
        self._producer.run(lambda made: made.send(self.topic, value or b"", key=key, headers=headers, tag=tag))

    def close(self) -> None:
        """Close the producer."""
        self._producer.close()


class DeadLetter(NamedTuple):
    """One dead letter: ``message`` is as it is in the dead-letter topic."""

    message: Message
    origin: Origin | None

    def header(self, name: str) -> str:
        """The text of a ``txmq.dead.`` header."""
        return self.message.headers.get(HEADER + name, b"").decode("utf-8", "replace")


class Redriven(NamedTuple):
    """What became of a dead letter.

    ``sent``, ``done`` before, ``gone``: there is no message to send, or ``foreign``: the group does not read its topic.
    """

    dead_letter: DeadLetter
    outcome: str


def dead_letter_of(message: Message) -> DeadLetter:
    """Read a record of a dead-letter topic; one that no consumer wrote has no origin."""
    found = DeadLetter(message, None)
    topic, partition, offset = map(found.header, ("topic", "partition", "offset"))
    if topic and partition.isdecimal() and offset.isdecimal():
        return found._replace(origin=(topic, int(partition), int(offset), found.header("log")))
    return found


class Redrive:
    """Sends dead letters again, each once, even if it is killed or runs twice: ``txmq dead-letter redrive``.

    Dead letters go out in transactions, and the topic ``<group>.dead-letter.redriven`` has the account in two kinds of
    records: before a transaction is committed, *begun* says which messages it will send under which txid; in the
    transaction itself, *done* says which it sent, so that both are visible or neither. Before it commits, a redrive
    reads the account up to its own *begun*, and settles each earlier *begun* of the same messages without a *done*: it
    asks the broker for that outcome with ``fence``, after which the transaction is committed or never will be. Messages
    that are done are left out. Of two that begin at the same time the later one in the log settles the earlier.

    The account is read when the redrive's own record in it is visible: then all before it is. The record waits if an
    earlier decision waits for a database that is away. An outcome that the broker no longer keeps (410) is final, but
    not known: another record is appended, and the account is read once more when that record is visible.

    Users who may write the dead-letter topic can put anything there, and a redrive has the rights of its operator. So
    it neither reads nor sends to a topic because a dead letter names it: the group reads that topic, as the broker
    knows, or the operator has named it.

    A message is known by where it came from, its log included (``txmq.log.history``: another topic of that name has
    other messages at its offsets): two dead letters of one message, because a consumer died in between, go out once.

    Invariants:
        * of all transactions that would send a message, at most one commits, but for ``again``;
        * nothing of a dead letter is changed: what was redriven is still there, and is shown as redriven.

    Thread safety: one thread.

    Args:
        client: of the broker.
        group: whose dead letters.
        topics: from which they may have come, besides those that the group reads.
    """

    def __init__(self, client: Client, group: str, topics: Collection[str] = ()) -> None:
        self._topics = topics
        self._client, self._group, self.topic = client, group, group + DEAD_LETTERS_SUFFIX
        self._account = self.topic + REDRIVEN_SUFFIX

    def dead_letters(self) -> Iterator[DeadLetter]:
        """Every dead letter, in order; none of a group that has no dead letters.

        Raises:
            UnknownGroupError: there is no such group, and no dead letters of one.
        """
        if self._has_dead_letters():
            yield from map(dead_letter_of, self._client.browse(self.topic))

    def _has_dead_letters(self) -> bool:
        try:
            self._client.topics.refresh(self.topic)
        except UnknownTopicError:
            self._client.groups.describe(self._group)
            return False
        return True

    def done(self) -> set[Origin]:
        """Origins of the messages that were redriven."""
        return {origin for kind, _, origins in self._records(None) if kind == "done" for origin in origins}

    def redrive(
        self, dead_letters: Iterable[DeadLetter], to: str | None = None, *, again: bool = False
    ) -> Iterator[Redriven]:
        """Send dead letters to where they came from, or to the topic ``to``; what became of each, once it is durable.

        Args:
            dead_letters: those to send; of several about one message the first is sent.
            to: another topic; there the key chooses the partition.
            again: also those that were redriven before.

        Raises:
            UnknownGroupError: as ``dead_letters``.
            TransactionStateError: another redrive of the same messages is being decided, or what it sent is not visible
                yet: run it again.
            OutcomeUnknownError, RolledBackError, ...: of the transaction; run it again, nothing goes out twice.
        """
        if not self._has_dead_letters():
            return
        self._client.topics.ensure(self._account, storage="disk", retention_ms=None, retention_size_bytes=None)
        seen: set[Origin] = set()
        known = self._read_topics()
        chunk: list[DeadLetter] = []
        for dead_letter in dead_letters:
            if dead_letter.origin is None or dead_letter.header("value") in ("gone", "batch"):
                yield Redriven(dead_letter, "gone")
            elif dead_letter.origin[0] not in known:
                yield Redriven(dead_letter, "foreign")
            elif dead_letter.origin in seen:
                yield Redriven(dead_letter, "done")
            else:
                seen.add(dead_letter.origin)
                chunk.append(dead_letter)
            if len(chunk) == CHUNK_MESSAGES or sum(map(_size, chunk)) >= CHUNK_BYTES:
                yield from self._redrive(chunk, to, again=again)
                chunk = []
        if chunk:
            yield from self._redrive(chunk, to, again=again)

    def _read_topics(self) -> set[str]:
        try:
            rows = self._client.groups.describe(self._group)["partitions"]
        except UnknownGroupError:
            rows = []
        return {*self._topics, *(row["topic"] for row in rows)}

    def _redrive(self, chunk: Sequence[DeadLetter], to: str | None, *, again: bool) -> list[Redriven]:
        with self._client.producer() as producer:
            found = [(dead_letter, self._content(dead_letter)) for dead_letter in chunk]
            origins = [dead_letter.origin for dead_letter, message in found if message is not None]
            if not origins:
                return [Redriven(dead_letter, "gone") for dead_letter in chunk]
            with producer.transaction() as tx:
                begun = self._begin(tx.txid, origins)
                crash_point("client.redrive.begun")
                done = set() if again else self._settled(tx.txid, begun, origins)
                results = []
                for dead_letter, message in found:
                    outcome = "gone" if message is None else "done" if dead_letter.origin in done else "sent"
                    results.append(Redriven(dead_letter, outcome))
                    if message is not None and outcome == "sent":
                        self._add(tx, dead_letter, message, to)
                sent = [result.dead_letter.origin for result in results if result.outcome == "sent"]
                if sent:
                    tx.add(self._account, 0, None, _json(tx.txid, sent), [(KIND, b"done")], self._client.clock.now_ms())
            crash_point("client.redrive.sent")
            return results

    def _begin(self, txid: str, origins: Sequence[Origin | None]) -> int:
        # Without a producer, which would join the open block. A repeat after a lost answer does no harm.
        record = (None, _json(txid, origins), [(KIND, b"begun")], self._client.clock.now_ms())
        control = self._client.routes.link_for(self._account, 0).control
        body = control.repeat("put", self._account, 0, body=[records.encode([record])], timeout=self._client.timeout)
        return int(body)

    def _settled(self, txid: str, begun: int, origins: Sequence[Origin | None]) -> set[Origin]:
        """Messages that earlier redrives have sent, once none of them may send more."""
        self._await_visible(begun)
        account = list(self._records(begun))
        finished = {txid for kind, txid, _ in account if kind == "done"}
        committed: set[Origin] = set()
        is_forgotten = False
        for kind, other, theirs in account:
            if kind != "begun" or other in finished or set(origins).isdisjoint(theirs):
                continue
            outcome = self._outcome(other)
            if outcome is Outcome.COMMITTED:
                committed.update(theirs)  # it is decided, and may not be visible yet
            is_forgotten = is_forgotten or outcome is None
        if is_forgotten:
            self._await_visible(self._begin(txid, origins))
        return committed | self.done()

    def _await_visible(self, offset: int) -> None:
        until = self._client.clock.monotonic() + self._client.timeout
        while self._client.offsets(self._account, 0).end <= offset:
            if self._client.clock.monotonic() >= until:
                raise TransactionStateError(
                    "what other redrives have sent is not visible yet: it waits for a transaction whose database is "
                    "away (txmq tx list); run it again"
                )
            self._client.clock.sleep(_LOOK_AGAIN_S)

    def _outcome(self, txid: str) -> Outcome | None:
        """Its final outcome; None if the broker no longer keeps it: then it will not commit any more."""
        try:
            outcome = self._client.transactions.fence(txid)
        except FencedError:
            return None
        if outcome is Outcome.UNKNOWN:
            raise TransactionStateError(
                f"another redrive of these dead letters is being decided (txid {txid}): run it again"
            )
        return outcome

    def _records(self, below: int | None) -> Iterator[tuple[str, str, list[Origin]]]:
        try:
            for record in self._client.browse(self._account):
                if below is not None and record.offset >= below:
                    return
                fields = json.loads(record.value or b"{}")
                yield record.headers[KIND].decode(), fields["txid"], [tuple(origin) for origin in fields["messages"]]
        except UnknownTopicError:
            return

    def _content(self, dead_letter: DeadLetter) -> Message | None:
        """The message as it was; None if its content is gone."""
        message = dead_letter.message
        if dead_letter.header("value") != "too-large":
            return message
        topic, partition, offset, log = dead_letter.origin or ("", 0, 0, "")
        try:
            if self._client.log_of(topic, partition)[1].log_at(offset) != log:
                return None
            found = self._client.fetch(topic, partition, offset)
        except (OffsetOutOfRangeError, UnknownTopicError):
            return None
        return found[0] if found else None

    def _add(self, tx: Transaction, dead_letter: DeadLetter, message: Message, to: str | None) -> None:
        topic, partition, *_ = dead_letter.origin or ("", 0)
        if to is not None:
            partitions = self._client.topics.known(to).config.partitions
            topic, partition = to, KeyHashSelector().partition_of(message.key, partitions) if message.key else 0
        headers = [(name, text) for name, text in message.headers.items() if not name.startswith(HEADER)]
        place = f"{dead_letter.message.topic}/{dead_letter.message.partition}/{dead_letter.message.offset}"
        headers = [*(header for header in headers if header[0] != REDRIVEN), (REDRIVEN, place.encode())]
        if message.tag is not None:
            headers.insert(0, (TAG_HEADER, message.tag.encode()))
        value = None if dead_letter.header("value") == "null" else message.value
        tx.add(topic, partition, message.key, value, headers, self._client.clock.now_ms())


def _json(txid: str, origins: Sequence[Origin | None]) -> bytes:
    return json.dumps({"txid": txid, "messages": origins}, separators=(",", ":")).encode()


def _size(dead_letter: DeadLetter) -> int:
    return len(dead_letter.message.value or b"") + len(dead_letter.message.key or b"")
