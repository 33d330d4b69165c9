"""The verb ``group``: consumer groups, coordinated by the broker.

A member joins with the topics it wants, and beats: each heartbeat tells what it has released, and is answered with
what it may consume (each partition with its generation and saved offset) and what it must release. A heartbeat that
names the ``view`` it knows waits until that changes. Offsets are saved under the generation that came with the
partition; one that is not the newest is refused, so that a member which slept through a hand-over changes nothing.

Bodies and answers are JSON: ``[[topic, partition, generation], ...]`` and the like. Offsets, and generations before
anybody hears of them, are journaled; members are not (``saved``, ``membership``).

Invariants:
    * nobody hears of a partition before its generation is forced;
    * a partition that somebody had before a restart is given to nobody else for ``REJOIN_MS``, unless it is claimed;
    * an offset is saved only under the newest generation of its partition, by its owner, and in the order in which the
      owner looked (``order``); one that a transaction holds is not saved, and its partition not handed over;
    * offsets are reset only while the group has no members.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from txmq.broker.context import Context
from txmq.broker.listing import txid_of
from txmq.broker.membership import Member, Membership, Owned
from txmq.broker.peer import Peer
from txmq.broker.saved import SavedGroup
from txmq.errors import (
    BadRequestError,
    FencedError,
    GroupActiveError,
    OverloadedError,
    UnknownGroupError,
    UnknownMemberError,
)
from txmq.model import is_valid_name
from txmq.protocol import answers
from txmq.protocol.group_rows import aside_row, claim_row, slot_row, split_rows
from txmq.protocol.offsets import offset_row
from txmq.redo import entries
from txmq.registry.assignment import STRATEGIES, Slot

Extensions = dict[bytes, bytes] | None
TIMEOUT_MS_MIN, TIMEOUT_MS_MAX, TIMEOUT_MS = 300, 600_000, 6000
WAIT_MS_MAX = 30_000
REJOIN_MS = 1000  # after a restart: members are back by then, and go on with what they had
MEMBERS_MAX = 1000  # in one group
GROUPS_MAX = 10_000
TOPICS_MAX = 1000  # that one member wants


class Beat(NamedTuple):
    """A heartbeat that waits for its member's view to change."""

    peer: Peer
    opaque: bytes
    group: str
    member: str
    view: int
    deadline_ms: int
    life: str = ""


def group(
    context: Context, peer: Peer, arguments: list[bytes], extensions: Extensions, body: bytearray | None, opaque: bytes
) -> None:
    """Dispatch by action."""
    action = _ACTIONS.get(arguments[0].decode())
    if action is None:
        raise BadRequestError(f"unknown action {arguments[0].decode()[:40]!r}; known: {', '.join(_ACTIONS)}")
    name = arguments[1].decode()
    if not is_valid_name(name) and not (action is _list and name == "*"):
        raise BadRequestError(f"group name {name[:80]!r}: expected 1 to 200 of A-Z a-z 0-9 . _ -")
    words = {key.decode(): value.decode() for key, value in (extensions or {}).items()}
    action(_Request(context, peer, opaque, name, words, split_rows(body)))


class _Request(NamedTuple):
    context: Context
    peer: Peer
    opaque: bytes
    group: str
    words: dict[str, str]
    rows: list[list[Any]]

    def answer(self, found: object) -> None:
        """Once everything accepted so far is forced."""
        self.context.answer_settled(self.peer, self.opaque, json.dumps(found).encode())

    def number(self, word: str, default: int, least: int, most: int) -> int:
        """A number among the words."""
        value = int(self.words.get(word, default))
        if not least <= value <= most:
            raise BadRequestError(f"{word}={value}: expected {least} to {most}")
        return value


# --- members ---------------------------------------------------------------------------------------------------------


