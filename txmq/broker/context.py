"""The context of every verb: the state, the commit group in the making, and the effects for the shell.

Effects are collected while requests are taken in, and carried out by the shell in this order:
``ready`` (answers that may go out), ``reads`` (partition data to be fetched from disk and sent), ``closing``.
Answers that depend on the journal wait in a group; the pipeline hands groups back through ``written`` and ``durable``.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from txmq.broker.client_connection import ClientConnection
from txmq.broker.cluster.branch_asks import BranchAsks, Look, Reminder
from txmq.broker.cluster.cluster_view import ClusterView
from txmq.broker.commit.commit_group import CommitGroup
from txmq.broker.state.broker_identity import BrokerIdentity, Ids
from txmq.broker.state.check_backs import CheckBacks
from txmq.broker.state.deadlines import Deadlines, LivenessClock
from txmq.broker.state.decisions import Name
from txmq.broker.state.followers import Followers
from txmq.broker.state.group_membership import GroupMembership, PendingGroups
from txmq.broker.state.refusals import FailedLogins, RefusalLines
from txmq.broker.state.resolver_reports import Resources
from txmq.broker.state.state import State
from txmq.config import BrokerSettings
from txmq.errors import InvariantError
from txmq.log.partition import Partition
from txmq.protocol.answers import Reply, size_of
from txmq.runtime.ports import Random
from txmq.xid import TxId


class Read(NamedTuple):
    """An effect: fetch batches and send them as a ``value`` answer."""

    client: ClientConnection
    opaque: bytes
    partition: Partition
    offset: int
    size_bytes_max: int


class Lookup(NamedTuple):
    """An effect: find the offset for a time, and answer."""

    client: ClientConnection
    opaque: bytes
    partition: Partition
    time_ms: int


@dataclass(slots=True)
class Counters:
    """What ``stats`` shows; all since the broker started."""

    put_requests: int = 0
    put_bytes: int = 0
    duplicates: int = 0
    get_requests: int = 0
    get_bytes: int = 0
    get_empty: int = 0
    errors: int = 0
    violations: int = 0
    group_commits: int = 0
    syncs: int = 0
    committed: int = 0
    rolled_back: int = 0
    prepared: int = 0
    connections_opened: int = 0
    refused_disk_full: int = 0
    heuristics: int = 0
    shown_before_rows: int = 0
    checks: int = 0
    outbox_pages: int = 0
    logins: int = 0
    logins_failed: int = 0
    refused: int = 0
    audit_lost: int = 0


@dataclass(slots=True, eq=False)
class Context:
    """See the module's docstring.

    Attributes:
        random: draws the secrets of sessions.
        ids: draws the ids of topics and sessions.
        sessions_from: the lowest number of a session that this process issues.
        cluster: the other homes and the registry; None for a broker that is alone.
        address: where clients reach this broker; set by the shell.
        is_serving: False until the registry has said that this process leads the home.
        leads_never: this process is a replica that follows.
        now_ms: wall clock, set by the shell before it hands in requests.
        ticked_ms: when it was last seen that the process runs (``Core.tick``); far before ``now_ms``: it stood still.
        liveness: the clock by which the silence of peers is judged.
        leader_lsn: how far the leader's journal is forced, as far as was told.
        heard_ms, folded_lsn: of a replica: when the leader answered last, and how far its records are folded here.
        readable_from_lsn: when so much is folded, what was true when the leader was heard anew is known.
        full: groups that reached ``group_size_bytes_max`` and wait to be sealed, oldest first.
        undurable: sealed groups whose record is not durable yet, oldest first.
        unapplied: by partition, the newest durable group with messages that are not in the partition's files.
        lookups: effects: find the offset for a time.
        moved: partitions in memory whose end moved: their polls must be woken.
        waiting_polls: every ``get`` that waits, and its partition, until its time is over.
        checks: check-backs of half messages.
        answers_before_sync: whether plain puts and local transactions are answered before the sync.
        sessions_away: sessions whose connection was lost, until their next step (``session_expiry``).
        followers: replicas of this home, and what they ask for.
        groups: consumer groups that have members, by name.
        member_count: of all groups.
        pending_groups: heartbeats that wait, and groups that must be looked at.
        resources: the reports of resolvers about databases.
        branch_asks: what other homes are asked about branches here.
        failed_logins: how often logins of each address failed.
        late_refusals: answers to failed logins, until their time.
        refusal_lines: which refusals are written.
        alarms: effects: errors that an operator must see, as fields of a log line.
        audited: effects: who did, or was refused, what, as fields of a log line (``verbs/access/audit_log.py``).
        disk_full: set by the shell (``Store.is_full``): puts and prepares are refused.
    """

    identity: BrokerIdentity
    settings: BrokerSettings
    state: State
    random: Random
    ids: Ids
    cluster: ClusterView | None = None
    address: str = ""
    is_serving: bool = True
    leads_never: bool = False
    now_ms: int = 0
    ticked_ms: int = 0
    sessions_from: int = 1
    started_ms: int = 0
    heard_ms: int = 0
    leader_lsn: int = 0
    folded_lsn: int = 0
    readable_from_lsn: int = 0
    owned_since_start: set[tuple[str, int, int]] = field(default_factory=set)  # group and partition; see ``groups``
    group: CommitGroup = field(default_factory=CommitGroup)
    full: deque[CommitGroup] = field(default_factory=deque)
    undurable: list[CommitGroup] = field(default_factory=list)
    unapplied: dict[Partition, CommitGroup] = field(default_factory=dict)
    ready: list[ClientConnection] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    lookups: list[Lookup] = field(default_factory=list)
    moved: list[Partition] = field(default_factory=list)
    waiting_polls: Deadlines[tuple[Partition, Any]] = field(default_factory=lambda: Deadlines(_is_answered))
    clients: dict[int, ClientConnection] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    closing: list[ClientConnection] = field(default_factory=list)
    shell_figures: dict[str, int | float | str | bool] = field(default_factory=dict)
    checks: CheckBacks = field(init=False)
    branch_asks: BranchAsks = field(init=False)
    answers_before_sync: bool = field(init=False)
    sessions_away: Deadlines[Any] = field(default_factory=lambda: Deadlines(_is_over))
    followers: Followers = field(default_factory=Followers)
    groups: dict[str, GroupMembership] = field(default_factory=dict)
    member_count: int = 0
    pending_groups: PendingGroups = field(default_factory=PendingGroups)
    resources: Resources = field(default_factory=Resources)
    failed_logins: FailedLogins = field(default_factory=FailedLogins)
    late_refusals: Deadlines[Any] = field(default_factory=lambda: Deadlines(_is_over))
    refusal_lines: RefusalLines = field(default_factory=RefusalLines)
    alarms: list[dict[str, Any]] = field(default_factory=list)
    audited: list[dict[str, Any]] = field(default_factory=list)
    disk_full: bool = False
    stopping: bool = False
    liveness: LivenessClock = field(default_factory=LivenessClock)

    def __post_init__(self) -> None:
        self.checks = CheckBacks(self.state.transactions)
        self.branch_asks = BranchAsks(self._is_settled)
        self.answers_before_sync = self.settings.sync != "always"

    def _is_settled(self, look: Look | Reminder) -> bool:
        """Whether a branch is over: rolled back, or placed and reported; or needs no reminder any more."""
        if isinstance(look, Reminder):
            decided = self.state.decisions.incomplete.get(look.name)
            is_reported = look.is_committed and (decided is None or decided.homes.get(look.branch, True))
            return is_reported or self.now_ms >= look.until_ms
        return look.name not in self.state.transactions and look.name not in self.state.branch_parts.unreported

    @property
    def knows_users(self) -> bool:
        """Whether it is known who the users are, and that there may be none."""
        return self.is_serving or (self.leads_never and not self.why_not_readable())

    def why_not_readable(self) -> str:
        """Why a replica serves no readers just now: users may have been removed that it does not know of. Empty: it
        does."""
        if not self.heard_ms:
            return "this replica has yet to hear of its leader"
        silent_ms = self.now_ms - self.heard_ms
        if silent_ms > self.settings.replica_reads_ms_max:
            return f"this replica has heard nothing of its leader for {silent_ms / 1000:.0f} s"
        if self.folded_lsn < self.readable_from_lsn:
            return f"this replica has to catch up: {self.readable_from_lsn - self.folded_lsn} bytes"
        return ""

    def txid_of(self, name: Name) -> str:
        """The id of a transaction of this home, as text."""
        return str(TxId(self.identity.cluster, self.identity.node, *name))

    def joined_cluster(self) -> ClusterView:
        """The view of a broker that has a registry: what is called for it alone asks here."""
        if self.cluster is None:
            raise InvariantError("this broker has no registry")
        return self.cluster

    def answer(self, client: ClientConnection, opaque: bytes, reply: Reply) -> None:
        """Answer at once: only with what does not depend on a record that is not durable."""
        if client.gone:
            return
        client.unanswered.discard(opaque)
        client.given_bytes += len(reply) if isinstance(reply, bytes) else size_of(reply)
        client.out.append((opaque, reply))
        if not client.ready:
            client.ready = True
            self.ready.append(client)

    def close(self, client: ClientConnection) -> None:
        """Effect: close a connection once its answers are written."""
        client.closing = True
        self.closing.append(client)

    def answer_when_durable(self, client: ClientConnection, opaque: bytes, body: bytes = b"") -> None:
        """Answer 200 once everything accepted so far is durable, whatever ``sync`` says."""
        self.group.needs_sync = True
        self.group.waiters.append((client, opaque, body))

    def answer_as_configured(self, client: ClientConnection, opaque: bytes, body: bytes) -> None:
        """Answer 200 as ``sync`` says: once written, or once durable."""
        waiters = self.group.written_waiters if self.answers_before_sync else self.group.waiters
        waiters.append((client, opaque, body))

    def answer_from_state(self, client: ClientConnection, opaque: bytes, reply: Reply) -> None:
        """Answer with a value read from memory; while a commit group is not durable yet, wait for the newest one."""
        newest = self.newest_undurable()
        if newest is None:
            self.answer(client, opaque, reply)
        else:
            newest.needs_sync = True
            client.given_bytes += size_of(reply)
            newest.waiters.append((client, opaque, reply))

    def newest_undurable(self) -> CommitGroup | None:
        """The newest group whose record is not durable; None if all are."""
        if not self.group.is_empty:
            return self.group
        if self.full:
            return self.full[-1]
        return self.undurable[-1] if self.undurable else None

    def group_with_room(self) -> CommitGroup:
        """The group in the making, or a new one if it is full. Call it between entries that need not share a record.

        One group is one record: it stays far below what the journal can hold.
        """
        if self.group.size_bytes >= self.settings.group_size_bytes_max:
            self.full.append(self.group)
            self.group = CommitGroup()
        return self.group

    def queued_bytes(self) -> int:
        """Bytes accepted and not yet handed to the journal."""
        queued = self.group.size_bytes
        for group in self.full:
            queued += group.size_bytes
        return queued


def _is_answered(waiting: tuple[Partition, Any]) -> bool:
    return bool(waiting[1].done)


def _is_over(item: Any) -> bool:
    return bool(item.is_over)
