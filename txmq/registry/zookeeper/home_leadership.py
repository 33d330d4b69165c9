"""Cluster and homes in ZooKeeper: joining, the next epoch, where a home is led.

Theory of operation. A home's ``state`` holds its newest epoch and the start of the process that drew it. Drawing is a
compare-and-set on its version. A draw whose answer was lost is read again: the start tells whose it is. A directory
that does not know the start that is there is a copy, or was restored, and is refused.

The leader's ephemeral node says where the home is led. It is made in one transaction with a check of ``state``: its own
version would be no fence, because a node made anew begins at 0 again. That the process before this one is gone is known
if its node is, or if both name the same lock.
"""

from __future__ import annotations

from txmq.errors import (
    DuplicateBrokerError,
    ForeignClusterError,
    HomeInUseError,
    HomeSupersededError,
    InvalidNameError,
    RegistryError,
)
from txmq.model import is_valid_name
from txmq.registry.cluster_metadata import (
    NOTHING_BROUGHT,
    Brought,
    Candidate,
    HomeEntry,
    Leadership,
    Listener,
    Standing,
)
from txmq.registry.zookeeper import layout
from txmq.registry.zookeeper.layout import AccessHead, HomeState, Leader
from txmq.registry.zookeeper.nodes import Listeners, Nodes
from txmq.registry.zookeeper.session import (
    ANY_VERSION,
    Check,
    Create,
    Delete,
    Node,
    NodeExistsError,
    NoNodeError,
    Operation,
    Session,
    SetValue,
)


