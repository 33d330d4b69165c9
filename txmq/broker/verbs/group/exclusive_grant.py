"""A consumer that must be the only one, over several homes: one home, the group's anchor, grants that, under a number.

Theory of operation. The registry fixes the anchor when a group first asks for it. All members join there; one of them,
the *holder*, is granted everything, and the others stand by. At another home a member joins under the number of its
grant. A home that hears of a newer grant lets go of whichever member had an older one, and refuses that from then on.
So a member that is taken for gone at the anchor, and is alive elsewhere, is fenced home by home: its successor consumes
nothing before each home has heard of its grant. It does so at once if the holder before it left in order.

Invariants:
    * a grant is journaled, at the anchor before the holder hears of it, at another home before it hands anything over;
    * numbers of grants only grow: they are kept as the generation of a place that no partition has (``GRANT``).
"""

from __future__ import annotations

from typing import Final

from txmq.broker.context import Context
from txmq.broker.state.group_membership import GroupMembership, Member
from txmq.broker.verbs.group.group_request import GroupRequest, journal_owned
from txmq.errors import GroupActiveError, UnknownMemberError

GRANT: Final = (0, 0)  # no topic has the id 0


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
