"""Free partitions of a consumer group go to their new owners: journaled first, under the next generation.

What all actions of the verb ``group`` share is here, too: the request, the entries of the journal, the limits.

*After a restart* members come back one after another. The partitions a member had before are kept for it for
``REJOIN_MS``: else the first member to come back would get all partitions, only to hand them over again.

*A consumer that must be the only one*, over several homes: one home, the group's anchor, grants that, under a number.
The registry fixes the anchor when a group first asks for it. All members join there; one of them, the *holder*, is
granted everything, and the others stand by. At another home a member joins under the number of its grant. A home that
hears of a newer grant lets go of whichever member had an older one, and refuses that from then on. So a member that is
taken for gone at the anchor, and is alive elsewhere, is fenced home by home: its successor consumes nothing before each
home has heard of its grant. It does so at once if the holder before it left in order.

Invariants:
    * a grant is journaled, at the anchor before the holder hears of it, at another home before it hands anything over;
    * numbers of grants only grow: they are kept as the generation of a place that no partition has (``GRANT``).
"""

from __future__ import annotations

import json
from itertools import chain
from typing import Any, Final, NamedTuple

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.broker.state.group_membership import GroupMembership, Member
from txmq.broker.state.group_offsets import PLACE_BYTES
from txmq.broker.verbs.access.fair_share import GROUP_SHARE, counted_user, journal_made, refuse_over_half
from txmq.errors import BadRequestError, GroupActiveError, OverloadedError, UnknownMemberError
from txmq.model import TopicPartition
from txmq.redo import entries

GRANT: Final = (0, 0)  # no topic has the id 0
REJOIN_MS = 1000  # members are back by then, and go on with what they had


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


def is_anchored(context: Context, strategy: str, member: Member) -> bool:
    """Whether a member must be the only owner of everything, and other homes have a part of that."""
    return context.cluster is not None and (strategy == "exclusive" or member.alone)


def grant_of(request: GroupRequest) -> int:
    """The grant under which a member joins; 0 if it has none."""
    return request.number("grant", 0, 0, (1 << 62) - 1)


def join_anchor(request: GroupRequest, membership: GroupMembership, member: Member) -> None:
    """A member comes to the anchor: one that was the holder before a restart, or was taken for gone, goes on."""
    membership.anchor = request.context.state.home
    known, grant = membership.members.get(member.name), grant_of(request)
    if member.name == membership.holder and known is not None and not known.is_of(member.incarnation):
        membership.grant = 0  # another process under the same name: the former one is fenced
    elif membership.grant == 0 and 0 < grant == request.context.state.saved.generation(request.group, GRANT):
        membership.holder, membership.grant = member.name, grant


def join_elsewhere(request: GroupRequest, name: str) -> None:
    """A member comes to another home under its grant.

    Raises:
        UnknownMemberError: there is a newer grant.
        GroupActiveError: the group has members that share.
    """
    context, grant = request.context, grant_of(request)
    newest = context.state.saved.generation(request.group, GRANT)
    if grant < newest:
        raise UnknownMemberError(f"group {request.group!r} has grant {newest} by now, not {grant}: join at its anchor")
    membership = context.groups.get(request.group)
    for other in [] if membership is None else [other for other in membership.members if other != name]:
        assert membership is not None
        if membership.anchor is None:
            raise GroupActiveError(f"group {request.group!r} has members that share its partitions")
        membership.leave(other)
        context.member_count -= 1
    if grant > newest:
        journal_owned(context, request.group, [[*GRANT, grant]])


def grant_next(context: Context, name: str, membership: GroupMembership) -> None:
    """At the anchor: give the holder the next grant."""
    newest, left = context.state.saved.generation(name, GRANT), context.pending_groups.left_in_order
    membership.grant = context.state.saved.next_generation(name, GRANT)
    membership.is_clean = newest == 0 or name in left
    left.discard(name)
    journal_owned(context, name, [[*GRANT, membership.grant]])
    membership.granted()


