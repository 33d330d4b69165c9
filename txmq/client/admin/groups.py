"""``client.groups``: list, describe, reset and delete consumer groups; and what they have deferred (``txmq retry``).

Each home has the members and offsets of its own partitions. What is read is put together; what is changed is first
checked at all homes, then applied at one home after another. A change that ends in between may be repeated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.client.consumer.consumed_partition import Waiting
from txmq.client.consumer.retry.deferred import parsed, text_of
from txmq.client.consumer.retry.retry_store import RetryStore, RetryTopic, Stored
from txmq.errors import (
    BrokerAwayError,
    ConnectionLostError,
    GroupActiveError,
    OffsetOutOfRangeError,
    PartialResultError,
    RequestTimeoutError,
    StorageError,
    TxmqError,
    UnavailableError,
    UnknownGroupError,
    UnknownTopicError,
)
from txmq.model import Message
from txmq.protocol.group_rows import in_pieces
from txmq.protocol.json_text import Fields, json_object

if TYPE_CHECKING:
    from txmq.client.client import Client
    from txmq.client.home_link import HomeLink
    from txmq.client.routes import Routes

FieldsList = list[Fields]
_AWAY = (ConnectionLostError, RequestTimeoutError, UnavailableError)
ATTEMPTS_MAX = 10  # at a change, while members save another text each time
Deferred = dict[int, Waiting]


class Groups:
    """Operators' view of consumer groups. Thread safety: any thread."""

    def __init__(self, routes: Routes, timeout: float) -> None:
        self._routes, self._timeout = routes, timeout

    def list(self) -> FieldsList:
        """Groups with members or saved offsets: ``group`` and number of ``members``.

        Raises:
            PartialResultError: homes of a cluster are away; it has the groups of the others.
        """
        answers, away = self._ask_all(self._routes.all_links(), "list", "*")
        members: dict[str, int] = {}
        for answer in answers.values():
            for row in answer["groups"]:
                members[row["group"]] = max(members.get(row["group"], 0), row["members"])
        found = [{"group": group, "members": members[group]} for group in sorted(members)]
        if away:
            raise PartialResultError(f"{', '.join(away)} did not answer: not all groups are listed", found, away)
        return found

    def describe(self, group: str) -> Fields:
        """Members, and owner, generation, offset, start, end and lag of each partition.

        With several homes ``away`` names those that do not answer: what they have is missing.

        Raises:
            UnknownGroupError: it has neither members nor saved offsets.
        """
        links = self._routes.all_links()
        answers, away = self._ask_all(links, "describe", group)
        if len(links) == 1:
            return next(iter(answers.values()))
        topics = {row["topic"] for answer in answers.values() for row in answer["partitions"]}
        if topics:  # a home that has handed out nothing of a topic lists it if it is asked for
            words = {"topics": ",".join(sorted(topics))}
            answers, away = self._ask_all(links, "describe", group, words)
        return {**_merged(group, list(answers.values())), "away": away}

    def reset(self, group: str, offsets: Iterable[Sequence[Any]], *, create: bool = False) -> None:
        """Set the offsets from which a group continues.

        Args:
            offsets: rows of topic, partition and offset.
            create: create the group if it does not exist.

        Raises:
            UnknownGroupError: the group has no saved offsets, and ``create`` is not set.
            UnknownTopicError: there is no such topic or partition.
            GroupActiveError: the group has members; stop them first.
            BrokerAwayError: a home is away; the text says at which homes it was done before.

        Durability: durable in the broker when this returns; of more than 1,000 rows, or of several homes, some may be
        when it raises. Repeat it then.
        """
        links = self._routes.all_links()
        if len(links) == 1:
            self._apply("reset", group, {links[0]: list(offsets)}, **({"create": None} if create else {}))
            return
        rows = self._by_home(offsets)
        self._refuse_active(group, links, create=create)
        self._apply("reset", group, rows, create=None)

    def change_deferred(self, group: str, rows: Iterable[Sequence[Any]]) -> FieldsList:
        """Change what is deferred, also while members are active: they get those partitions anew.

        Args:
            rows: topic, partition, the text there is, and the text there should be (``describe``: ``deferred``) each.

        Returns:
            Rows that were refused, because another text is there by now: ``topic``, ``partition``, ``deferred``.

        Durability: durable in the broker when this returns; of many rows some may be when it raises.
        """
        answers = self._apply("deferred", group, self._by_home(rows))
        refused = [row for answer in answers for row in answer["refused"]]
        return [dict(zip(("topic", "partition", "deferred"), row, strict=True)) for row in refused]

    def delete(self, group: str) -> None:
        """Forget a group. Raises as ``describe`` and ``reset``. Durability: durable when this returns."""
        links: Sequence[HomeLink] = self._routes.all_links()
        if len(links) > 1:
            links = self._refuse_active(group, links)  # those that know it
        self._apply("delete", group, {link: [] for link in links})

    # --- homes -------------------------------------------------------------------------------------------------------

    def _by_home(self, rows: Iterable[Sequence[Any]]) -> dict[HomeLink, Sequence[Any]]:
        found: dict[HomeLink, Any] = {}
        for row in rows:
            found.setdefault(self._routes.link_for(row[0], row[1]), []).append(row)
        return found

    def _refuse_active(self, group: str, links: Sequence[HomeLink], *, create: bool = False) -> Sequence[HomeLink]:
        """Refuse a change that a home would refuse; the homes that know the group."""
        answers, away = self._ask_all(links, "describe", group, is_absent_allowed=create)
        if away:
            raise BrokerAwayError(f"{', '.join(away)} cannot be reached: nothing was changed")
        for answer in answers.values():
            if answer["members"]:
                raise GroupActiveError(f"group {group!r} has {len(answer['members'])} members; stop them first")
            for row in answer["partitions"]:
                if row["held_by"]:
                    raise GroupActiveError(
                        f"transaction {row['held_by']} holds offsets of group {group!r}; settle it first"
                    )
        return tuple(answers)

    def _ask_all(
        self, links: Sequence[HomeLink], action: str, group: str, words: Mapping[str, str] | None = None, *,
        is_absent_allowed: bool = False,
    ) -> tuple[dict[HomeLink, Fields], tuple[str, ...]]:  # fmt: skip
        """The answers of the homes that know the group, and the names of those that are away.

        Raises:
            UnknownGroupError: none knows it.
            ConnectionLostError, RequestTimeoutError, UnavailableError: none that answers knows it, and others do not
                answer.
        """
        answers: dict[HomeLink, Fields] = {}
        away: dict[HomeLink, TxmqError] = {}
        unknown: UnknownGroupError | None = None
        for link in links:
            try:
                answers[link] = self._ask(link, action, group, (), words or {})
            except UnknownGroupError as error:
                unknown = error
            except _AWAY as error:
                away[link] = error
        if not answers and away:
            raise next(iter(away.values()))
        if not answers and unknown is not None and not is_absent_allowed:
            raise unknown
        return answers, tuple(self._routes.name_of(link) for link in away)

    def _apply(self, action: str, group: str, rows: Mapping[HomeLink, Sequence[Any]], **words: None) -> FieldsList:
        done: list[str] = []
        answers: FieldsList = []
        for link, of_home in rows.items():
            try:
                answers += [self._ask(link, action, group, piece, words) for piece in in_pieces(of_home)]
            except TxmqError as error:
                if not done:
                    raise
                raise type(error)(f"{error}; done at {', '.join(done)} before: repeat it") from error
            done.append(self._routes.name_of(link))
        return answers

    def _ask(
        self, link: HomeLink, action: str, group: str, rows: Sequence[Any], words: Mapping[str, str | None]
    ) -> Fields:  # fmt: skip
        body = [json.dumps(rows).encode()]
        return json_object(
            link.control.call("group", action, group, timeout=self._timeout, extensions=words, body=body)
        )


