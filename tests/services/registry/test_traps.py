"""What ZooKeeper does to a client that believes too much, each trap by its name, on a real server.

There are others besides: a restart inside the former session's time, a copied directory and a wiped ensemble in the
contract (``tests/unit/registry/contract.py``); requests that kazoo would queue, lost answers, lost watches and nodes
of over 1 MB in ``test_kazoo_session.py``.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.services.registry.scripts import RealWorld
from tests.unit.registry.contract import CLUSTER, A, B, candidate, topic
from txmq.addresses import Credentials
from txmq.errors import DeletionPendingError, HomeSupersededError, RegistryError, UnknownTopicError
from txmq.registry.cluster_metadata import HomeEntry, Registry, Standing
from txmq.registry.zookeeper.kazoo_session import KazooSession
from txmq.registry.zookeeper.registry import ZooKeeperRegistry
from txmq.registry.zookeeper.session import AccessDeniedError, NoNodeError, Session
from txmq.testing.eventually import eventually
from txmq.testing.processes.zookeeper import ZooKeeper

CHROOTS = (f"/traps-{number}" for number in itertools.count())
# A leader of home A in a process of its own: each line that it reads has it announce; each state is told.
LEADER = """
import sys
from tests.unit.registry.contract import candidate
from txmq.errors import HomeSupersededError
from txmq.registry.zookeeper.kazoo_session import KazooSession
from txmq.registry.zookeeper.registry import ZooKeeperRegistry
session = KazooSession(sys.argv[1], session_timeout_ms=4000, call_timeout_ms=60_000)
session.listen(lambda state: print(state.value, flush=True))
registry = ZooKeeperRegistry(session, sys.argv[2])
leadership = registry.lead(candidate())
for _line in sys.stdin:
    try:
        registry.announce(leadership)
        print("announced", flush=True)
    except HomeSupersededError:
        print("superseded", flush=True)
"""


@pytest.fixture
def chroot() -> str:
    return next(CHROOTS)


@pytest.fixture
def registry(zookeeper: ZooKeeper, chroot: str) -> Iterator[Registry]:
    """A registry whose cluster is founded; no home is led."""
    found = ZooKeeperRegistry(RealWorld(zookeeper).open(), chroot)
    found.join(CLUSTER, Standing.USED)
    yield found
    found.close()


@contextmanager
def _leader(zookeeper: ZooKeeper, chroot: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", LEADER, zookeeper.address, chroot]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _told(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _announce(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.parametrize("is_superseded", [False, True])
def test_a_session_expires_while_its_process_is_paused(
    zookeeper: ZooKeeper, chroot: str, registry: Registry, is_superseded: bool
) -> None:
    def is_led() -> bool:
        return registry.homes()[0].address is not None

    with _leader(zookeeper, chroot) as process:
        _announce(process)
        assert _told(process) == "announced"
        assert is_led()
        os.kill(process.pid, signal.SIGSTOP)
        try:
            eventually(lambda: not is_led(), "the end of the session")
            if is_superseded:
                registry.lead(candidate(start=2, former=(1,)))
        finally:
            os.kill(process.pid, signal.SIGCONT)
        while _told(process) != "lost":
            pass  # suspended, once or more often
        assert _told(process) == "connected"
        _announce(process)
        assert _told(process) == ("superseded" if is_superseded else "announced")
        assert is_led() != is_superseded


def test_a_topic_made_anew_is_another_one(registry: Registry) -> None:
    """Delete and create: both nodes have version 0, and the id tells one from the other."""
    registry.announce(registry.lead(candidate()))
    former = registry.create_topic(topic(1), [A, A])
    registry.delete_topic(topic(1))
    with pytest.raises(DeletionPendingError):
        registry.create_topic(topic(2), [A, A])
    registry.delete_topic(topic(1))  # it is deleted already
    registry.drop_topic(1, A)
    again = registry.create_topic(topic(2), [A, A])
    with pytest.raises(UnknownTopicError):
        registry.alter_topic(former._replace(topic=topic(1, retention_ms=5)))
    with pytest.raises(UnknownTopicError):
        registry.delete_topic(topic(1))
    assert registry.topics().topics == (again,)
    assert registry.topics().deleted == ()


def test_a_leaders_node_made_anew_is_another_one(zookeeper: ZooKeeper, registry: Registry) -> None:
    """Both ephemeral nodes have version 0: the former process finds out by the home's state."""
    former = registry.lead(candidate())
    registry.announce(former)
    assert isinstance(registry, ZooKeeperRegistry)
    assert isinstance(registry._session, KazooSession)
    RealWorld(zookeeper).expire(registry._session)
    other = ZooKeeperRegistry(RealWorld(zookeeper).open(), registry._paths.root.removesuffix("/txmq"))
    other.announce(other.lead(candidate(start=2, former=(1,))))
    assert registry._session.get(registry._paths.leader(A)).stat.version == 0
    with pytest.raises(HomeSupersededError):
        registry.announce(former)
    assert registry.homes() == [HomeEntry(A, "broker-a0", 2, "10.0.0.2:8123")]
    other.close()


