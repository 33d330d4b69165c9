"""Users, grants and quotas in ZooKeeper: a node for each record, below one that has their version.

Theory of operation. A change is one transaction: the version's node by compare-and-set, and the records. So one watch
tells of all changes, and records that were read are of one moment if the version's node is the same before and after.
That node also names the newest changes, who made them and what they touched: so a broker reads again what changed and
not ten thousand users; and a change whose answer was lost is read there, not guessed.

A home that brings users (a broker that was alone) may bring more than fits into one request. It takes the version's
node first, in the transaction that founds the cluster: until it has published all, there is nothing to be read here,
and no other home serves a user who must be refused.

With the first user the cluster's node gets another format, which brokers read when they start: those of a txmq that
knows no users would serve everybody, and do not join. While one of them leads a home, there is no first user.

Users are in nodes that are closed to others (access list of the credentials), or nowhere: whoever may write them may do
everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from txmq.errors import RegistryConflictError, RegistryError
from txmq.registry.cluster_metadata import NO_ACCESS, Access, Changes, Listener, Record, check_changes, has_users
from txmq.registry.zookeeper import layout
from txmq.registry.zookeeper.layout import AccessChange, AccessHead
from txmq.registry.zookeeper.nodes import Listeners, Nodes
from txmq.registry.zookeeper.session import (
    ANY_VERSION,
    BadVersionError,
    Check,
    ConnectionLossError,
    Create,
    Delete,
    Operation,
    Session,
    SetValue,
)

NEWEST_MAX: Final = 32  # changes that the version's node names
_TOGETHER_BYTES: Final = 250_000  # of records that are published in one request
_UNTOUCHED: Final = AccessHead(0, None, ())
NODES_ARE_OPEN: Final = (
    "ZooKeeper's nodes are open to whoever reaches it, and who may write users there may do everything: give the "
    "registry's address a name and a password (zk://NAME:PASSWORD@...) at every broker, and close the nodes that are "
    "there (setAcl -R)"
)


class _Known(NamedTuple):
    """What was read last. Another session may be one with an ensemble that was emptied."""

    session: int
    created: int
    access: Access


class AccessNodes(Nodes):
    """See the module's docstring."""

    def __init__(self, session: Session, chroot: str = "") -> None:
        super().__init__(session, chroot)
        self._access_listeners = Listeners()
        self._known: _Known | None = None

    # --- reads -------------------------------------------------------------------------------------------------------

    def access(self, listener: Listener | None = None) -> Access:
        """See ``Registry``."""
        self._access_listeners.add(listener)
        return self._attempts.run(self._read_access)

    def _read_access(self) -> Access:
        path = self._paths.access
        if self._access_listeners.read(path, self._session.exists) is None:
            return NO_ACCESS  # a cluster from before there were users; the first change makes the node
        value, stat = self._session.get(path)
        head = layout.decode_access(path, value)
        self._refuse_unpublished(head)
        known, now = self._known, (self._session.number, stat.created)
        if known is not None and known[:2] == now and known.access.version == head.version:
            return known.access
        keys = None if known is None or known[:2] != now else _touched_since(head, known.access.version)
        if known is None or keys is None:
            records = dict(self._records(self._session.children(path)))
        else:
            records = {key: record for key, record in known.access.records.items() if key not in keys}
            records.update(self._records(keys))
        if self._session.get(path).value != value:
            raise BadVersionError(f"{path} changed while it was read")
        self._known = _Known(*now, Access(head.version, records))
        return self._known.access

    def _records(self, keys: Sequence[str]) -> Iterator[tuple[str, Record]]:
        paths = [self._paths.access_record(key) for key in keys]
        for key, path, node in zip(keys, paths, self._session.get_many(paths), strict=True):
            if node is not None:
                yield key, layout.decode_record(path, node.value)

    def _refuse_unpublished(self, head: AccessHead) -> None:
        if head.publisher is not None:
            raise RegistryConflictError(
                f"home {head.publisher:016x} brings users to the cluster, and has yet to publish them: start its broker"
            )

    def _head(self) -> tuple[AccessHead, int | None]:
        """The version's node as it is now, and the node's own version; None: there is no node."""
        found = self._find(self._paths.access)
        if found is None:
            return _UNTOUCHED, None
        return layout.decode_access(self._paths.access, found.value), found.stat.version

    def _head_set(self, head: AccessHead, version: int | None) -> Operation:
        value = layout.encode_access(head)
        return Create(self._paths.access, value) if version is None else SetValue(self._paths.access, value, version)

    # --- changes -----------------------------------------------------------------------------------------------------

    def change_access(self, home: int, version: int, changes: Changes) -> Access:
        """See ``Registry``."""
        check_changes(changes)
        if has_users(changes):
            self._require_closed_nodes()
        is_lost = is_made = False

        def attempt() -> Access:
            nonlocal is_lost, is_made
            if is_made:  # others came before it was read back
                return self._read_access()
            head, node_version = self._head()
            self._refuse_unpublished(head)
            if is_lost and any(one[:2] == (version + 1, home) for one in head.newest):
                return self._read_access()
            if head.version != version:
                raise RegistryConflictError(f"users, grants or quotas were changed: version {head.version}")
            if changes:
                try:
                    self._make(home, head, node_version, changes)
                except ConnectionLossError:
                    is_lost = True
                    raise
                is_made = True
            return self._read_access()

        return self._attempts.run(attempt)

    def _make(self, home: int, head: AccessHead, node_version: int | None, changes: Changes) -> None:
        newest = (*head.newest, AccessChange(head.version + 1, home, tuple(changes)))[-NEWEST_MAX:]
        raised = self._head_set(AccessHead(head.version + 1, None, newest), node_version)
        older = self._refuse_older(home) if has_users(changes) else []
        self._session.transact([raised, *older, *self._set_records(changes)])

    def _refuse_older(self, home: int) -> list[Operation]:
        """What keeps brokers of a txmq that knows no users from joining; nothing if that is so already.

        Raises:
            RegistryError: one of them leads another home.
        """
        path = self._paths.cluster
        value, stat = self._session.get(path)
        wanted = layout.encode_cluster(layout.decode_cluster(path, value), has_users=True)
        if value == wanted:
            return []
        self._require_upgraded_leaders(home)
        return [SetValue(path, wanted, stat.version)]

    def _require_upgraded_leaders(self, home: int) -> None:
        """Of ``home`` itself the node of a former process may be there, which is gone."""
        others = sorted({*self._session.children(self._paths.homes)} - {f"{home:016x}"})
        paths = [self._paths.leader(layout.decode_home(self._paths.homes, other.encode())) for other in others]
        for other, path, node in zip(others, paths, self._session.get_many(paths), strict=True):
            if node is None:
                continue
            leader = layout.decode_leader(path, node.value)
            if leader.format < layout.FORMAT_WITH_USERS:
                raise RegistryError(
                    f"home {other} is led at {leader.address} by an older txmq, which would go on serving everybody "
                    "without a login: upgrade all brokers before the first user is made (txmq user add, "
                    "first_administrator)"
                )

    def _set_records(self, changes: Changes) -> Iterator[Operation]:
        paths = [self._paths.access_record(key) for key in changes]
        for path, record, node in zip(paths, changes.values(), self._session.get_many(paths), strict=True):
            if record is None:
                if node is not None:
                    yield Delete(path, ANY_VERSION)
            elif node is None:
                yield Create(path, layout.encode_record(record))
            else:
                yield SetValue(path, layout.encode_record(record), ANY_VERSION)

    def _require_closed_nodes(self) -> None:
        if not self._session.has_credentials:
            raise RegistryError(NODES_ARE_OPEN)

    # --- a home that brings them -------------------------------------------------------------------------------------

    def publish_access(self, home: int, changes: Changes) -> None:
        """See ``Registry``."""
        if has_users(changes):
            self._require_closed_nodes()
        self._attempts.run(lambda: self._publish(home, changes))

    def _publish(self, home: int, records: Changes) -> None:
        head, node_version = self._head()
        if head.publisher is None and not self._may_bring(head, records):
            return
        if head.publisher not in (None, home):
            self._refuse_unpublished(head)
        older = self._refuse_older(home) if has_users(records) else []
        if older:
            self._session.transact(older)  # before there is one
        if head.publisher is None:
            self._session.transact([self._head_set(head._replace(publisher=home), node_version)])
            head, node_version = self._head()
        # No process of this home that was superseded sets them late, over what was changed since.
        fence = Check(self._paths.access, ANY_VERSION if node_version is None else node_version)
        for some in by_size(self._all_records(records)):
            self._session.transact([fence, *some])
        self._session.transact([self._head_set(AccessHead(head.version + 1, None, ()), node_version)])

    def _may_bring(self, head: AccessHead, records: Changes) -> bool:
        """Whether the cluster lacks what the home brings; else what the cluster has is the truth."""
        if head.version == 0:
            return True
        return has_users(records) and not has_users(self._session.children(self._paths.access))

    def _all_records(self, records: Changes) -> Iterator[Operation]:
        """Set them; what is left of users that were brought once, and not to the end, goes."""
        yield from self._set_records(records)
        for key in self._session.children(self._paths.access):
            if key not in records and has_users([key]):
                yield Delete(self._paths.access_record(key), ANY_VERSION)


def _touched_since(head: AccessHead, version: int) -> list[str] | None:
    """The keys that changed after a version; None: it is not known any more."""
    behind = [one for one in head.newest if one.version > version]
    if version > head.version or len(behind) != head.version - version:
        return None
    return sorted({key for one in behind for key in one.keys})


def by_size(operations: Iterator[Operation]) -> Iterator[list[Operation]]:
    """In requests that an ensemble takes; their order is kept."""
    some: list[Operation] = []
    size = 0
    for operation in operations:
        some.append(operation)
        size += len(operation.path) + len(getattr(operation, "value", b"")) + 100
        if size >= _TOGETHER_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some
