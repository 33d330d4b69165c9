"""What a stopped home's journal knows of its cluster: the directory is recovered as for a start, and let go of again.

The journal gets the record of a start that no registry answered, as a broker's does that waits for one in vain.
"""

from __future__ import annotations

from txmq.broker.commit.data_directory import open_store
from txmq.broker.shell.joining import draw_incarnation
from txmq.broker.state.principals import Secrets, records_of
from txmq.broker.state.state import State
from txmq.broker.verbs.partition_handover import GRANT
from txmq.config import BrokerSettings
from txmq.errors import RegistryError
from txmq.redo import directory_identity
from txmq.registry.access import SECRET, Access
from txmq.registry.rebuild_from_journals import Facts
from txmq.runtime.ports import Clock, Disk, Random


def read_facts(disk: Disk, clock: Clock, random: Random, settings: BrokerSettings) -> Facts:
    """The facts of a data directory that no broker runs on. Raises as ``open_store``.

    Raises:
        RegistryError: the directory is no member of a cluster.
    """
    node = directory_identity.load(disk)
    if node is None:
        raise RegistryError("the directory has no identity: it is none of a broker")
    recovered = open_store(disk, clock, random, settings, incarnation=draw_incarnation(random))
    try:
        return _facts(node, recovered.state)
    finally:
        recovered.store.close()


def _facts(node: directory_identity.Node, state: State) -> Facts:
    registration, principals = state.registration, state.principals
    if not registration.epoch:
        raise RegistryError("the directory was never a member of a cluster: start its broker with --registry")
    records = records_of(principals)
    if principals.secret:
        records[SECRET] = Secrets(principals.secret, principals.between_brokers)._asdict()
    grants = {group: state.saved.generation(group, GRANT) for group in state.saved.named}
    return Facts(
        node.cluster_id, node.node_id, state.epoch, tuple(int(known, 16) for known in registration.incarnations),
        tuple(state.placed.values()), state.topics.next_id - 1, tuple(state.queries.named), state.queries.last_epoch,
        {group: grant for group, grant in grants.items() if grant}, registration.retired,
        Access(principals.registry_version, records),
    )  # fmt: skip