class HomeNodes(Nodes):
    """See the module's docstring."""

    def __init__(self, session: Session, chroot: str = "") -> None:
        super().__init__(session, chroot)
        self._home_listeners = Listeners()

    # --- the cluster -------------------------------------------------------------------------------------------------

    def join(self, cluster: int, standing: Standing, brought: Brought = NOTHING_BROUGHT) -> int:
        """See ``Registry``."""
        return self._attempts.run(lambda: self._join(cluster, standing, brought))

    def _join(self, cluster: int, standing: Standing, brought: Brought) -> int:
        found = self._find(self._paths.cluster)
        if found is None:
            if standing is Standing.MEMBER:
                raise RegistryError(
                    f"{self._paths.cluster} is not in ZooKeeper, and this directory is a member of cluster "
                    f"{cluster:016x}: correct the registry's address, or make the registry anew (txmq cluster rebuild)"
                )
            return self._found(cluster, brought)
        if not self._session.shares_access(self._paths.cluster):
            raise RegistryError(
                f"{self._paths.cluster} was made without credentials, and what is made with them is closed to the "
                "others: leave them out of the registry's address, or close all of its nodes first (setAcl -R)"
            )
        existing = layout.decode_cluster(self._paths.cluster, found.value)
        if existing != cluster and standing is not Standing.EMPTY:
            raise ForeignClusterError(
                f"the directory belongs to cluster {cluster:016x}, {self._paths.root} in ZooKeeper to {existing:016x}: "
                "correct the registry's address, or start with an empty directory"
            )
        last_epoch = brought.last_query_epoch
        raised = self._raised(self._query_epochs(), last_epoch) if last_epoch else []
        if raised:
            self._session.transact(raised)
        return existing

    def _found(self, cluster: int, brought: Brought) -> int:
        for path, value in self._paths.fixed():
            try:
                self._session.create(path, value, is_public=path == self._paths.homes)
            except NodeExistsError:  # another broker founds it, too, or one died at it
                continue
        raised = [
            *self._raised(self._paths.last_id, brought.last_topic_id),
            *self._raised(self._paths.last_query_epoch, brought.last_query_epoch),
        ]
        access = Create(self._paths.access, layout.encode_access(AccessHead(0, brought.publisher, ())))
        founded = Create(self._paths.cluster, layout.encode_cluster(cluster, has_users=brought.publisher is not None))
        self._session.transact([*raised, access, founded])
        return cluster

    # --- homes -------------------------------------------------------------------------------------------------------

    def lead(self, candidate: Candidate) -> Leadership:
        """See ``Registry``."""
        if not is_valid_name(candidate.name):
            raise InvalidNameError(f"{candidate.name[:64]!r} cannot be a broker's name in a registry")
        return self._attempts.run(lambda: self._lead(candidate))

    def _lead(self, candidate: Candidate) -> Leadership:
        path = self._paths.state(candidate.home)
        found = self._find(path)
        state = None if found is None else layout.decode_state(path, found.value)
        if state is not None and not state.retired and state.start == candidate.start:
            return Leadership(candidate, state.epoch)
        if state is not None:
            self._refuse_stranger(candidate, state)
        epoch = max(candidate.epoch, 0 if state is None else state.epoch) + 1
        drawn = HomeState(epoch, candidate.start, candidate.name)
        operations = [*self._draw_epoch(candidate.home, found, drawn), *self._take_name(candidate, state)]
        self._session.transact(operations)
        return Leadership(candidate, drawn.epoch)

    def _refuse_stranger(self, candidate: Candidate, state: HomeState) -> None:
        if state.retired:
            raise HomeSupersededError(
                f"home {candidate.home:016x} is retired, as lost ({state.retired}): the cluster goes on without it. "
                "Start with an empty directory; the messages of this one are in its segment files"
            )
        if state.start not in candidate.former:
            raise HomeSupersededError(
                f"home {candidate.home:016x} has epoch {state.epoch}, drawn by a process that this directory does not "
                "know: it is a copy, or was restored. Start the newer one; if that is lost, an empty "
                "directory"
            )
        leader = self._leader(candidate.home)
        if leader is not None and leader.lock != candidate.lock:
            raise HomeInUseError(
                f"home {candidate.home:016x} is led at {leader.address}: stop that process; if it has died, its "
                "ZooKeeper session is about to expire"
            )

    def _draw_epoch(self, home: int, found: Node | None, drawn: HomeState) -> list[Operation]:
        path, value = self._paths.state(home), layout.encode_state(drawn)
        if found is not None:
            return [SetValue(path, value, found.stat.version)]
        replicas = Create(self._paths.replicas(home), b"", is_public=True)
        return [Create(self._paths.home(home), b""), replicas, Create(path, value, is_public=True)]

    def _take_name(self, candidate: Candidate, state: HomeState | None) -> list[Operation]:
        path = self._paths.name(candidate.name)
        found = self._find(path)
        if found is None:
            former = [] if state is None else [Delete(self._paths.name(state.name), ANY_VERSION)]
            return [Create(path, layout.encode_home(candidate.home)), *former]
        owner = layout.decode_home(path, found.value)
        if owner != candidate.home:
            raise DuplicateBrokerError(
                f"the broker's name {candidate.name!r} is that of home {owner:016x}: give this one another broker_name"
            )
        return []

    def announce(self, leadership: Leadership) -> None:
        """See ``Registry``."""
        self._attempts.run(lambda: self._announce(leadership))

    def _announce(self, leadership: Leadership) -> None:
        candidate, path = leadership.candidate, self._paths.state(leadership.candidate.home)
        value, stat = self._session.get(path)
        state = layout.decode_state(path, value)
        if (state.epoch, state.start) != (leadership.epoch, candidate.start):
            raise HomeSupersededError(
                f"home {candidate.home:016x} is led under epoch {state.epoch}, and "
                f"{leadership.epoch} was drawn here: stop"
            )
        wanted = layout.encode_leader(Leader(candidate.address, candidate.start, candidate.lock))
        leader = self._paths.leader(candidate.home)
        found = self._find(leader)
        if found is not None and found.value == wanted and found.stat.owner == self._session.number:
            return
        former = [] if found is None else [Delete(leader, found.stat.version)]
        self._session.transact(
            [Check(path, stat.version), *former, Create(leader, wanted, is_ephemeral=True, is_public=True)]
        )

    def announce_replica(self, home: int, incarnation: int, address: str) -> None:
        """See ``Registry``."""
        self._attempts.run(lambda: self._announce_replica(self._paths.replica(home, incarnation), address))

    def _announce_replica(self, path: str, address: str) -> None:
        wanted, found = layout.encode_replica(address), self._find(path)
        if found is not None and found.value == wanted and found.stat.owner == self._session.number:
            return
        former = [] if found is None else [Delete(path, found.stat.version)]
        self._session.transact([*former, Create(path, wanted, is_ephemeral=True, is_public=True)])

    def homes(self, listener: Listener | None = None) -> list[HomeEntry]:
        """See ``Registry``."""
        self._home_listeners.add(listener)
        return self._attempts.run(self._homes)

    def _homes(self) -> list[HomeEntry]:
        names = self._home_listeners.read(self._paths.homes, self._session.children)
        numbers = [layout.decode_home(self._paths.homes, name.encode()) for name in names]
        replicas = {number: self._replicas(number) for number in numbers}
        # Leaders first: one that is superseded between the two reads is told by its home's newer state.
        leaders = self._session.get_many([self._paths.leader(number) for number in numbers])
        states = self._session.get_many([self._paths.state(number) for number in numbers])
        homes = [self._home(*each) for each in zip(numbers, states, leaders, strict=True)]
        return [home._replace(replicas=replicas[home.home]) for home in homes]

    def _replicas(self, number: int) -> tuple[str, ...]:
        """Where those of a home are, for as long as each lives."""
        parent = self._paths.replicas(number)
        names = self._home_listeners.read(parent, self._session.children)
        paths = [f"{parent}/{name}" for name in sorted(names) if name != layout.LEADER]
        found = self._session.get_many(paths) if paths else []
        return tuple(
            layout.decode_replica(path, node.value) for path, node in zip(paths, found, strict=True) if node is not None
        )

    def _home(self, number: int, state: Node | None, leader: Node | None) -> HomeEntry:
        if state is None:
            raise NoNodeError(self._paths.state(number))
        known = layout.decode_state(self._paths.state(number), state.value)
        led = None if leader is None else layout.decode_leader(self._paths.leader(number), leader.value)
        address = led.address if led is not None and led.start == known.start else None
        return HomeEntry(number, known.name, known.epoch, address, known.retired)

    def _leader(self, home: int) -> Leader | None:
        path = self._paths.leader(home)
        found = self._find(path)
        return None if found is None else layout.decode_leader(path, found.value)
