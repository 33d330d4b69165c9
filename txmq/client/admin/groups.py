"""``client.groups``: list, describe, reset and delete consumer groups.

Each home has the members and offsets of its own partitions. What is read is put together; what is changed is first
checked at all homes, then applied at one home after another. A change that ends in between may be repeated.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from txmq.errors import (
    BrokerAwayError,
    ConnectionLostError,
    GroupActiveError,
    PartialResultError,
    RequestTimeoutError,
    TxmqError,
    UnavailableError,
    UnknownGroupError,
)
from txmq.protocol.group_rows import in_pieces
from txmq.protocol.json_text import Fields, json_object

if TYPE_CHECKING:
    from txmq.client.home_link import HomeLink
    from txmq.client.routes import Routes

FieldsList = list[Fields]
_AWAY = (ConnectionLostError, RequestTimeoutError, UnavailableError)


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
