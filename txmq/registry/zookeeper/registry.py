"""The registry of several brokers, in ZooKeeper: see ``cluster_metadata``; ``layout`` has the nodes.

Its parts are ``home_leadership``, ``topics`` and ``access``; here is what concerns homes and topics: homes that are
given up as lost for ever.

Theory of operation. A home is retired by a state with a higher epoch, drawn by no process, that says why. Its former
leader, should it live after all, finds a newer epoch than its own and stops; a directory that comes back is refused.
The map's version grows in the same transaction, so that brokers hear of it, and a deletion that was planned before is
planned again, without this home. What waited for the home before is freed after that: one node after another, so that
no transaction grows with them. A retirement that ended in between may be repeated.
"""

from __future__ import annotations

from txmq.errors import HomeInUseError, RegistryError
from txmq.registry.zookeeper import layout
from txmq.registry.zookeeper.access import AccessNodes
from txmq.registry.zookeeper.home_leadership import HomeNodes
from txmq.registry.zookeeper.session import ANY_VERSION, Delete, Operation, Session, SetValue
from txmq.registry.zookeeper.topics import TopicNodes


class RetiredNodes(HomeNodes, TopicNodes):
    """See the module's docstring."""

    def retire_home(self, home: int, reason: str) -> None:
        """See ``Registry``."""
        path = self._paths.state(home)

        def find() -> bool | None:
            found = self._find(path)
            if found is None:
                raise RegistryError(f"home {home:016x} is not in the registry")
            return True if layout.decode_state(path, found.value).retired else None

        def plan(_version: int) -> tuple[list[Operation], bool]:
            leader = self._leader(home)
            if leader is not None:
                raise HomeInUseError(f"home {home:016x} is led at {leader.address}: it is not lost")
            value, stat = self._session.get(path)
            state = layout.decode_state(path, value)
            retired = state._replace(epoch=state.epoch + 1, start=0, retired=reason)
            name = self._paths.name(state.name)
            released: list[Operation] = [] if self._find(name) is None else [Delete(name, ANY_VERSION)]
            return [SetValue(path, layout.encode_state(retired), stat.version), *released], True

        self._change("", find, plan)
        for deleted in self._attempts.run(lambda: self._read_all(self._paths.deleted, layout.decode_deleted)):
            if home in deleted.homes:
                self.drop_topic(deleted.topic_id, home)
        for group in self._attempts.run(lambda: self._groups_of(home)):
            self.release_anchor("group", group, home)

    def _groups_of(self, home: int) -> list[str]:
        kind = "group."
        names = [name for name in self._session.children(self._paths.anchors) if name.startswith(kind)]
        found = self._session.get_many([f"{self._paths.anchors}/{name}" for name in names])
        value = layout.encode_home(home)
        nodes = zip(names, found, strict=True)
        return [name.removeprefix(kind) for name, node in nodes if node is not None and node.value == value]


class ZooKeeperRegistry(RetiredNodes, AccessNodes):
    """``cluster_metadata.Registry`` over a session with an ensemble.

    Args:
        session: with the ensemble; ``close`` ends it.
        chroot: where the registry is in the tree: ``""``, or ``/prod``.
    """

    def __init__(self, session: Session, chroot: str = "") -> None:
        super().__init__(session, chroot)  # of all three, one after another
