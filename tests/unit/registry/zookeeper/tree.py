"""What a registry left in the simulated ZooKeeper."""

from __future__ import annotations

from tools.simulated.zookeeper import SimSession


def values(session: SimSession, path: str = "/") -> dict[str, tuple[bytes, bool]]:
    """All nodes: the value of each, and whether it is ephemeral."""
    node = session.get(path)
    found = {path: (node.value, node.stat.owner != 0)}
    for name in session.children(path):
        found |= values(session, f"{path.rstrip('/')}/{name}")
    return found
