"""The broker's core: requests in, replies and commit groups out. Deterministic: no socket, file, thread or clock;
random numbers are handed in.

The life of a request: the shell parses what one read brought (``protocol.requests``) and calls ``receive``. A verb
(``VERBS``) checks the request, moves assigned state, adds entries to the group in the making and leaves its reply
there. The commit pipeline (``commit/pipeline.py``) takes the group (``seal``) and has its record written, synced and
applied. It reports each of these: ``written`` releases the replies that ``sync = interval | never`` answers early,
``durable`` releases the others, ``applied`` moves the watermarks of all partitions in the record together. The shell
carries out the effects (``Context.ready``, ``reads``, ``lookups``).

Invariants:
    * an answer that reports durable state leaves after its record is durable. A refusal for what became of a
      transaction is such an answer;
    * watermarks move after the record is durable and its bytes are applied;
    * a request that is refused changed nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from txmq.broker.client_connection import ClientConnection
from txmq.broker.cluster.branch_asks import BranchAsk
from txmq.broker.cluster.cluster_view import ClusterView, DoubtfulUsersError, RegistryState
from txmq.broker.cluster.registry_asks import Ask, Result
from txmq.broker.commit.commit_group import Answer, CommitGroup
from txmq.broker.context import Context, Lookup, Read
from txmq.broker.state.broker_identity import BrokerIdentity, Ids
from txmq.broker.state.principals import of_nobody
from txmq.broker.state.state import State
from txmq.broker.verbs import (
    branch_resolving,
    check_backs,
    decide,
    fast_path,
    get,
    hello,
    prepare_commit,
    recover,
    registry_events,
    session_expiry,
    stats,
    topic,
)
from txmq.broker.verbs import group_coordinator as groups
from txmq.broker.verbs.access import auth
from txmq.broker.verbs.access.audit_log import refused
from txmq.broker.verbs.access.authorizer import doubt_users
from txmq.broker.verbs.access.required_grants import admit
from txmq.broker.verbs.access.users import acl, quota, user
from txmq.broker.verbs.cluster import cluster
from txmq.broker.verbs.fencing import token
from txmq.broker.verbs.follow import follow
from txmq.broker.verbs.outbox import outbox
from txmq.broker.verbs.put import put, take_puts
from txmq.broker.verbs.query import query
from txmq.broker.verbs.recover import parts
from txmq.broker.verbs.resource import reporter_of, resource
from txmq.config import BrokerSettings
from txmq.errors import (
    BrokerError,
    FencedError,
    InvariantError,
    OtherTokenError,
    OutboxConflictError,
    OverloadedError,
    StaleTopicError,
    TransactionConflictError,
    UnavailableError,
    UnknownQueryError,
    UnknownTopicError,
    UnknownTransactionError,
    UnknownUserError,
    UserExistsError,
)
from txmq.log.partition import Partition
from txmq.protocol.requests import Request, Violation
from txmq.redo import entries
from txmq.registry.cluster_metadata import NO_ACCESS, Access, HomeEntry, TopicMap
from txmq.runtime.ports import Random

REQUESTS_A_TURN = 1000  # of one connection, then the others' turn comes
ANSWERED_BYTES_A_TURN = 64 << 10  # the same: an outcome asked a thousand times has as many lines as its commit had

Verb = Callable[[Context, ClientConnection, Request], None]
VERBS: dict[bytes, Verb] = {
    b"put": put,
    b"get": get.get,
    b"offset": get.offset,
    b"meta": get.meta,
    b"hello": hello.hello,
    b"end": hello.end,
    b"prepare": fast_path.prepare,
    b"commit": fast_path.commit,
    b"rollback": prepare_commit.rollback,
    b"outcome": prepare_commit.outcome,
    b"decide": fast_path.decide,
    b"complete": fast_path.complete,
    b"forget": decide.forget,
    b"token": token,
    b"outbox": outbox,
    b"recover": recover.recover,
    b"parts": parts,
    b"checks": check_backs.checks,
    b"group": groups.group,
    b"query": query,
    b"resource": resource,
    b"topic": topic.topic,
    b"cluster": cluster,
    b"follow": follow,
    b"auth": auth.auth,
    b"user": user,
    b"acl": acl,
    b"quota": quota,
    b"stats": stats.stats,
    b"ping": hello.ping,
    b"version": hello.version,
    b"help": hello.help_,
    b"quit": hello.quit_,
}
"""Which function carries out which verb."""
_SERVED_BEFORE_LEADING = frozenset({b"hello", b"ping", b"stats", b"version", b"help", b"quit", b"cluster"})


def _waits_for_registry(_context: Context, _client: ClientConnection, _request: Request) -> None:
    raise UnavailableError(hello.WAITS_FOR_REGISTRY)


VERBS_BEFORE_LEADING = {
    name: verb if name in _SERVED_BEFORE_LEADING else _waits_for_registry for name, verb in VERBS.items()
}
LONG_ANSWERS = frozenset(
    {
        b"get", b"meta", b"recover", b"parts", b"checks", b"group", b"query", b"resource", b"topic", b"cluster",
        b"stats", b"help", b"user", b"acl", b"quota",
    }
)  # fmt: skip
_CHECKPOINT = entries.frame(entries.CHECKPOINT, b"")
TELL_A_STATE = (
    TransactionConflictError, UnknownTransactionError, UnknownQueryError, FencedError, UserExistsError,
    UnknownUserError, OtherTokenError, OutboxConflictError,
)  # fmt: skip


class Core:
    """See the module's docstring. One thread at a time."""

    def __init__(
        self, identity: BrokerIdentity, settings: BrokerSettings, state: State, now_ms: int, random: Random,
        ids: Ids | None = None, cluster: ClusterView | None = None,
    ) -> None:  # fmt: skip
        self.context = Context(identity, settings, state, random, ids or state, cluster, now_ms=now_ms)
        # The directory may be an older copy: what was issued after the copy is below this time, and not issued again.
        self.context.sessions_from = now_ms if state.epoch > (cluster is None) else 1  # alone, this life has begun
        self._next_client = 1
        self.context.ticked_ms = now_ms
        self._group_size_bytes_max = settings.group_size_bytes_max
        self._verbs = VERBS
        self._resumed: list[ClientConnection] = []
        if cluster is None:
            self._begin(now_ms)
        else:
            self._verbs, self.context.is_serving = VERBS_BEFORE_LEADING, False
            cluster.since_ms = now_ms

    def _begin(self, now_ms: int) -> None:
        """Requests are served from now on."""
        self.context.started_ms = now_ms
        for session in self.state.sessions.values():
            session.gone_ms = now_ms  # its owner has from now on to come back before others settle what it prepared
            session_expiry.went_away(self.context, session)
        for _, transaction in self.state.prepared.behind(0):
            check_backs.prepared(self.context, transaction)
        branch_resolving.began(self.context)

    # --- the registry ------------------------------------------------------------------------------------------------

    def led(self, topic_map: TopicMap, homes: Sequence[HomeEntry], access: Access = NO_ACCESS) -> None:
        """The registry has said that this process leads the home; requests are served from now on, to its users.

        The caller has journaled that (``Recovered.lead``).
        """
        registry_events.led(self.context)
        registry_events.access_changed(self.context, access, is_anew=True)
        registry_events.changed(self.context, topic_map, homes)
        self._verbs, self.context.is_serving = VERBS, True
        self._begin(self.context.now_ms)

    def registry_changed(self, topic_map: TopicMap, homes: Sequence[HomeEntry], access: Access | None = None) -> None:
        """Topics, homes or users changed, or may have."""
        registry_events.access_changed(self.context, access)
        registry_events.changed(self.context, topic_map, homes)
        self._execute_parked()

    def registry_answered(self, number: int, result: Result) -> None:
        """The result of an ask (``take_registry_asks``)."""
        registry_events.answered(self.context, number, result)
        self._execute_parked()

    def _execute_parked(self) -> None:
        """Execute requests again that waited for the registry; one that needs a later read of it goes on waiting."""
        view = self.context.joined_cluster()
        for client, parked in view.take_parked():
            client.unanswered.discard(parked.request[4])
            view.resumed = parked.needed
            self._receive_one(client, parked.request)
            view.resumed = 0
            if client.waiting is None:
                self._resumed.append(client)

    def take_resumed(self) -> list[ClientConnection]:
        """Effects: connections whose request waits no more; what they sent after it can be taken in now."""
        resumed, self._resumed = self._resumed, []
        return resumed

    def registry_state(self, state: RegistryState) -> None:
        """The broker's session with the registry: for ``stats``."""
        registry_events.registry_state(self.context, state)

    def take_registry_asks(self) -> list[Ask]:
        """Effects: what to ask the registry (``cluster/registry_asks.py``), one after another."""
        view = self.context.cluster
        return [] if view is None else view.take_asks(self._is_durable)

    def take_branch_asks(self) -> list[BranchAsk]:
        """Effects: what other homes are asked about branches here."""
        return branch_resolving.take_asks(self.context) if self.context.branch_asks.has_ready else []

    def branch_answered(self, ask: BranchAsk, code: int, body: bytes) -> None:
        """What a home has answered."""
        branch_resolving.answered(self.context, ask, code, body)

    def home_lost(self, home: int) -> None:
        """The connection to a home is lost, or none can be made: it is asked again later."""
        branch_resolving.lost(self.context, home)

    def _is_durable(self, group: object) -> bool:
        context = self.context
        return group is not context.group and group not in context.full and group not in context.undurable

    # --- connections -------------------------------------------------------------------------------------------------

    def connected(self, address: str = "") -> ClientConnection:
        """A connection was accepted."""
        client = ClientConnection(self._next_client, address)
        client.permissions = of_nobody() if self.state.principals.users else None
        self._next_client += 1
        self.context.clients[client.number] = client
        self.context.counters.connections_opened += 1
        return client

    def disconnected(self, client: ClientConnection) -> None:
        """A connection is gone: its answers are dropped, its session waits, its streams are rolled back."""
        client.gone = client.closing = True
        self.context.clients.pop(client.number, None)
        followers = self.context.followers
        if followers.waiting:
            followers.waiting = [one for one in followers.waiting if one.client is not client]
        if client.waiting is not None and self.context.cluster is not None:
            self.context.cluster.forget(client)
        groups.disconnected(self.context, client)
        self.context.resources.disconnected(reporter_of(client))
        self.sends_no_more(client)
        client.session = None

    def sends_no_more(self, client: ClientConnection) -> None:
        """Nothing comes from it any more: its session's owner is gone, though answers are owed to it."""
        session = client.session
        if session is not None and session.bound == client.number:
            session.bound = None
            session.gone_ms = self.context.now_ms
            prepare_commit.owner_gone(self.context, session)

    def read_again(self, client: ClientConnection) -> None:
        """A connection that was held is read from now on."""
        client.held = False
        groups.read_again(self.context, client)

    def receive(self, client: ClientConnection, requests: Sequence[Request | Violation]) -> None:
        """Take in what one read brought, in order; a violation is answered and the connection closes."""
        index = 0
        while index < len(requests):
            index = self.receive_some(client, requests, index)

    def receive_some(
        self, client: ClientConnection, requests: Sequence[Request | Violation], index: int, *, may_be_long: bool = True
    ) -> int:
        """Take in ``requests[index]`` and later ones, up to one whose answer may be long, or about REQUESTS_A_TURN.

        Args:
            may_be_long: False: a request whose answer may be long is not taken in.

        Returns:
            The index after what was taken in. Nothing is while a request of the connection waits for the registry.

        So the shell can give other connections their turn, and see whether answers are taken, before it goes on. One
        read may hold thousands of short lines with long answers (``meta *``).
        """
        if client.waiting is not None:
            return index
        context, count, turn = self.context, len(requests), index + REQUESTS_A_TURN
        is_pipelined = count > 1 and context.is_serving
        client.given_bytes = 0
        while index < count and not client.closing:
            if not may_be_long and requests[index][0] in LONG_ANSWERS:
                return index
            # A connection with a session sends batches with a producer id, which are not plain: no use trying. For a
            # single request it would cost more than it saves.
            taken = take_puts(context, client, requests, index) if is_pipelined and client.session is None else index
            if taken == index:
                self._receive_one(client, requests[index])
                taken += 1
            index = taken
            if context.group.size_bytes >= self._group_size_bytes_max:
                context.group_with_room()
            if index >= turn or requests[index - 1][0] in LONG_ANSWERS or client.given_bytes >= ANSWERED_BYTES_A_TURN:
                return index
        return count

    def _receive_one(self, client: ClientConnection, request: Request | Violation) -> None:
        if isinstance(request, Violation):
            self._violated(client, request)
            return
        opaque = request[4]
        if opaque in client.unanswered:
            self._violated(client, Violation(400, "bad-request", "opaque is used by an unanswered request", opaque))
            return
        if opaque != b"-":
            client.unanswered.add(opaque)
        context = self.context
        try:
            if client.permissions is not None:
                admit(context, client, request)
            self._verbs[request[0]](context, client, request)
        except TELL_A_STATE as error:
            # This error reports state that may not be durable yet: sent before the sync, a crash could make it false.
            context.counters.errors += 1
            context.answer_from_state(client, opaque, error.with_traceback(None))
        except (UnknownTopicError, StaleTopicError, DoubtfulUsersError) as error:
            refusal: BrokerError | None = error
            if context.cluster is not None:
                refusal = self._parked(client, request, error)
            if refusal is not None:
                context.counters.errors += 1
                context.answer(client, opaque, refusal.with_traceback(None))
        except BrokerError as error:
            context.counters.errors += 1
            if client.permissions is not None:
                refused(context, client, request[0], error)
            context.answer(client, opaque, error.with_traceback(None))

    def _parked(self, client: ClientConnection, request: Request, error: BrokerError) -> BrokerError | None:
        """Have a request wait for the registry; else the answer."""
        return self.context.joined_cluster().park(client, request, error)

    def _violated(self, client: ClientConnection, violation: Violation) -> None:
        if violation.code == OverloadedError.code:  # of a quota
            self.context.counters.errors += 1
        else:
            self.context.counters.violations += 1
        is_owed = violation.opaque in client.unanswered  # by a request before this one, which is still answered
        self.context.answer(client, violation.opaque, violation)
        if is_owed:
            client.unanswered.add(violation.opaque)
        client.closing = client.closing or is_owed or violation.closes

    # --- groups ------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """The assigned state."""
        return self.context.state

    @property
    def is_leading(self) -> bool:
        """Whether this process leads its home."""
        return self.context.is_serving

    def next_group(self) -> CommitGroup | None:
        """The group that ``seal`` would take; None if nothing is queued."""
        context = self.context
        if context.full:
            return context.full[0]
        group = context.group
        return group if group.items or group.waiters or group.written_waiters or group.puts else None

    def cut(self) -> CommitGroup:
        """Close the group in the making, so that later requests are in another record.

        Returns:
            That group: the assigned state is what it leaves, and its record's last entry says so (CHECKPOINT).
        """
        context = self.context
        closed, context.group = context.group, CommitGroup()
        closed.add_entry(_CHECKPOINT)
        context.full.append(closed)
        return closed

    def seal(self) -> CommitGroup:
        """Take the oldest group that is queued; its record must be written next."""
        context = self.context
        if context.full:
            group = context.full.popleft()
        else:
            group, context.group = context.group, CommitGroup()
        context.undurable.append(group)
        context.counters.group_commits += 1
        return group

    def written(self, group: CommitGroup) -> None:
        """The record is written, not synced: release what ``sync`` lets go early."""
        if self.context.answers_before_sync:
            self._release(group.puts)
        self._release(group.written_waiters)

    def synced(self) -> None:
        """The journal was synced."""
        self.context.counters.syncs += 1

    def durable(self, group: CommitGroup) -> None:
        """The record is synced: release every answer. Watermarks move in ``applied``."""
        if not self.context.undurable or self.context.undurable[0] is not group:
            raise InvariantError("a group became durable before an older one")
        self.context.undurable.pop(0)
        unapplied = self.context.unapplied
        for run in group.placed:
            unapplied[run.partition] = group
        if group.puts:
            self._release(group.puts)
        if group.waiters:
            self._release(group.waiters)
        for part in group.branch_parts:
            branch_resolving.placed_durably(self.context, part)

    def applied(self, group: CommitGroup) -> None:
        """The record's bytes are in the partition files: readers may see them, all of one record at once."""
        if not (group.placed or group.deleted or group.ended_barriers):
            return  # it moves nothing: half of all groups, where a prepare goes alone
        # Once a partition: a reader in a thread must not see the first half of a transaction that rolled the segment.
        moved = {run.partition: run.next_offset for run in group.placed}
        barriers = self.context.state.decisions.barriers
        changed = [*barriers.applied(moved, group.ended_barriers)]
        for deleted in group.deleted:
            changed += barriers.drop(deleted)
        for partition in changed:
            if partition.waiters:
                get.wake_polls(self.context, partition)
        self._end_waits(group, moved)

    def put_off(self, group: CommitGroup) -> None:
        """The disk lacks space for it: no read waits for it."""
        self._end_waits(group, {run.partition: run.next_offset for run in group.placed})

    def _end_waits(self, group: CommitGroup, moved: dict[Partition, int]) -> None:
        unapplied = self.context.unapplied
        for partition in moved:
            if unapplied.get(partition) is group:
                del unapplied[partition]
        reads, group.waiting_reads = group.waiting_reads, []
        for client, request in reads:
            if not client.gone:
                self._read_waited(client, request)

    def _read_waited(self, client: ClientConnection, request: Request) -> None:
        try:
            get.read_waited(self.context, client, request)
        except BrokerError as error:
            self.context.counters.errors += 1
            self.context.answer(client, request[4], error.with_traceback(None))

    def _release(self, waiters: list[Answer]) -> None:
        """``Context.answer`` of each. Hot: its body, in a loop; no request is under way that counts answered bytes."""
        ready = self.context.ready
        for client, opaque, reply in waiters:
            if client.gone:
                continue
            client.unanswered.discard(opaque)
            client.out.append((opaque, reply))
            if not client.ready:
                client.ready = True
                ready.append(client)
        waiters.clear()

    # --- effects and time --------------------------------------------------------------------------------------------

    def tick(self, now_ms: int, *, is_reading: bool = True) -> None:
        """Let time pass: polls and streams whose time is over, members that fell silent. Called every ``TICK_MS``.

        Args:
            is_reading: False while the shell reads no socket: then silence does not count.
        """
        self.context.now_ms = now_ms
        if self.state.principals.users or not self.context.is_serving:  # there may be users when it is led
            doubt_users(self.context)
        if now_ms < self.context.ticked_ms:
            self._clock_set_back()
        self.context.ticked_ms = now_ms
        if self.context.is_serving:
            self._tick_verbs()
        self.context.liveness.tick(is_reading=is_reading)

    def _tick_verbs(self) -> None:
        self._resumed += auth.tick(self.context)
        get.expire_polls(self.context)
        prepare_commit.expire_streams(self.context)
        decide.make_overdue_visible(self.context)
        check_backs.tick(self.context)
        self.context.branch_asks.tick(self.context.now_ms)
        groups.tick(self.context)
        session_expiry.tick(self.context)

    def _clock_set_back(self) -> None:
        """No session went away in the future: else resolvers would wait that long for its prepared transactions."""
        for session in self.context.state.sessions.values():
            if session.bound is None and session.gone_ms > self.context.now_ms:
                session.gone_ms = self.context.now_ms
                prepare_commit.owner_gone(self.context, session)

    def wake_memory(self) -> None:
        """Partitions in memory moved their end by themselves: wake their polls."""
        moved, self.context.moved = self.context.moved, []
        for partition in moved:
            if partition.waiters:
                get.wake_polls(self.context, partition)

    def take_reads(self) -> list[Read]:
        """Effects: reads that must be carried out."""
        reads, self.context.reads = self.context.reads, []
        return reads

    def take_lookups(self) -> list[Lookup]:
        """Effects: offsets that must be looked up by time."""
        lookups, self.context.lookups = self.context.lookups, []
        return lookups

    def take_ready(self) -> list[ClientConnection]:
        """Effects: peers with answers that must be written."""
        ready, self.context.ready = self.context.ready, []
        for client in ready:
            client.ready = False
        return ready

    def was_read(self, read: Read, data: bytes) -> None:
        """A read was carried out."""
        get.was_read(self.context, read, data)

    def was_looked_up(self, lookup: Lookup, offset: int) -> None:
        """A lookup by time was carried out."""
        get.was_looked_up(self.context, lookup, offset)

    def could_not(self, client: ClientConnection, opaque: bytes, error: BaseException) -> None:
        """A read or lookup failed: answer with the error. Damage names its file and position."""
        self.context.counters.errors += 1
        reply = error if isinstance(error, BrokerError) else BrokerError(str(error))
        self.context.answer(client, opaque, reply)
