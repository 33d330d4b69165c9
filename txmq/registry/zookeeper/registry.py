"""The registry of several brokers, in ZooKeeper: see ``cluster_metadata``; ``layout`` has the nodes."""

from __future__ import annotations

from txmq.registry.zookeeper.access import AccessNodes
from txmq.registry.zookeeper.retiring import RetiredNodes
from txmq.registry.zookeeper.session import Session


class ZooKeeperRegistry(RetiredNodes, AccessNodes):
    """``cluster_metadata.Registry`` over a session with an ensemble.

    Args:
        session: with the ensemble; ``close`` ends it.
        chroot: where the registry is in the tree: ``""``, or ``/prod``.
    """

    def __init__(self, session: Session, chroot: str = "") -> None:
        super().__init__(session, chroot)  # of all three, one after another