def _join(request: _Request) -> None:
    context, name = request.context, request.words.get("member", "")
    topics = tuple(filter(None, request.words.get("topics", "").split(",")))
    strategy = request.words.get("strategy", "sticky")
    if not is_valid_name(name) or not topics or len(topics) > TOPICS_MAX or not all(map(is_valid_name, topics)):
        raise BadRequestError(f"join needs member=<name> and topics=<name>,<name>... (at most {TOPICS_MAX})")
    if strategy not in STRATEGIES:
        raise BadRequestError(f"strategy={strategy[:40]}: expected one of {', '.join(STRATEGIES)}")
    timeout_ms = request.number("timeout", TIMEOUT_MS, TIMEOUT_MS_MIN, TIMEOUT_MS_MAX)
    claims = [claim_row(row) for row in request.rows]
    membership = _membership(request, strategy)
    member = Member(name, topics, timeout_ms, context.now_ms, request.peer.name, alone="alone" in request.words)
    member.topics_since, member.life = context.state.topics.next_id, request.words.get("life", "")
    _refuse_beside_alone(request.group, membership, member)
    membership.join(member, strategy)
    _speaks_for(request, member)
    saved, continued = context.state.saved.named.get(request.group) or SavedGroup(), []
    for slot, generation in claims:
        place = _place(context, slot)
        if place is not None and generation > 0 and saved.generations.get(place) == generation:
            membership.claim(name, slot, generation)
            _note_owned(context, request.group, place)
            continued.append(slot)
    membership.drop_unclaimed(name, continued)
    settle(context, request.group)
    _answer_view(request, membership.members[name])


def _membership(request: _Request, strategy: str) -> Membership:
    groups = request.context.groups
    membership = groups.get(request.group)
    if membership is None:
        if len(groups) >= GROUPS_MAX:
            raise OverloadedError(f"{GROUPS_MAX} groups have members")
        membership = groups[request.group] = Membership()
    if len(membership.members) >= MEMBERS_MAX and request.words["member"] not in membership.members:
        raise OverloadedError(f"group {request.group!r} has {MEMBERS_MAX} members")
    if membership.members and membership.strategy != strategy:
        raise BadRequestError(f"group {request.group!r} uses the strategy {membership.strategy}, not {strategy}")
    return membership


def _refuse_beside_alone(group: str, membership: Membership, newcomer: Member) -> None:
    others = [member for member in membership.members.values() if member.name != newcomer.name]
    if others and (newcomer.alone or any(member.alone for member in others)):
        raise GroupActiveError(f"group {group!r} has a member, and one of the two must be alone in its group")


def _heartbeat(request: _Request) -> None:
    context, (membership, member) = request.context, _member(request)
    membership.heard(member.name, context.now_ms)
    _speaks_for(request, member)
    membership.release(member.name, [slot_row(row) for row in request.rows])
    settle(context, request.group)
    view = request.number("view", 0, 0, 1 << 31)
    wait_ms = request.number("wait", 0, 0, WAIT_MS_MAX)
    if view != member.version or wait_ms == 0 or context.stopping:
        _answer_view(request, member)
        return
    life = request.words.get("life", "")
    beat = Beat(request.peer, request.opaque, request.group, member.name, view, context.now_ms + wait_ms, life)
    context.beats.append(beat)


def _leave(request: _Request) -> None:
    membership = request.context.groups.get(request.group)
    member = membership.members.get(request.words.get("member", "")) if membership is not None else None
    if membership is not None and member is not None and member.is_of(request.words.get("life", "")):
        membership.leave(member.name)
        request.peer.members.discard((request.group, member.name, member.life))
        settle(request.context, request.group)
    request.answer({})


def _member(request: _Request) -> tuple[Membership, Member]:
    membership = request.context.groups.get(request.group)
    member = membership.members.get(request.words.get("member", "")) if membership is not None else None
    if membership is None or member is None:
        raise UnknownMemberError(f"group {request.group!r} does not know this member: join (again)")
    if not member.is_of(request.words.get("life", "")):
        raise _fenced(request.group, member.name)
    return membership, member


def _speaks_for(request: _Request, member: Member) -> None:
    member.connection = request.peer.number
    request.peer.members.add((request.group, member.name, member.life))


