"""What a group has deferred, for operators: ``txmq retry list|show|redeliver|drop``.

Theory of operation. The group's saved offsets name what is deferred. A retry store on local disk, if its path is given,
and the log have the contents. A change replaces the text that was read by another one. The broker refuses it if the
text has changed meanwhile (``Groups.change_deferred``); then it is read again. Active members get the partitions anew,
with the changed text, and messages that they had under way there are delivered again.

Invariants:
    * a message is dropped at the broker before its content is: a crash in between leaves a stale row;
    * text that cannot be read is listed, and dropped only by ``drop_unreadable``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.client.consumer.consumed_partition import Waiting
from txmq.client.consumer.retry.deferred import parsed, text_of
from txmq.client.consumer.retry.retry_store import RetryStore, Stored
from txmq.client.consumer.retry.topic_store import RetryTopic
from txmq.errors import GroupActiveError, OffsetOutOfRangeError, StorageError, UnknownTopicError
from txmq.model import Message

if TYPE_CHECKING:
    from txmq.client.client import Client

ATTEMPTS_MAX = 10  # at a change, while members save another text each time
Deferred = dict[int, Waiting]


class Selection(NamedTuple):
    """Which messages are meant; None stands for all topics, partitions or offsets."""

    topic: str | None = None
    partition: int | None = None
    offset: int | None = None

    def holds(self, topic: str, partition: int, offset: int | None = None) -> bool:
        """Whether a partition, or a message, is meant."""
        wanted = (self.topic, self.partition, *(() if offset is None else (self.offset,)))
        given = (topic, partition, *(() if offset is None else (offset,)))
        return all(one is None or one == other for one, other in zip(wanted, given, strict=True))


class Row(NamedTuple):
    """One message: ``state`` is "waits", "blocked" (by an earlier one of its key), "stale" (the group does not name it)
    or "unreadable" (a partition whose text is not this version's; without an offset)."""

    topic: str
    partition: int
    offset: int | None
    state: str
    failures: int | None
    owner: str | None
    stored: Stored | None
    problem: str | None = None


class Retries:
    """See the module's docstring.

    Args:
        client: of the broker.
        group: whose.
        store: its retry store on this host, if there is one.
    """

    def __init__(self, client: Client, group: str, store: RetryStore | None = None) -> None:
        self._client, self._group, self._store = client, group, store

    def list(self, place: Selection) -> tuple[Row, ...]:
        """The deferred messages. Raises UnknownGroupError."""
        found: list[Row] = []
        rows = {(row.message.topic, row.message.partition, row.message.offset): row for row in self._stored()}
        for partition in self._partitions(place):
            slot = partition["topic"], partition["partition"]
            try:
                deferred = parsed(partition["deferred"])
            except StorageError as error:
                found.append(Row(*slot, None, "unreadable", None, partition["owner"], None, str(error)))
                rows = {at: row for at, row in rows.items() if at[:2] != slot}  # which of them it names is not known
                continue
            for offset, waiting in deferred.items():
                state, stored = "waits" if waiting.failures else "blocked", rows.pop((*slot, offset), None)
                if place.holds(*slot, offset):
                    found.append(Row(*slot, offset, state, waiting.failures, partition["owner"], stored))
        found += [Row(*at, "stale", row.attempts, None, row) for at, row in rows.items() if place.holds(*at)]
        return tuple(found)

    def _stored(self) -> tuple[Stored, ...]:
        return () if self._store is None else tuple(self._store.read(self._group))

    def _partitions(self, place: Selection) -> tuple[dict[str, Any], ...]:
        described = self._client.groups.describe(self._group)["partitions"]
        return tuple(row for row in described if row["deferred"] and place.holds(row["topic"], row["partition"]))

    def content(self, row: Row) -> Message | None:
        """The message; None if its content is neither in the store nor in the log nor in the retry topic."""
        if row.stored is not None:
            return row.stored.message
        if row.offset is None:
            return None
        try:
            found = self._client.fetch(row.topic, row.partition, row.offset)
        except (OffsetOutOfRangeError, UnknownTopicError):
            found = []
        if found:
            return found[0]
        texts = [part["deferred"] for part in self._partitions(Selection(row.topic, row.partition))]
        waiting = parsed(texts[0]).get(row.offset) if texts else None
        if waiting is None or waiting.copy is None:
            return None
        log = self._client.log_of(row.topic, row.partition)[1].log_at(row.offset)
        return RetryTopic(self._client, self._group, "").read(row.topic, row.partition, row.offset, waiting.copy, log)

    def redeliver(self, place: Selection) -> int:
        """Have messages delivered again at once, with all their retries before them; how many. Raises as ``drop``."""

        def begin_anew(deferred: Deferred, offsets: set[int]) -> None:
            for offset in offsets:
                deferred[offset].failures = min(deferred[offset].failures, 1)

        return len(self._change(place, begin_anew))

    def drop(self, place: Selection) -> int:
        """Forget messages, as if they had been acknowledged; how many.

        Raises:
            UnknownGroupError: as it says.
            StorageError: what is deferred cannot be read.
            GroupActiveError: members changed it each time, or a transaction holds it.
        """

        def forget(deferred: Deferred, offsets: set[int]) -> None:
            for offset in offsets:
                del deferred[offset]

        dropped = self._change(place, forget)
        for topic, partition, offset in dropped:
            if self._store is not None:
                self._store.remove(self._group, topic, partition, offset)
        return len(dropped)

    def drop_unreadable(self, place: Selection) -> int:
        """Forget what partitions have deferred under a text that cannot be read; of how many partitions."""
        texts = []
        for row in self._partitions(place):
            try:
                parsed(row["deferred"])
            except StorageError:
                texts.append([row["topic"], row["partition"], row["deferred"], None])
        if self._client.groups.change_deferred(self._group, texts):
            raise GroupActiveError("what is deferred has changed meanwhile: look again")
        return len(texts)

    def _change(self, place: Selection, change: Callable[[Deferred, set[int]], None]) -> set[tuple[str, int, int]]:
        changed: dict[tuple[str, int], set[int]] = {}
        for _ in range(ATTEMPTS_MAX):
            rows, meant = [], {}
            for row in self._partitions(place):
                slot, deferred = (row["topic"], row["partition"]), parsed(row["deferred"])
                offsets = {offset for offset in deferred if place.holds(*slot, offset)}
                if offsets and slot not in changed:
                    change(deferred, offsets)
                    rows.append([*slot, row["deferred"], text_of(sorted(deferred.items()))])
                    meant[slot] = offsets
            refused = {
                (row["topic"], row["partition"]) for row in self._client.groups.change_deferred(self._group, rows)
            }
            changed |= {slot: offsets for slot, offsets in meant.items() if slot not in refused}
            if not refused:
                return {(*slot, offset) for slot, offsets in changed.items() for offset in offsets}
        raise GroupActiveError(
            "what is deferred changes all the time, or a transaction holds it: stop the members first"
        )
