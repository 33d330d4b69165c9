"""Shared by the actions of the verb ``group``: the request, journal entries, limits."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.broker.verbs.access.fair_shares import GROUP_SHARE, counted_user, journal_made, refuse_over_half
from txmq.errors import BadRequestError, OverloadedError
from txmq.model import TopicPartition
from txmq.redo import entries


class GroupRequest(NamedTuple):
    """One request, parsed: the words of its line, and the rows of its body."""

    context: Context
    client: ClientConnection
    opaque: bytes
    group: str
    words: dict[str, str]
    rows: list[list[Any]]

    def answer(self, found: object) -> None:
        """Answer once everything accepted so far is durable."""
        self.context.answer_from_state(self.client, self.opaque, json.dumps(found).encode())

    def number(self, word: str, default: int, least: int, most: int) -> int:
        """A number among the words."""
        value = int(self.words.get(word, default))
        if not least <= value <= most:
            raise BadRequestError(f"{word}={value}: expected {least} to {most}")
        return value


def place_of(context: Context, slot: TopicPartition) -> tuple[int, int] | None:
    """The partition that a topic's name and a number stand for now."""
    partition = context.state.partitions.get((slot[0].encode(), b"%d" % slot[1]))
    return None if partition is None else (partition.topic_id, partition.number)


def journal_owned(context: Context, name: str, rows: list[list[Any]]) -> None:
    """Hand out generations, ``[topic id, partition, generation]``: durable before a member hears of them."""
    if rows:
        _note_new(context, name)
        context.group.add_entry(entries.json_entry(entries.HANDED_OVER, {"group": name, "owned": rows}))
        context.group.needs_sync = True
        context.state.saved.hand_over(name, rows, context.state.placed)


def journal_offsets(context: Context, name: str, rows: list[list[Any]]) -> None:
    """Save offsets, ``[topic id, partition, offset, deferred]``."""
    if not rows:
        return
    _note_new(context, name)
    fields = {"group": name, "offsets": rows, "time_ms": context.now_ms}
    context.group.add_entry(entries.json_entry(entries.SAVED, fields))
    context.group.needs_sync = True
    context.state.saved.save(name, rows, context.now_ms)


def _note_new(context: Context, name: str) -> None:
    """A group that is saved from now on is its first member's user's."""
    membership = context.groups.get(name)
    if membership is not None and name not in context.state.saved.named:
        journal_made(context, membership.user, GROUP_SHARE, name)


def refuse_over_bytes(context: Context, growth_bytes: int) -> None:
    """Refuse growth over ``groups_bytes_max``; a request that adds nothing passes.

    Raises:
        OverloadedError: says what makes room.
    """
    limit = context.settings.groups_bytes_max
    if growth_bytes > 0 and context.state.saved.size_bytes + growth_bytes > limit:
        raise OverloadedError(
            f"groups_bytes_max {limit} bytes are kept of consumer groups: delete those that nobody uses, "
            "txmq group delete"
        )


def refuse_over_groups(request: GroupRequest) -> None:
    """Refuse a new group over ``groups_max``, or a user's half of that: saved offsets are kept for ever.

    Raises:
        OverloadedError: says what makes room.
    """
    context, name = request.context, request.group
    saved, limit = context.state.saved.named, context.settings.groups_max
    if name in saved or name in context.groups:
        return
    user = counted_user(context, request.client)
    if user:
        of_user = sum(one.user == user and active not in saved for active, one in context.groups.items())
        refuse_over_half(context, request.client, GROUP_SHARE, limit, "groups_max", unsaved=of_user)
    if len(saved) + sum(active not in saved for active in context.groups) >= limit:
        raise OverloadedError(f"groups_max {limit} groups are kept: delete those that nobody uses, txmq group delete")
