"""The operator's side of the verb ``group``: describe, list, reset, deferred, delete.

A change must not meet a member that knows the former value. So offsets are reset only while the group has no members,
and a partition is handed over anew when its text about deferred messages is changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from txmq.broker.state.group_membership import GroupMembership
from txmq.broker.state.group_offsets import SavedGroup
from txmq.broker.verbs.access.audit_log import audit
from txmq.broker.verbs.access.authorizer import GROUP, READ, TOPIC, require, require_seen, sees
from txmq.broker.verbs.access.fair_share import GROUP_SHARE, note_made
from txmq.broker.verbs.anchors import release_anchor
from txmq.broker.verbs.partition_handover import (
    GRANT,
    GroupRequest,
    journal_offsets,
    journal_owned,
    place_of,
    refuse_over_bytes,
    refuse_over_groups,
    settle,
)
from txmq.errors import BadRequestError, GroupActiveError, UnknownGroupError, UnknownTopicError
from txmq.model import TopicPartition
from txmq.protocol.group_rows import deferred_row, numbered_row
from txmq.redo import entries


def describe(request: GroupRequest) -> None:
    """Members, and every partition of the topics that the group has anything to do with."""
    context = request.context
    require_seen(context, request.client, GROUP, request.group)
    membership = context.groups.get(request.group) or GroupMembership()
    saved = context.state.saved.named.get(request.group)
    topics = request.words.get("topics", "").split(",")
    if saved is None and not membership.members and topics == [""]:
        raise UnknownGroupError(f"no group {request.group!r} has members or saved offsets")
    members = [
        {
            "member": member.name, "client": member.client, "topics": member.topics, "timeout_ms": member.timeout_ms,
            "heard_ms_ago": context.liveness.now_ms - member.heard_ms, "connected": not member.lost,
        }
        for member in membership.members.values()
    ]  # fmt: skip
    rows = _described_partitions(request, saved or SavedGroup(), membership, topics)
    strategy = membership.strategy if members else None
    found = {"group": request.group, "strategy": strategy, "members": members, "partitions": rows}
    request.answer({**found, **_began(request, saved or SavedGroup())})


def _is_shown(request: GroupRequest, topic: str) -> bool:
    return sees(request.context, request.client, TOPIC, topic)


def _began(request: GroupRequest, saved: SavedGroup) -> dict[str, Any]:
    """Where the group began, for the members at other homes; nothing at a broker that is alone."""
    topics = request.context.state.topics
    began = {
        topic.config.name: saved.began[topic.topic_id]
        for topic in topics
        if topic.topic_id in saved.began and _is_shown(request, topic.config.name)
    }
    return {"began": began} if began else {}


def _described_partitions(
    request: GroupRequest, saved: SavedGroup, membership: GroupMembership, topics: Iterable[str]
) -> list[dict[str, Any]]:
    """Every partition of ``topics``, and of those that the group reads: one that no member has read has lag, too."""
    context, rows = request.context, []
    held = context.state.saved.held
    ids = {topic_id for topic_id, _ in (*saved.offsets, *saved.generations)}
    names = {*topics, *(topic for member in membership.members.values() for topic in member.topics)}
    for topic in context.state.topics:
        if (topic.topic_id not in ids and topic.config.name not in names) or not _is_shown(request, topic.config.name):
            continue
        for partition in context.state.partitions_of[topic.topic_id].values():
            place, slot = (topic.topic_id, partition.number), (topic.config.name, partition.number)
            at, owned = saved.offsets.get(place), membership.owned.get(slot)
            start, end = partition.log_start, partition.high_watermark
            holder = held.get((request.group, *place))
            rows.append(
                {
                    "topic": slot[0], "partition": slot[1], "owner": owned.member if owned else None,
                    "generation": saved.generations.get(place, 0), "offset": at.offset if at else None,
                    "saved_ms": at.time_ms if at else None, "start": start, "end": end,
                    "lag": end - max(start, min(at.offset if at else start, end)),
                    "deferred": at.deferred if at else None, "held_by": context.txid_of(holder) if holder else None,
                }
            )  # fmt: skip
    return rows


def list_groups(request: GroupRequest) -> None:
    """Every group that has members or saved offsets."""
    context = request.context
    known = sorted({*context.state.saved.named, *context.groups})
    names = [name for name in known if sees(context, request.client, GROUP, name)]
    request.answer(
        {
            "groups": [
                {"group": name, "members": len(context.groups[name].members) if name in context.groups else 0}
                for name in names
            ]
        }
    )


def reset(request: GroupRequest) -> None:
    """Set offsets: ``[topic, partition, offset]``; only while the group has no members.

    The group must exist, or the request say ``create``: a slip in the name would make a group that no consumer joins.
    """
    context = request.context
    _refuse_active(request)
    known = context.state.saved.named.get(request.group)
    saved, rows = known or SavedGroup(), list[list[Any]]()
    for row in request.rows:
        slot, offset = numbered_row(row)
        require(context, request.client, READ, TOPIC, slot[0])
        place = place_of(context, slot)
        if place is None:
            raise UnknownTopicError(f"no partition {slot[1]} of topic {slot[0][:80]!r}")
        at = saved.offsets.get(place)
        rows.append([*place, offset, at.deferred if at else None])  # deferred messages are not forgotten by a reset
    if known is None and "create" not in request.words:
        raise UnknownGroupError(
            f"no group {request.group!r} has saved offsets; create (--create) makes one that begins there"
        )
    refuse_over_groups(request)
    refuse_over_bytes(context, context.state.saved.growth_bytes(request.group, rows))
    if known is None and rows:
        note_made(context, request.client, GROUP_SHARE, request.group)
    journal_offsets(context, request.group, rows)
    # A member that was taken for gone, and comes back with its partitions, must not go on at its former offset.
    following = context.state.saved.next_generation
    owned = [[*row[:2], following(request.group, (row[0], row[1]))] for row in rows]
    journal_owned(context, request.group, owned)
    _audit(request, "group reset", len(rows))
    request.answer({})


def change_deferred(request: GroupRequest) -> None:
    """Change the deferred messages of a partition: ``[topic, partition, known, wanted]``.

    A row is refused, with the current text, if that is not ``known``. A partition that has an owner is handed over
    anew: the owner knows the former text, and would save that.
    """
    context, membership = request.context, request.context.groups.get(request.group)
    state = context.state.saved
    saved = state.named.get(request.group) or SavedGroup()
    rows: list[list[Any]] = []
    slots: list[TopicPartition] = []
    refused: list[list[Any]] = []
    for row in request.rows:
        slot, known, wanted = deferred_row(row)
        require(context, request.client, READ, TOPIC, slot[0])
        place = place_of(context, slot)
        at = saved.offsets.get(place) if place is not None else None
        if place is None or at is None:
            raise BadRequestError(f"nothing is saved of partition {slot[1]} of topic {slot[0][:80]!r}")
        if at.deferred != known or (request.group, *place) in state.held:
            refused.append([*slot, at.deferred])
            continue
        rows.append([*place, at.offset, wanted])
        slots.append(slot)
    refuse_over_bytes(context, state.growth_bytes(request.group, rows))
    if membership is not None:
        for slot in slots:
            membership.take_back(slot)
    journal_offsets(context, request.group, rows)
    # Also if it has no owner: a member that was taken for gone may come back with the former text.
    journal_owned(
        context, request.group, [[*row[:2], state.next_generation(request.group, (row[0], row[1]))] for row in rows]
    )
    settle(context, request.group)
    if rows:
        _audit(request, "group's deferred messages changed", len(rows))
    request.answer({"refused": refused})


def delete(request: GroupRequest) -> None:
    """Forget a group without members; its highest generation is kept."""
    context = request.context
    _refuse_active(request)
    if request.group not in context.state.saved.named:
        raise UnknownGroupError(f"no group {request.group!r} has saved offsets")
    context.group.add_entry(entries.json_entry(entries.GROUP_DELETED, {"group": request.group}))
    context.group.needs_sync = True
    offsets = context.state.saved.named[request.group].offsets
    _audit(request, "group deleted", sum(context.state.partition(*place) is not None for place in offsets))
    has_grants = context.state.saved.generation(request.group, GRANT) > 0
    context.state.saved.delete(request.group)
    context.state.principals.unmade(GROUP_SHARE, request.group)
    context.pending_groups.forget(request.group)
    if has_grants:
        release_anchor(context, "group", request.group)  # if it is this home
    request.answer({})


def _audit(request: GroupRequest, event: str, partitions: int) -> None:
    audit(request.context, request.client, event, group=request.group, partitions=partitions)


def _refuse_active(request: GroupRequest) -> None:
    membership = request.context.groups.get(request.group)
    if membership is not None and membership.members:
        raise GroupActiveError(f"group {request.group!r} has {len(membership.members)} members; stop them first")
    held = [held for held in request.context.state.saved.held.items() if held[0][0] == request.group]
    if held:
        txid = request.context.txid_of(held[0][1])
        raise GroupActiveError(f"transaction {txid} holds offsets of group {request.group!r}; settle it first")
