"""The core of a replica that follows: what its leader sends is folded into the state, which readers are served from.

Theory of operation. The same core, and the same commit pipeline, with another source of groups: ``received`` queues
what the leader has sent (``replication.receiver``). The pipeline writes and forces a group as it is; ``durable`` then
folds its records, and finds out what they place, end and let go of. From there on it is a group like any other: it is
applied to the partition files, and the watermarks move.

Invariants:
    * nothing is folded that is not forced here;
    * no request changes anything: all that would is refused, with the leader's address;
    * readers are those that have said that they may read a copy (``hello replica``). None is served while the leader
      was not heard of for ``replica_reads_ms_max``, nor before all is folded that was true when it was heard anew:
      users may have been removed meanwhile (``Context.why_not_readable``).
"""

from __future__ import annotations

from typing import Final

from txmq.broker.client_connection import ClientConnection
from txmq.broker.cluster.cluster_view import ClusterView
from txmq.broker.commit.commit_group import CommitGroup, ReceivedGroup, Run
from txmq.broker.commit.redo import Placed, Redo, RedoEffects
from txmq.broker.context import Context
from txmq.broker.core import VERBS, Core, Verb
from txmq.broker.state.broker_identity import BrokerIdentity
from txmq.broker.state.state import State
from txmq.broker.state.visibility import VisibilityBarrier
from txmq.broker.verbs import get
from txmq.broker.verbs.access import auth
from txmq.broker.verbs.access.authorizer import log_out, strangers_from_now_on
from txmq.broker.verbs.partition_lookup import not_leading
from txmq.config import BrokerSettings
from txmq.errors import BrokerError, UnavailableError
from txmq.log.partition import Partition
from txmq.protocol.requests import Request
from txmq.runtime.ports import Random

_READS: Final = frozenset({b"get", b"offset", b"meta"})
_SERVED: Final = frozenset({b"hello", b"ping", b"stats", b"version", b"help", b"quit", b"auth"})


def _refused(context: Context, _client: ClientConnection, _request: Request) -> None:
    raise not_leading(context)


def _topic(context: Context, client: ClientConnection, request: Request) -> None:
    if request[1][0] not in (b"describe", b"list"):
        raise not_leading(context)
    _read(context, client, request)


def _cluster(context: Context, client: ClientConnection, request: Request) -> None:
    if request[1][0] == b"retire":
        raise not_leading(context)
    VERBS[b"cluster"](context, client, request)


def _read(context: Context, client: ClientConnection, request: Request) -> None:
    """Serve a reader that may read a copy."""
    if not client.reads_copies:
        raise not_leading(context)
    if why := context.why_not_readable():
        raise UnavailableError(why)
    VERBS[request[0]](context, client, request)


def _verb(name: bytes) -> Verb:
    if name in _SERVED:
        return VERBS[name]
    if name in _READS:
        return _read
    return {b"topic": _topic, b"cluster": _cluster}.get(name, _refused)


VERBS_OF_REPLICAS: Final = {name: _verb(name) for name in VERBS}


class FollowingCore(Core):
    """See the module's docstring."""

    def __init__(
        self, identity: BrokerIdentity, settings: BrokerSettings, state: State, now_ms: int, random: Random,
        cluster: ClusterView,
    ) -> None:  # fmt: skip
        super().__init__(identity, settings, state, now_ms, random, cluster=cluster)
        self._verbs, self.context.leads_never = VERBS_OF_REPLICAS, True
        self._folded = _Folded(self.context)
        self._redo = Redo(state, self._folded)

    def recovered(self, lsn: int) -> None:
        """The state is that of the journal up to there."""
        self.context.folded_lsn = lsn

    def received(self, group: ReceivedGroup) -> None:
        """The leader has sent a group."""
        self.context.full.append(group)

    def heard(self, now_ms: int, forced_lsn: int) -> None:
        """The leader has answered: its journal is forced up to that lsn."""
        context = self.context
        context.now_ms = now_ms
        if not context.heard_ms or now_ms - context.heard_ms > context.settings.replica_reads_ms_max:
            context.readable_from_lsn = forced_lsn
        context.heard_ms, context.leader_lsn = now_ms, forced_lsn

    def durable(self, group: CommitGroup) -> None:
        """The records are forced here: fold them."""
        if isinstance(group, ReceivedGroup):
            was_open = not self.state.principals.users
            self._folded.group = group
            for payload in group.payloads:
                self._redo.record(payload)
            group.payloads = []
            if was_open and self.state.principals.users:
                strangers_from_now_on(self.context)
            self.context.folded_lsn = group.end_lsn
        super().durable(group)

    def tick(self, now_ms: int, *, is_reading: bool = True) -> None:
        """Let time pass."""
        self.context.now_ms = self.context.ticked_ms = now_ms
        self._resumed += auth.tick(self.context)
        get.expire_polls(self.context)
        self.context.liveness.tick(is_reading=is_reading)

    def _parked(self, _client: ClientConnection, _request: Request, error: BrokerError) -> BrokerError | None:
        return error  # what the registry says of topics comes with the journal


class _Folded(RedoEffects):
    """Gathers, for the pipeline, what the records of a group place, end and let go of."""

    def __init__(self, context: Context) -> None:
        super().__init__(context.state)
        self._context, self.group = context, CommitGroup()

    def placed(self, placed: Placed) -> None:
        partition = placed.partition
        partition.await_publish()
        run = Run(partition, placed.segment_base, placed.position, placed.base_offset)
        run.next_offset, run.buffers = partition.next_offset, [placed.data]
        self.group.placed.append(run)

    def log_start_moved(self, partition: Partition, dropped: list[int]) -> None:
        if dropped:
            self.group.unlinked.append((partition, [partition.segment_path(base) for base in dropped]))

    def user_removed(self, user: str) -> None:
        log_out(self._context, user)

    def deleted(self, partitions: list[Partition]) -> None:
        self.group.deleted.extend(partitions)

    def ended(self, barrier: VisibilityBarrier) -> None:
        barrier.is_ended = True
        self.group.ended_barriers.append(barrier)

    def checkpoint(self) -> None:
        self.group.is_checkpointed = True
