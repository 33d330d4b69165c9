"""Heartbeats that wait, and consumer groups that must be looked at: in memory only.

Invariant: a tick in which nothing happened touches no group, member, topic or heartbeat.
"""

from __future__ import annotations

from typing import Final

from txmq.broker.client_connection import ClientConnection
from txmq.broker.state.deadlines import Deadlines
from txmq.broker.state.group_membership import GroupMembership

ANCHORS_MAX: Final = 100_000


class Beat:
    """A heartbeat that waits for its member's view to change."""

    __slots__ = ("client", "deadline_ms", "group", "incarnation", "is_answered", "member", "opaque", "view")

    def __init__(
        self, client: ClientConnection, opaque: bytes, group: str, member: str, view: int, deadline_ms: int,
        incarnation: str,
    ) -> None:  # fmt: skip
        self.client, self.opaque, self.group, self.member = client, opaque, group, member
        self.view, self.deadline_ms, self.incarnation = view, deadline_ms, incarnation
        self.is_answered = False


class PendingGroups:
    """See the module's docstring.

    Attributes:
        unsettled: groups that are settled with the next tick: something could not be handed over, or one has no member.
        changed: groups whose members may have a new view.
        anchors: homes that the registry has fixed for groups: joining needs no registry then.
        left_in_order: groups whose holder left (``verbs/group/exclusive_grant``), and that have none since.
        topics_seen: how many changes of topics were seen.
        outdated: groups that have not seen all of them.
        silences: groups by the time at which a member may have been silent for too long (``silence_clock``).
        over: heartbeats by the time at which they are answered in any case.
    """

    def __init__(self) -> None:
        self.unsettled: dict[str, None] = {}
        self.changed: dict[str, None] = {}
        self.anchors: dict[str, int] = {}
        self.left_in_order: set[str] = set()
        self.topics_seen = -1
        self.outdated: list[str] = []
        self.silences: Deadlines[tuple[str, GroupMembership]] = Deadlines(lambda look: not look[1].members)
        self.over: Deadlines[Beat] = Deadlines(lambda heartbeat: heartbeat.is_answered)
        self._heartbeats: dict[str, dict[Beat, None]] = {}

    def listen(self, name: str, membership: GroupMembership, at_ms: int) -> None:
        """Check the group for silent members at that time, or earlier if an earlier time is set."""
        if not 0 < membership.look_ms <= at_ms:
            membership.look_ms = at_ms
            self.silences.add(at_ms, (name, membership))

    def note_anchor(self, group: str, home: int) -> None:
        """The registry has told of a group's anchor; it stays until the group is deleted there, or it is lost."""
        if len(self.anchors) >= ANCHORS_MAX and group not in self.anchors:
            del self.anchors[next(iter(self.anchors))]
        self.anchors[group] = home

    def lost_anchor(self, home: int) -> None:
        """A home is given up: the groups that it was the anchor of choose another."""
        self.anchors = {group: anchor for group, anchor in self.anchors.items() if anchor != home}

    def forget(self, group: str) -> None:
        """The group is deleted."""
        self.anchors.pop(group, None)
        self.left_in_order.discard(group)

    def wait(self, heartbeat: Beat) -> None:
        """A heartbeat waits."""
        self._heartbeats.setdefault(heartbeat.group, {})[heartbeat] = None
        self.over.add(heartbeat.deadline_ms, heartbeat)

    def waiting(self, group: str) -> list[Beat]:
        """The heartbeats of a group that wait."""
        return list(self._heartbeats.get(group, ()))

    def answered(self, heartbeat: Beat) -> None:
        """It waits no more."""
        heartbeat.is_answered = True
        waiting = self._heartbeats.get(heartbeat.group, {})
        waiting.pop(heartbeat, None)
        if not waiting:
            self._heartbeats.pop(heartbeat.group, None)
