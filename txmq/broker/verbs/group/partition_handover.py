"""Free partitions of a consumer group go to their new owners: journaled first, under the next generation.

After a restart members come back one after another. The partitions a member had before are kept for it for
``REJOIN_MS``: else the first member to come back would get all partitions, only to hand them over again.
"""

from __future__ import annotations

from itertools import chain

from txmq.broker.context import Context
from txmq.broker.state.group_membership import GroupMembership, Member
from txmq.broker.state.group_offsets import PLACE_BYTES
from txmq.broker.verbs.group.exclusive_grant import GRANT, grant_next
from txmq.broker.verbs.group.group_request import journal_offsets, journal_owned, place_of

REJOIN_MS = 1000  # members are back by then, and go on with what they had


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