def _fenced(group: str, member: str) -> FencedError:
    return FencedError(f"another process has joined group {group!r} as {member!r} since: each needs a name of its own")


def settle(context: Context, name: str) -> None:
    """Hand free partitions to their owners, journaled; wake the members whose view changed."""
    membership = context.groups.get(name)
    if membership is None:
        return
    if not membership.members:
        del context.groups[name]
        return
    membership.set_partitions(*_partitions(context, membership))
    saved, rows, starts = context.state.saved, [], []
    known = saved.topics_of(name)
    for slot, member in membership.due():
        place = _place(context, slot)
        if place is not None and (name, *place) not in saved.held and not _may_be_claimed(context, name, place):
            is_later = place[0] in known or place[0] >= membership.members[member].topics_since
            if is_later and saved.is_new_to(name, place):
                starts.append([*place, context.state.partitions_of[place[0]][place[1]].log_start, None])
            generation = saved.next_generation(name, place)
            membership.hand_over(slot, member, generation)
            _note_owned(context, name, place)
            rows.append([*place, generation])
    _journal_owned(context, name, rows)
    _journal_offsets(
        context, name, starts
    )  # what came into being while the group was there begins at its first message


def _note_owned(context: Context, name: str, place: tuple[int, int]) -> None:
    if context.now_ms - context.started_ms < REJOIN_MS:
        context.owned_since_start.add((name, *place))


def _may_be_claimed(context: Context, name: str, place: tuple[int, int]) -> bool:
    """Whether a member of the broker's former life may be about to come back with this partition.

    Else the first to come back would be given the partitions of all the others, only to hand them over again.
    """
    if context.now_ms - context.started_ms >= REJOIN_MS or (name, *place) in context.owned_since_start:
        return False
    known = context.state.saved.named.get(name)
    return known is not None and known.generations.get(place, 0) > 0


def _journal_owned(context: Context, name: str, rows: list[list[Any]]) -> None:
    if rows:
        context.group.add_entry(entries.encode_handed_over(json.dumps({"group": name, "owned": rows}).encode()))
        context.group.forced = True
        context.state.saved.hand_over(name, rows)


def _partitions(context: Context, membership: Membership) -> tuple[dict[str, int], dict[str, int]]:
    """How many partitions the topics have that somebody wants, and their ids."""
    wanted = {topic for member in membership.members.values() for topic in member.topics}
    found = [topic for topic in context.state.topics if topic.config.name in wanted]
    return (
        {topic.config.name: topic.config.partitions for topic in found},
        {topic.config.name: topic.topic_id for topic in found},
    )


def tick(context: Context) -> None:
    """Time has passed: members expire, topics came and went, beats that wait are answered."""
    for name, membership in list(context.groups.items()):
        for member in membership.expired(context.now_ms):
            membership.leave(member)
        settle(context, name)
    waiting, context.beats = context.beats, []
    context.beats.extend(beat for beat in waiting if not beat.peer.gone and not _answered(context, beat))


def _answered(context: Context, beat: Beat) -> bool:
    membership = context.groups.get(beat.group)
    member = membership.members.get(beat.member) if membership is not None else None
    if member is None:
        error = UnknownMemberError(f"group {beat.group!r} does not know this member: join (again)")
        context.send_settled(beat.peer, beat.opaque, answers.error(error, beat.opaque))
        return True
    if not member.is_of(beat.life):
        context.send_settled(beat.peer, beat.opaque, answers.error(_fenced(beat.group, beat.member), beat.opaque))
        return True
    if member.version == beat.view and beat.deadline_ms > context.now_ms and not context.stopping:
        return False
    _answer_view(_Request(context, beat.peer, beat.opaque, beat.group, {}, []), member)
    return True


def disconnected(context: Context, peer: Peer) -> None:
    """A connection is gone: its members have a moment to come back."""
    for name, member, life in peer.members:
        membership = context.groups.get(name)
        known = membership.members.get(member) if membership is not None else None
        if membership is not None and known is not None and known.is_of(life):
            membership.lost(member, peer.number, context.now_ms)