def leaves(context: Context, name: str, membership: GroupMembership, member: Member) -> None:
    """A member leaves in order; a holder has left the other homes before."""
    if membership.anchor == context.state.home and membership.holder == member.name and membership.grant:
        context.pending_groups.left_in_order.add(name)


def anchor_fields(context: Context, membership: GroupMembership, member: Member) -> dict[str, object]:
    """What a view says of the anchor; nothing at a broker that is alone."""
    if membership.anchor is None:
        return {}
    found: dict[str, object] = {"anchor": f"{membership.anchor:016x}"}
    if membership.anchor == context.state.home:
        is_holder = membership.holder == member.name
        found |= {"grant": membership.grant if is_holder else 0, "clean": is_holder and membership.is_clean}
    return found


def settle(context: Context, name: str, *, is_again: bool = False) -> None:
    """If members or topics changed, hand free partitions to their owners, journaled, and wake the members."""
    membership, pending = context.groups.get(name), context.pending_groups
    topics_seen = context.state.topics.changes
    if membership is None or not (membership.is_changed or membership.topics_seen != topics_seen or is_again):
        return
    pending.changed[name] = None
    if not membership.members:
        del context.groups[name]
        return
    _hand_over(context, name, membership)
    membership.topics_seen, membership.is_changed = topics_seen, False


def _hand_over(context: Context, name: str, membership: GroupMembership) -> None:
    membership.set_partitions(*_partitions(context, membership))
    if membership.anchor == context.state.home and membership.grant == 0:
        if _may_be_reclaimed(context, name, GRANT):
            context.pending_groups.unsettled[name] = None
            return
        grant_next(context, name, membership)
        note_owned(context, name, GRANT)
    saved, rows, starts = context.state.saved, [], []
    known, room_bytes = saved.topics_of(name), context.settings.groups_bytes_max - saved.size_bytes
    for slot, member in membership.due():
        place = place_of(context, slot)
        if place is not None and saved.is_new_to(name, place):
            if room_bytes < PLACE_BYTES:
                context.pending_groups.unsettled[name] = None
                continue  # it came into being since they joined; it is handed over when there is room
            room_bytes -= PLACE_BYTES
        if place is None:
            continue
        if (name, *place) in saved.held or _may_be_reclaimed(context, name, place):
            context.pending_groups.unsettled[name] = None
        else:
            is_later = place[0] in known or _was_made_later(context, place[0], membership.members[member])
            if is_later and saved.is_new_to(name, place):
                starts.append([*place, context.state.partitions_of[place[0]][place[1]].log_start, None])
            generation = saved.next_generation(name, place)
            membership.hand_over(slot, member, generation)
            note_owned(context, name, place)
            rows.append([*place, generation])
    journal_owned(context, name, rows)
    journal_offsets(context, name, starts)  # a partition made while the group was there begins at its first message


def _was_made_later(context: Context, topic_id: int, member: Member) -> bool:
    return context.state.topics.made_at(topic_id) > member.topics_since


def note_owned(context: Context, name: str, place: tuple[int, int]) -> None:
    """A member has had it since the restart: no other member may reclaim it."""
    if context.now_ms - context.started_ms < REJOIN_MS:
        context.owned_since_start.add((name, *place))


def _may_be_reclaimed(context: Context, name: str, place: tuple[int, int]) -> bool:
    """Whether a member of the broker's former incarnation may be about to come back with this partition."""
    if context.now_ms - context.started_ms >= REJOIN_MS or (name, *place) in context.owned_since_start:
        return False
    known = context.state.saved.named.get(name)
    return known is not None and known.generations.get(place, 0) > 0


def _partitions(context: Context, membership: GroupMembership) -> tuple[dict[str, int], dict[str, int]]:
    """How many partitions the topics have that members want, and their ids. Walks over what is wanted, once."""
    wanted = dict.fromkeys(chain.from_iterable(member.topics for member in membership.members.values()))
    found = list(filter(None, map(context.state.topics.find, wanted)))
    return (
        {topic.config.name: topic.config.partitions for topic in found},
        {topic.config.name: topic.topic_id for topic in found},
    )
