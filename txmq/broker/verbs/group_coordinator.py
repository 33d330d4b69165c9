"""The group coordinator: the verb ``group``, by which members join, send heartbeats and save offsets.

A member joins with the topics it wants, and sends heartbeats. A heartbeat lists the partitions that the member has
released. The answer lists the partitions that it may consume (each with its generation and saved offset) and those that
it must release. A heartbeat that names the ``view`` it knows waits until that changes. An offset is saved under the
generation that came with the partition; any other than the newest is refused, so that a member which slept through a
hand-over changes nothing.

Bodies and answers are JSON: ``[[topic, partition, generation], ...]`` and the like. Offsets are journaled, and so are
generations before a member gets them; members are not (``group_offsets``, ``group_membership``). ``partition_handover``
hands over free partitions.

*Operators* describe, list, reset and delete groups, and change what is deferred. A change must not meet a member that
knows the former value. So offsets are reset only while the group has no members, and a partition is handed over anew
when its text about deferred messages is changed.

Invariants:
    * a member hears of a partition only after its generation is durable;
    * a partition that a member had before a restart is given to no other member for a second, unless its member
      reclaims it;
    * an offset is saved only under the newest generation of its partition, by its owner, and in the order in which the
      owner looked (``order``); one that a transaction holds is not saved, and its partition not handed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from txmq.broker.client_connection import MEMBERS_OVER_MAX, ClientConnection
from txmq.broker.context import Context
from txmq.broker.state.group_membership import Beat, GroupMembership, Member, Owned
from txmq.broker.state.group_offsets import PLACE_BYTES, SavedGroup
from txmq.broker.verbs.access.audit_log import audit, refusal_of
from txmq.broker.verbs.access.authorizer import GROUP, READ, TOPIC, require, require_seen, sees
from txmq.broker.verbs.access.fair_share import GROUP_SHARE, counted_user, note_made
from txmq.broker.verbs.anchors import find_anchor, release_anchor
from txmq.broker.verbs.partition_handover import (
    GRANT,
    GroupRequest,
    anchor_fields,
    grant_of,
    is_anchored,
    join_anchor,
    join_elsewhere,
    journal_offsets,
    journal_owned,
    leaves,
    note_owned,
    place_of,
    refuse_over_bytes,
    refuse_over_groups,
    settle,
)
from txmq.errors import (
    BadRequestError,
    BrokerError,
    FencedError,
    GroupActiveError,
    OverloadedError,
    UnknownGroupError,
    UnknownMemberError,
    UnknownTopicError,
)
from txmq.log.history import LogHistory
from txmq.model import TopicPartition, is_valid_name
from txmq.protocol.group_rows import claimed_row, deferred_row, numbered_row, offset_row, slot_row, split_rows
from txmq.protocol.requests import Request
from txmq.redo import entries
from txmq.registry.assignors import ASSIGNORS

TIMEOUT_MS_MIN, TIMEOUT_MS_MAX, TIMEOUT_MS = 300, 600_000, 6000
WAIT_MS_MAX = 30_000
MEMBERS_MAX = 1000  # in one group
MEMBERS_OF_ALL_MAX = 100_000  # some 500 bytes each, and the names of what it wants
TOPICS_MAX = 1000  # that one member wants
SWEPT_A_TICK = 2000  # groups that are swept (``group_offsets``): some 5 ms
# How many wishes and partitions of groups are looked at in one tick when topics change, 0.2 us each; a group costs as
# much as 100, and one is looked at in any case.
WORK_A_TICK, GROUP_WORK = 20_000, 100


def group(context: Context, client: ClientConnection, request: Request) -> None:
    """Dispatch by action."""
    _, arguments, extensions, body, opaque = request
    action = _ACTIONS.get(arguments[0].decode())
    if action is None:
        raise BadRequestError(f"unknown action {arguments[0].decode()[:40]!r}; known: {', '.join(_ACTIONS)}")
    name = arguments[1].decode()
    if not is_valid_name(name) and not (action is _list_groups and name == "*"):
        raise BadRequestError(f"group name {name[:80]!r}: expected 1 to 200 of A-Z a-z 0-9 . _ -")
    words = {key.decode(): value.decode() for key, value in (extensions or {}).items()}
    action(GroupRequest(context, client, opaque, name, words, split_rows(body)))


# --- members ---------------------------------------------------------------------------------------------------------


def _join(request: GroupRequest) -> None:
    context, name = request.context, request.words.get("member", "")
    topics = tuple(dict.fromkeys(filter(None, request.words.get("topics", "").split(","))))
    strategy = request.words.get("strategy", "sticky")
    if not is_valid_name(name) or not topics or len(topics) > TOPICS_MAX or not all(map(is_valid_name, topics)):
        raise BadRequestError(f"join needs member=<name> and topics=<name>,<name>... (at most {TOPICS_MAX})")
    if strategy not in ASSIGNORS:
        raise BadRequestError(f"strategy={strategy[:40]}: expected one of {', '.join(ASSIGNORS)}")
    for topic in topics:
        require(context, request.client, READ, TOPIC, topic)
    timeout_ms = request.number("timeout", TIMEOUT_MS, TIMEOUT_MS_MIN, TIMEOUT_MS_MAX)
    member = Member(
        name, topics, timeout_ms, context.liveness.now_ms, request.client.name, alone="alone" in request.words
    )
    member.topics_since, member.incarnation = context.state.topics.changes, request.words.get("incarnation", "")
    if not is_anchored(context, strategy, member):
        _admit(request, strategy, member)
        return
    refuse_over_groups(request)
    known = context.pending_groups.anchors.get(request.group)
    if known is not None:
        _join_anchored(request, strategy, member, known)
    else:
        find_anchor(context, "group", request.group, lambda anchor: _join_anchored(request, strategy, member, anchor))


def _join_anchored(request: GroupRequest, strategy: str, member: Member, anchor: int | BrokerError) -> None:
    """The registry has said which home is the anchor."""
    if request.client.gone:
        return
    try:
        if isinstance(anchor, BrokerError):
            raise anchor
        if anchor not in request.context.state.registration.retired:  # else the registry is about to name another
            request.context.pending_groups.note_anchor(request.group, anchor)
        if anchor != request.context.state.home and grant_of(request) == 0:
            nothing: dict[str, Any] = {"view": 0, "members": 0, "assigned": [], "revoked": []}
            request.answer({**nothing, "anchor": f"{anchor:016x}"})
            return
        if anchor != request.context.state.home:
            join_elsewhere(request, member.name)
        _admit(request, strategy, member, anchor)
    except BrokerError as error:
        request.context.answer_from_state(request.client, request.opaque, error)


def _admit(request: GroupRequest, strategy: str, member: Member, anchor: int | None = None) -> None:
    context, name, topics = request.context, member.name, member.topics
    length = 2 if context.cluster is not None else 0  # of a row that tells what the member has at another home
    reclaimed = [claimed_row(row) for row in request.rows if len(row) != length]
    elsewhere = [slot_row(row) for row in request.rows if len(row) == length]
    membership = _membership(request, strategy)
    _refuse_beside_alone(request.group, membership, member)
    refuse_over_bytes(context, PLACE_BYTES * _new_places(request, topics))
    context.member_count += name not in membership.members
    if anchor == context.state.home:
        join_anchor(request, membership, member)
    elif anchor is not None:
        membership.anchor, membership.holder, membership.grant = anchor, name, grant_of(request)
    membership.join(member, strategy, _of_other_homes(context, elsewhere))
    _speaks_for(request, member)
    saved, continued = context.state.saved.named.get(request.group) or SavedGroup(), []
    for slot, generation, read in reclaimed:
        place = place_of(context, slot)
        if place is not None and generation > 0 and saved.generations.get(place) == generation:
            if read is not None and not _history_of(context, place).has_read(read[1], read[0]):
                continue  # it has read what this log never had: it begins anew, under another generation
            membership.reclaim(name, slot, generation)
            note_owned(context, request.group, place)
            continued.append(slot)
    membership.drop_all_but(name, continued)
    context.pending_groups.listen(request.group, membership, member.silent_ms)
    settle(context, request.group)
    _answer_view(request, membership.members[name])


def _membership(request: GroupRequest, strategy: str) -> GroupMembership:
    groups = request.context.groups
    membership = groups.get(request.group)
    if membership is None:
        refuse_over_groups(request)
        membership = groups[request.group] = GroupMembership()
        membership.user = counted_user(request.context, request.client)
        request.context.pending_groups.unsettled[request.group] = None  # it goes if no member joins
    if request.words["member"] not in membership.members:
        if len(membership.members) >= MEMBERS_MAX:
            raise OverloadedError(f"group {request.group!r} has {MEMBERS_MAX} members")
        if request.context.member_count >= MEMBERS_OF_ALL_MAX:
            raise OverloadedError(f"all groups together have {MEMBERS_OF_ALL_MAX} members")
    if membership.members and membership.strategy != strategy:
        raise BadRequestError(f"group {request.group!r} uses the strategy {membership.strategy}, not {strategy}")
    return membership


def _new_places(request: GroupRequest, topics: Iterable[str]) -> int:
    """How many partitions of these the group was never given."""
    state = request.context.state
    found = filter(None, map(state.topics.find, topics))
    return sum(
        state.saved.is_new_to(request.group, (topic.topic_id, number))
        for topic in found
        for number in state.partitions_of[topic.topic_id]
    )


def _refuse_beside_alone(group: str, membership: GroupMembership, newcomer: Member) -> None:
    others = [member for member in membership.members.values() if member.name != newcomer.name]
    if others and (newcomer.alone or any(member.alone for member in others)):
        raise GroupActiveError(f"group {group!r} has a member, and one of the two must be alone in its group")


def _heartbeat(request: GroupRequest) -> None:
    context, (membership, member) = request.context, _member(request)
    membership.heard(member.name, context.liveness.now_ms)
    _speaks_for(request, member)
    membership.release(member.name, [slot_row(row) for row in request.rows])
    settle(context, request.group)
    view = request.number("view", 0, 0, 1 << 31)
    wait_ms = request.number("wait", 0, 0, WAIT_MS_MAX)
    if view != member.version or wait_ms == 0 or context.stopping:
        _answer_view(request, member)
        return
    incarnation = request.words.get("incarnation", "")
    heartbeat = Beat(
        request.client, request.opaque, request.group, member.name, view, context.now_ms + wait_ms, incarnation
    )
    context.pending_groups.wait(heartbeat)


def _tell_elsewhere(request: GroupRequest) -> None:
    """A member tells which partitions of other homes it has: the strategy is asked about all of a topic."""
    context, (membership, member) = request.context, _member(request)
    membership.heard(member.name, context.liveness.now_ms)
    slots = _of_other_homes(context, [slot_row(row) for row in request.rows])
    membership.has_elsewhere(member.name, slots, is_more="more" in request.words)
    settle(context, request.group)
    request.answer({})


def _of_other_homes(context: Context, slots: Iterable[TopicPartition]) -> list[TopicPartition]:
    """Those that exist, and that this home does not hand out itself."""
    placed = {topic.topic.config.name: len(topic.homes) for topic in context.state.placed.values()}
    return [slot for slot in slots if slot[1] < placed.get(slot[0], 0) and place_of(context, slot) is None]


def _leave(request: GroupRequest) -> None:
    membership = request.context.groups.get(request.group)
    member = membership.members.get(request.words.get("member", "")) if membership is not None else None
    if membership is not None and member is not None and member.is_of(request.words.get("incarnation", "")):
        leaves(request.context, request.group, membership, member)
        membership.leave(member.name)
        request.context.member_count -= 1
        request.client.members.discard((request.group, member.name, member.incarnation))
        settle(request.context, request.group)
    request.answer({})


def _member(request: GroupRequest) -> tuple[GroupMembership, Member]:
    membership = request.context.groups.get(request.group)
    member = membership.members.get(request.words.get("member", "")) if membership is not None else None
    if membership is None or member is None:
        raise UnknownMemberError(f"group {request.group!r} does not know this member: join (again)")
    if not member.is_of(request.words.get("incarnation", "")):
        raise _fenced(request.group, member.name)
    return membership, member


def _speaks_for(request: GroupRequest, member: Member) -> None:
    client, spoken_for = request.client, (request.group, member.name, member.incarnation)
    member.connection = client.number
    if spoken_for not in client.members and len(client.members) >= client.members_bound:
        client.members = {
            (name, known.name, known.incarnation) for name, _, known in _members_over(request.context, client)
        }
        client.members_bound = 2 * len(client.members) + MEMBERS_OVER_MAX
    client.members.add(spoken_for)


def _fenced(group: str, member: str) -> FencedError:
    return FencedError(f"another process has joined group {group!r} as {member!r} since: each needs a name of its own")


def tick(context: Context) -> None:
    """Time has passed: members expire, topics came and went, beats that wait are answered."""
    pending, topics_seen = context.pending_groups, context.state.topics.changes
    for name, membership in pending.silences.take_due(context.liveness.now_ms):
        _listen(context, name, membership)
    unsettled, pending.unsettled = pending.unsettled, {}
    for name in unsettled:
        settle(context, name, is_again=True)
    if topics_seen != pending.topics_seen:
        pending.topics_seen, pending.outdated = topics_seen, list(context.groups)
    _settle_outdated(context)
    if not context.state.saved.is_swept:
        context.state.saved.sweep(SWEPT_A_TICK)
    changed, pending.changed = pending.changed, {}
    for name in changed:
        for heartbeat in pending.waiting(name):
            _answer_heartbeat(context, heartbeat)
    for heartbeat in pending.over.take_all() if context.stopping else pending.over.take_due(context.now_ms):
        _answer_heartbeat(context, heartbeat)


def _settle_outdated(context: Context) -> None:
    """Tell some groups of the topics that came and went; the others are told with the next ticks."""
    outdated, work = context.pending_groups.outdated, WORK_A_TICK
    while outdated and work > 0:
        name = outdated.pop()
        membership = context.groups.get(name)
        if membership is not None:
            wishes = sum(len(member.topics) for member in membership.members.values())
            work -= GROUP_WORK + wishes + len(membership.owned)
            settle(context, name)


def _listen(context: Context, name: str, membership: GroupMembership) -> None:
    """Let members go that fell silent; look again when the next one may have."""
    now_ms, membership.look_ms = context.liveness.now_ms, 0
    for member in membership.expired(now_ms):
        if not _is_unread(context, membership.members[member]):
            membership.leave(member)
            context.member_count -= 1
    if membership.members:
        due_ms = min(member.silent_ms for member in membership.members.values())
        context.pending_groups.listen(name, membership, max(due_ms, now_ms + 1))
    settle(context, name)


def _is_unread(context: Context, member: Member) -> bool:
    """Whether its requests may wait unread: the broker does not read its connection for now."""
    client = context.clients.get(member.connection)
    return client is not None and client.held


def _answer_heartbeat(context: Context, heartbeat: Beat) -> None:
    """Answer it if its time is over or its member has a new view."""
    membership = context.groups.get(heartbeat.group)
    member = membership.members.get(heartbeat.member) if membership is not None else None
    refusal = refusal_of(context, heartbeat.client, b"group", READ, GROUP, heartbeat.group)
    if heartbeat.client.gone:
        context.pending_groups.answered(heartbeat)
    elif refusal is not None:
        _refuse_heartbeat(context, heartbeat, refusal)
    elif member is None:
        error = UnknownMemberError(f"group {heartbeat.group!r} does not know this member: join (again)")
        _refuse_heartbeat(context, heartbeat, error)
    elif not member.is_of(heartbeat.incarnation):
        _refuse_heartbeat(context, heartbeat, _fenced(heartbeat.group, heartbeat.member))
    elif member.version != heartbeat.view or heartbeat.deadline_ms <= context.now_ms or context.stopping:
        context.pending_groups.answered(heartbeat)
        _answer_view(GroupRequest(context, heartbeat.client, heartbeat.opaque, heartbeat.group, {}, []), member)


def _refuse_heartbeat(context: Context, heartbeat: Beat, error: BrokerError) -> None:
    context.pending_groups.answered(heartbeat)
    context.answer_from_state(heartbeat.client, heartbeat.opaque, error)


def disconnected(context: Context, client: ClientConnection) -> None:
    """A connection is gone: its members have a moment to come back."""
    for name, membership, member in _members_over(context, client):
        membership.lost(member.name, context.liveness.now_ms)
        context.pending_groups.listen(name, membership, member.silent_ms)


def read_again(context: Context, client: ClientConnection) -> None:
    """A connection that was held is read from now on: the silence of its members begins anew."""
    for _, membership, member in _members_over(context, client):
        membership.heard(member.name, context.liveness.now_ms)


def _members_over(context: Context, client: ClientConnection) -> Iterator[tuple[str, GroupMembership, Member]]:
    for name, member, incarnation in client.members:
        membership = context.groups.get(name)
        known = membership.members.get(member) if membership is not None else None
        if (
            membership is not None
            and known is not None
            and known.is_of(incarnation)
            and known.connection == client.number
        ):
            yield name, membership, known


def _answer_view(request: GroupRequest, member: Member) -> None:
    context, membership = request.context, request.context.groups[request.group]
    owned, revoked = membership.view(member.name)
    saved = context.state.saved.named.get(request.group) or SavedGroup()
    assigned, logs = [], []
    for slot, generation in owned:
        place = place_of(context, slot)
        at = saved.offsets.get(place) if place is not None else None
        assigned.append([*slot, generation, at.offset if at else None, at.deferred if at else None])
        logs.append(None if place is None else _history_of(context, place).text)
    view = {"view": member.version, "members": len(membership.members), "assigned": assigned, "revoked": revoked}
    request.answer({**view, "logs": logs, **anchor_fields(context, membership, member)})


def _history_of(context: Context, place: tuple[int, int]) -> LogHistory:
    return context.state.partitions_of[place[0]][place[1]].history


# --- offsets ---------------------------------------------------------------------------------------------------------


def _save(request: GroupRequest) -> None:
    """Save offsets, ``[topic, partition, generation, offset, deferred]``; name refused ones, save the others."""
    context, name = request.context, request.words.get("member", "")
    membership = context.groups.get(request.group)
    order = request.number("order", 0, 0, (1 << 63) - 1)
    rows: list[list[Any]] = []
    owners: list[Owned] = []
    refused: list[list[Any]] = []
    for row in request.rows:
        stated = offset_row(row)
        slot = stated[:2]
        place = place_of(context, slot)
        owned = _owner(context, request.group, slot, place)
        if place is None or owned is None or (owned.member, owned.generation) != (name, stated.generation):
            refused.append([*slot, owned.generation if owned is not None else 0])
        elif (request.group, *place) in context.state.saved.held:
            refused.append([*slot, owned.generation])
        elif order and order <= owned.order:
            continue  # looked at before something newer was saved, and overtaken by it
        else:
            owners.append(owned)
            rows.append([*place, stated.offset, stated.deferred])
    refuse_over_bytes(context, context.state.saved.growth_bytes(request.group, rows))
    for owned in owners:
        owned.order = order
    if membership is not None and name in membership.members:
        membership.heard(name, context.liveness.now_ms)
    journal_offsets(context, request.group, rows)
    request.answer({"refused": refused})


def _owner(context: Context, group: str, slot: TopicPartition, place: tuple[int, int] | None) -> Owned | None:
    """The owner of the partition; None for one of a topic made anew, until ``settle`` hands it over."""
    membership = context.groups.get(group)
    owned = membership.owned.get(slot) if membership is not None else None
    if owned is None or place is None or context.state.saved.generation(group, place) != owned.generation:
        return None
    return owned


# --- operators -------------------------------------------------------------------------------------------------------


def _describe(request: GroupRequest) -> None:
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


def _list_groups(request: GroupRequest) -> None:
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


def _reset(request: GroupRequest) -> None:
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


def _change_deferred(request: GroupRequest) -> None:
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


def _delete(request: GroupRequest) -> None:
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


_ACTIONS: dict[str, Callable[[GroupRequest], None]] = {
    "join": _join, "heartbeat": _heartbeat, "elsewhere": _tell_elsewhere, "leave": _leave, "save": _save,
    "describe": _describe, "list": _list_groups, "reset": _reset, "deferred": _change_deferred, "delete": _delete,
}  # fmt: skip