def _answer_view(request: _Request, member: Member) -> None:
    context, membership = request.context, request.context.groups[request.group]
    owned, revoked = membership.view(member.name)
    saved = context.state.saved.named.get(request.group) or SavedGroup()
    assigned = []
    for slot, generation in owned:
        place = _place(context, slot)
        at = saved.offsets.get(place) if place is not None else None
        assigned.append([*slot, generation, at.offset if at else None, at.aside if at else None])
    request.answer(
        {"view": member.version, "members": len(membership.members), "assigned": assigned, "revoked": revoked}
    )


# --- offsets ---------------------------------------------------------------------------------------------------------


def _save(request: _Request) -> None:
    """Save offsets: ``[topic, partition, generation, offset, aside]``; refused ones are named, the others are saved."""
    context, name = request.context, request.words.get("member", "")
    membership = context.groups.get(request.group)
    order = request.number("order", 0, 0, (1 << 63) - 1)
    rows: list[list[Any]] = []
    refused: list[list[Any]] = []
    for row in request.rows:
        stated = offset_row(row)
        slot = stated[:2]
        place = _place(context, slot)
        owned = _owner(context, request.group, slot, place)
        if place is None or owned is None or (owned.member, owned.generation) != (name, stated.generation):
            refused.append([*slot, owned.generation if owned is not None else 0])
        elif (request.group, *place) in context.state.saved.held:
            refused.append([*slot, owned.generation])
        elif order and order <= owned.order:
            continue  # looked at before something newer was saved, and overtaken by it
        else:
            owned.order = order
            rows.append([*place, stated.offset, stated.aside])
    if membership is not None and name in membership.members:
        membership.heard(name, context.now_ms)
    _journal_offsets(context, request.group, rows)
    request.answer({"refused": refused})


def _owner(context: Context, group: str, slot: Slot, place: tuple[int, int] | None) -> Owned | None:
    """Who has the partition. Nobody has that of a topic made anew, until ``settle`` hands it over."""
    membership = context.groups.get(group)
    owned = membership.owned.get(slot) if membership is not None else None
    if owned is None or place is None or context.state.saved.generation(group, place) != owned.generation:
        return None
    return owned


def _journal_offsets(context: Context, name: str, rows: list[list[Any]]) -> None:
    if not rows:
        return
    fields = {"group": name, "offsets": rows, "time_ms": context.now_ms}
    context.group.add_entry(entries.encode_saved(entries.json_body(fields)))
    context.group.forced = True
    context.state.saved.save(name, rows, context.now_ms)


def _place(context: Context, slot: Slot) -> tuple[int, int] | None:
    partition = context.state.partitions.get((slot[0].encode(), b"%d" % slot[1]))
    return None if partition is None else (partition.topic_id, partition.number)


# --- operators -------------------------------------------------------------------------------------------------------


def _describe(request: _Request) -> None:
    context = request.context
    membership = context.groups.get(request.group) or Membership()
    saved = context.state.saved.named.get(request.group)
    if saved is None and not membership.members:
        raise UnknownGroupError(f"no group {request.group!r} has members or saved offsets")
    members = [
        {
            "member": member.name, "client": member.client, "topics": member.topics, "timeout_ms": member.timeout_ms,
            "heard_ms_ago": max(0, context.now_ms - member.heard_ms), "connected": not member.lost,
        }
        for member in membership.members.values()
    ]  # fmt: skip
    rows = _described_partitions(request, saved or SavedGroup(), membership)
    strategy = membership.strategy if members else None
    request.answer({"group": request.group, "strategy": strategy, "members": members, "partitions": rows})


def _described_partitions(request: _Request, saved: SavedGroup, membership: Membership) -> list[dict[str, Any]]:
    """Every partition of the topics that the group has anything to do with: one that nobody has read has lag, too."""
    context, rows = request.context, []
    held = context.state.saved.held
    ids = {topic_id for topic_id, _ in (*saved.offsets, *saved.generations)}
    names = {topic for member in membership.members.values() for topic in member.topics}
    for topic in context.state.topics:
        if topic.topic_id not in ids and topic.config.name not in names:
            continue
        for partition in context.state.partitions_of[topic.topic_id]:
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
                    "aside": at.aside if at else None, "held_by": txid_of(context, holder) if holder else None,
                }
            )  # fmt: skip
    return rows