def test_only_a_founder_makes_the_chroot(zookeeper: ZooKeeper, chroot: str) -> None:
    nowhere = f"{chroot}/prod/east"
    session = RealWorld(zookeeper).open()
    registry = ZooKeeperRegistry(session, nowhere)
    for read in (registry.topics, registry.homes, lambda: registry.reserve_topic_ids(1)):
        with pytest.raises(RegistryError, match=f"{nowhere}/txmq/cluster is not in ZooKeeper: correct the address"):
            read()
    assert session.exists(chroot) is None
    assert registry.join(CLUSTER, Standing.EMPTY) == CLUSTER
    assert registry.topics().version == 0
    registry.close()


def test_credentials_close_all_but_where_homes_are_led(zookeeper: ZooKeeper, chroot: str) -> None:
    world = RealWorld(zookeeper)
    session = KazooSession(
        zookeeper.address, session_timeout_ms=20_000, call_timeout_ms=60_000, credentials=Credentials("txmq", "secret")
    )
    registry = ZooKeeperRegistry(session, chroot)
    _use(registry)
    stranger = world.open()
    paths = _paths(session, chroot)
    assert len(paths) > 20
    read = [path for path in paths if _may_read(stranger, path)]
    assert [path for path in read if not path.startswith(f"{chroot}/txmq/homes")] == []
    assert f"{chroot}/txmq/homes" in read
    for path in paths:
        with pytest.raises(AccessDeniedError):
            stranger.set_value(path, b"", -1)
    stranger.close()
    registry.close()


def _may_read(session: Session, path: str) -> bool:
    try:
        session.get(path)
    except AccessDeniedError:
        return False
    return True


def test_nodes_are_as_many_as_topics_and_homes(zookeeper: ZooKeeper, chroot: str) -> None:
    """Restarts, changes and repeated calls leave no nodes over."""
    session = RealWorld(zookeeper).open()
    registry = ZooKeeperRegistry(session, chroot)
    _use(registry)
    once = _paths(session, chroot)
    for start in range(2, 6):
        registry.announce(registry.lead(candidate(start=start, former=tuple(range(start)))))
        placed = registry.topics().topics[0]
        registry.alter_topic(placed._replace(topic=topic(1, retention_ms=start)))
        passing = topic(registry.reserve_topic_ids(1)[0], "passing")
        registry.create_topic(passing, [A, B])
        registry.delete_topic(passing)
        for home in (A, B, A):
            registry.drop_topic(passing.topic_id, home)
        registry.anchor("group", "billing", A)
        registry.release_anchor("group", "unused", A)
    assert _paths(session, chroot) == once
    registry.close()


def _use(registry: Registry) -> None:
    """Make one node, or more, of each kind."""
    registry.join(CLUSTER, Standing.USED)
    registry.announce(registry.lead(candidate()))
    registry.lead(candidate(B))
    registry.create_topic(topic(1), [A, B])
    registry.create_topic(topic(2, "old"), [A, B])
    registry.delete_topic(topic(2, "old"))
    registry.anchor("group", "billing", B)


def _paths(session: Session, path: str) -> list[str]:
    try:
        names = session.children(path)
    except NoNodeError:
        return []
    return [path, *(found for name in names for found in _paths(session, f"{path}/{name}"))]
