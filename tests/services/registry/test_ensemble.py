"""Three real servers serve while two of them do; one that lags behind, and a majority that is away, mislead nobody."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from tests.unit.registry.contract import CLUSTER, A, candidate, topic
from txmq.registry.cluster_metadata import Standing
from txmq.registry.zookeeper.kazoo_session import KazooSession
from txmq.registry.zookeeper.registry import ZooKeeperRegistry
from txmq.registry.zookeeper.session import NotConnectedError, SessionState
from txmq.testing.eventually import WITHIN_S, eventually
from txmq.testing.processes.zookeeper import Ensemble

CHROOTS = (f"/three-{number}" for number in itertools.count())
Open = Callable[[str], KazooSession]


@pytest.fixture(scope="module")
def ensemble(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ensemble]:
    with Ensemble(tmp_path_factory.mktemp("ensemble"), 3) as three:
        yield three


@pytest.fixture
def open_session(ensemble: Ensemble) -> Iterator[Open]:
    opened: list[KazooSession] = []

    def open_one(hosts: str) -> KazooSession:
        opened.append(KazooSession(hosts, session_timeout_ms=20_000, call_timeout_ms=60_000))
        return opened[-1]

    yield open_one
    for session in opened:
        session.close()


def _led(session: KazooSession, chroot: str) -> ZooKeeperRegistry:
    registry = ZooKeeperRegistry(session, chroot)
    registry.join(CLUSTER, Standing.USED)
    registry.announce(registry.lead(candidate()))
    return registry


def test_ensemble_whose_leader_is_killed_keeps_session_and_leader(ensemble: Ensemble, open_session: Open) -> None:
    session = open_session(ensemble.hosts)
    registry = _led(session, next(CHROOTS))
    number = session.number
    ensemble.leader.kill()
    eventually(lambda: session.wait_connected(WITHIN_S), "a connection to another server")
    assert registry.homes()[0].address is not None
    assert session.number == number
    ensemble.start()
    assert len({ensemble.leader.address, *(server.address for server in ensemble.servers)}) == 3


def test_a_server_that_lags_behind_is_brought_up(ensemble: Ensemble, open_session: Open) -> None:
    chroot, leader = next(CHROOTS), ensemble.leader
    changing = _led(open_session(leader.address), chroot)
    follower = next(server for server in ensemble.servers if server is not leader)
    reading = ZooKeeperRegistry(open_session(follower.address), chroot)
    for number in range(1, 6):
        follower.pause()
        try:
            changing.create_topic(topic(number, f"t{number}"), [A, A])
        finally:
            follower.resume()
        assert reading.topics().version == number


def test_without_a_majority_sessions_survive(ensemble: Ensemble, open_session: Open) -> None:
    session = open_session(ensemble.hosts)
    registry = _led(session, next(CHROOTS))
    number, before = session.number, registry.homes()
    for server in ensemble.servers[:2]:
        server.kill()
    try:
        eventually(lambda: session.state is SessionState.SUSPENDED, "the loss of the majority")
        with pytest.raises(NotConnectedError):
            session.get("/")
    finally:
        ensemble.start()
    assert session.wait_connected(WITHIN_S)
    assert (session.number, registry.homes()) == (number, before)
