"""What must hold of homes that share a registry: see ``run``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tools.images.node import Node
from tools.simulation.history import Shared
from tools.simulation.promises import visible_messages
from tools.simulation.world import Simulation, Violation
from txmq.registry.cluster_metadata import PlacedTopic
from txmq.registry.zookeeper.registry import ZooKeeperRegistry

from .ensemble import Ensemble
from .home import CHROOT, Home
from .operator import Operator


def watch_owners(world: Simulation, homes: Sequence[Home]) -> None:
    """R2, at every moment."""
    owners: dict[tuple[int, int], str] = {}

    def look() -> None:
        for home in homes:
            for topic_id, of_topic in () if home.node is None else home.node.state.partitions_of.items():
                for number in of_topic:
                    owner = owners.setdefault((topic_id, number), home.name)
                    if owner != home.name:
                        raise Violation(f"R2: partition {number} of topic {topic_id} is in {owner} and {home.name}")
        world.after(0.02, look)

    look()


def check_homes(shared: Shared, ensemble: Ensemble, operators: Sequence[Operator]) -> None:
    """At the end."""
    nodes = shared.nodes()
    registry = ZooKeeperRegistry(ensemble.servers.open(), CHROOT)
    topic_map, led = registry.topics(), registry.homes()
    if topic_map.deleted:
        raise Violation(f"R4: tombstones are left: {topic_map.deleted}")
    placed = {one.topic.config.name: one for one in topic_map.topics}
    for operator in operators:
        for name, partitions in operator.created.items():
            if name not in placed or len(placed[name].homes) < partitions:
                raise Violation(f"R3: {name} was told to have {partitions} partitions, is {placed.get(name)}")
    numbers = {node.recovered.identity.node: node for node in nodes}
    for home in led:
        node = numbers.pop(home.home)
        if home.address is None or home.epoch != node.state.registration.epoch:
            raise Violation(f"R6: {home}, and the journal has epoch {node.state.registration.epoch}")
    if numbers:
        raise Violation(f"R6: not in the registry: {numbers}")
    for node in nodes:
        _check_map(node, placed)
    visible = visible_messages(nodes, shared.history)
    for put in shared.history.puts:
        if put.place[0] in shared.history.deleted:
            continue
        value = put.values[0]
        if isinstance(put.told, int) and visible.get(value) != (put.place, put.told) and not shared.may_forget:
            raise Violation(f"P1: {put} is at {visible.get(value)}")
        if put.told == "not stored" and value in visible:
            raise Violation(f"P6: {put} is at {visible[value]}")


def _check_map(node: Node, placed: Mapping[str, PlacedTopic]) -> None:
    state, own = node.state, node.recovered.identity.node
    there = {topic.config.name: topic for topic in state.topics}
    if there.keys() != placed.keys():
        raise Violation(f"R1: {there.keys() ^ placed.keys()} differ between registry and home {own:x}")
    for name, one in placed.items():
        if there[name] != one.topic or state.placed[one.topic.topic_id] != one:
            raise Violation(f"R1: {name}: {state.placed[one.topic.topic_id]} is not {one}")
        wanted = {number for number, home in enumerate(one.homes) if home == own}
        found = set(state.partitions_of.get(one.topic.topic_id, ()))
        if wanted != found:
            raise Violation(f"R2: {name}: home {own:x} has {found}, and should have {wanted}")