def _list(request: _Request) -> None:
    context = request.context
    names = sorted({*context.state.saved.named, *context.groups})
    request.answer(
        {
            "groups": [
                {"group": name, "members": len(context.groups[name].members) if name in context.groups else 0}
                for name in names
            ]
        }
    )


def _reset(request: _Request) -> None:
    """Set offsets: ``[topic, partition, offset]``; only while the group has no members."""
    context = request.context
    _refuse_active(request)
    rows: list[list[Any]] = []
    saved = context.state.saved.named.get(request.group) or SavedGroup()
    for row in request.rows:
        slot, offset = claim_row(row)
        place = _place(context, slot)
        if place is None:
            raise BadRequestError(f"no partition {slot[1]} of topic {slot[0][:80]!r}")
        at = saved.offsets.get(place)
        rows.append([*place, offset, at.aside if at else None])  # messages set aside are not forgotten by a reset
    _journal_offsets(context, request.group, rows)
    # Whoever was taken for gone, and comes back with what it held, must not go on where it was.
    following = context.state.saved.next_generation
    owned = [[*row[:2], following(request.group, (row[0], row[1]))] for row in rows]
    _journal_owned(context, request.group, owned)
    request.answer({})


def _set_aside(request: _Request) -> None:
    """Change what is aside: ``[topic, partition, known, wanted]``; refused, with what there is, where it is another.

    A partition that somebody has is taken from it and handed over anew: it knows the former text, and would save that.
    """
    context, membership = request.context, request.context.groups.get(request.group)
    state = context.state.saved
    saved = state.named.get(request.group) or SavedGroup()
    rows: list[list[Any]] = []
    refused: list[list[Any]] = []
    for row in request.rows:
        slot, known, wanted = aside_row(row)
        place = _place(context, slot)
        at = saved.offsets.get(place) if place is not None else None
        if place is None or at is None:
            raise BadRequestError(f"nothing is saved of partition {slot[1]} of topic {slot[0][:80]!r}")
        if at.aside != known or (request.group, *place) in state.held:
            refused.append([*slot, at.aside])
            continue
        rows.append([*place, at.offset, wanted])
        if membership is not None:
            membership.take_back(slot)
    _journal_offsets(context, request.group, rows)
    # Also where nobody has it: whoever was taken for gone may come back with what it knew.
    _journal_owned(
        context, request.group, [[*row[:2], state.next_generation(request.group, (row[0], row[1]))] for row in rows]
    )
    settle(context, request.group)
    request.answer({"refused": refused})


def _delete(request: _Request) -> None:
    context = request.context
    _refuse_active(request)
    if request.group not in context.state.saved.named:
        raise UnknownGroupError(f"no group {request.group!r} has saved offsets")
    context.group.add_entry(entries.encode_group_deleted(json.dumps({"group": request.group}).encode()))
    context.group.forced = True
    context.state.saved.delete(request.group)
    request.answer({})


def _refuse_active(request: _Request) -> None:
    membership = request.context.groups.get(request.group)
    if membership is not None and membership.members:
        raise GroupActiveError(f"group {request.group!r} has {len(membership.members)} members; stop them first")
    held = [held for held in request.context.state.saved.held.items() if held[0][0] == request.group]
    if held:
        txid = txid_of(request.context, held[0][1])
        raise GroupActiveError(f"transaction {txid} holds offsets of group {request.group!r}; settle it first")


_ACTIONS: dict[str, Callable[[_Request], None]] = {
    "join": _join, "heartbeat": _heartbeat, "leave": _leave, "save": _save, "describe": _describe, "list": _list,
    "reset": _reset, "aside": _set_aside, "delete": _delete,
}  # fmt: skip