def _merged(group: str, answers: Sequence[Fields]) -> Fields:
    """One description of those of several homes. A member is known to every home that it has joined."""
    members: dict[str, Fields] = {}
    for answer in answers:
        for row in answer["members"]:
            known = members.setdefault(row["member"], row)
            members[row["member"]] = {
                **known, "connected": known["connected"] or row["connected"],
                "heard_ms_ago": min(known["heard_ms_ago"], row["heard_ms_ago"]),
            }  # fmt: skip
    partitions = [row for answer in answers for row in answer["partitions"]]
    return {
        "group": group,
        "strategy": next((answer["strategy"] for answer in answers if answer["strategy"] is not None), None),
        "members": [members[name] for name in sorted(members)],
        "partitions": sorted(partitions, key=lambda row: (row["topic"], row["partition"])),
    }


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
    """What a group has deferred, for operators: ``txmq retry list|show|redeliver|drop``.

    Theory of operation. The group's saved offsets name what is deferred. A retry store on local disk, if its path is
    given, and the log have the contents. A change replaces the text that was read by another one. The broker refuses it
    if the text has changed meanwhile (``Groups.change_deferred``); then it is read again. Active members get the
    partitions anew, with the changed text, and messages that they had under way there are delivered again.

    Invariants:
        * a message is dropped at the broker before its content is: a crash in between leaves a stale row;
        * text that cannot be read is listed, and dropped only by ``drop_unreadable``.

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
