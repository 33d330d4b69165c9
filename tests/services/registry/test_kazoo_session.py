"""A session with a real ensemble: deadlines, lost connections, expiry, credentials."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.services.registry.scripts import RealWorld
from txmq.addresses import Credentials
from txmq.errors import RegistryAwayError
from txmq.registry.zookeeper.kazoo_session import KazooSession
from txmq.registry.zookeeper.session import (
    REQUEST_SIZE_MAX,
    AccessDeniedError,
    ConnectionLossError,
    Create,
    NodeExistsError,
    NotConnectedError,
    RequestTooLargeError,
    SessionState,
    WatchEvent,
)
from txmq.testing.certificates import CertificateAuthority
from txmq.testing.eventually import WITHIN_S, eventually
from txmq.testing.processes.broker import free_port
from txmq.testing.processes.zookeeper import Ensemble, ZooKeeper

Open = Callable[..., KazooSession]


@pytest.fixture
def open_session(zookeeper: ZooKeeper) -> Iterator[Open]:
    opened: list[KazooSession] = []

    def open_one(credentials: Credentials | None = None) -> KazooSession:
        opened.append(
            KazooSession(zookeeper.address, session_timeout_ms=20_000, call_timeout_ms=60_000, credentials=credentials)
        )
        return opened[-1]

    yield open_one
    for session in opened:
        session.close()


def _states(session: KazooSession) -> queue.SimpleQueue[SessionState]:
    told: queue.SimpleQueue[SessionState] = queue.SimpleQueue()
    session.listen(told.put)
    return told


def test_an_ensemble_that_is_away_is_told_by_its_address() -> None:
    hosts = f"127.0.0.1:{free_port()}"
    with pytest.raises(RegistryAwayError, match=f"no ZooKeeper server answers at {hosts} within 0.3 s"):
        KazooSession(hosts, session_timeout_ms=1000, call_timeout_ms=300)


@pytest.mark.parametrize(("hosts", "is_believed"), [(("localhost",), True), ((), False)])
def test_server_is_believed_by_its_alternative_names(
    tmp_path: Path, hosts: tuple[str, ...], *, is_believed: bool
) -> None:
    tls = CertificateAuthority(tmp_path / "ca").issue("zoo", hosts=hosts, name="localhost")
    with Ensemble(tmp_path, tls=tls).start() as ensemble:
        address = ensemble.secure_hosts.replace("127.0.0.1", "localhost")
        opened = partial(KazooSession, address, session_timeout_ms=20_000, tls=tls)
        if is_believed:
            opened(call_timeout_ms=60_000).close()
        else:
            with pytest.raises(RegistryAwayError, match="a certificate that is valid for it"):
                opened(call_timeout_ms=2000)


def test_no_call_waits_longer_than_its_deadline(zookeeper: ZooKeeper, open_session: Open) -> None:
    session = open_session()
    session.create("/slow", b"")
    zookeeper.pause()
    try:
        session._timeout = 0.2
        with pytest.raises(ConnectionLossError):
            session.set_value("/slow", b"late", 0)
    finally:
        session._timeout = WITHIN_S
        zookeeper.resume()
    # The server has the request: a later call of the session comes after it, and tells what became of it.
    assert session.get("/slow").value == b"late"


def test_without_a_connection_nothing_is_handed_over(zookeeper: ZooKeeper, open_session: Open) -> None:
    """kazoo alone keeps what it is given, and carries it out when the ensemble is back."""
    session = open_session()
    told = _states(session)
    zookeeper.kill()
    assert told.get(timeout=WITHIN_S) is SessionState.SUSPENDED
    number = session.number
    for call in (
        lambda: session.create("/never", b""),
        lambda: session.get_many(["/never"]),
        lambda: session.sync("/"),
    ):
        with pytest.raises(NotConnectedError):
            call()
    assert not session.wait_connected(0.01)
    zookeeper.start()
    assert session.wait_connected(WITHIN_S)
    assert told.get(timeout=WITHIN_S) is SessionState.CONNECTED
    assert session.exists("/never") is None
    assert number == 0


def test_a_session_and_its_nodes_outlive_a_killed_server(zookeeper: ZooKeeper, open_session: Open) -> None:
    session = open_session()
    session.create("/mine", b"", is_ephemeral=True)
    number = session.number
    zookeeper.restart()
    assert session.wait_connected(WITHIN_S)
    eventually(lambda: session.number == number, "the same session")
    stat = open_session().exists("/mine")
    assert stat is not None
    assert stat.owner == number


def test_one_silent_connection_does_not_cost_the_session(open_session: Open) -> None:
    """kazoo waits for a silent server as long as the session lives, divided by the servers; here there is one."""
    assert len(open_session()._client.hosts) == 3


def test_an_expired_session_is_told_and_another_one_begins(zookeeper: ZooKeeper, open_session: Open) -> None:
    session = open_session()
    told = _states(session)
    session.create("/gone", b"", is_ephemeral=True)
    before = session.number
    RealWorld(zookeeper).expire(session)
    assert told.get(timeout=WITHIN_S) is SessionState.SUSPENDED
    while told.get(timeout=WITHIN_S) is not SessionState.LOST:
        pass  # it may have had its session back for a moment
    assert told.get(timeout=WITHIN_S) is SessionState.CONNECTED
    assert session.number not in (0, before)
    assert session.exists("/gone") is None


def test_a_watch_is_called_when_the_connection_is_lost(zookeeper: ZooKeeper, open_session: Open) -> None:
    session = open_session()
    session.create("/watched", b"")
    events: queue.SimpleQueue[WatchEvent] = queue.SimpleQueue()
    session.get("/watched", events.put)
    RealWorld(zookeeper).disconnect(session)
    assert events.get(timeout=WITHIN_S) == WatchEvent("disconnected", "")
    open_session().set_value("/watched", b"x", 0)
    RealWorld(zookeeper).settle(session)
    assert events.empty()


def test_too_large_a_request_is_refused_before_it_is_sent(open_session: Open) -> None:
    session = open_session()
    whole, half = bytes(REQUEST_SIZE_MAX), bytes(REQUEST_SIZE_MAX // 2)
    session.create("/large", bytes(REQUEST_SIZE_MAX - 200))
    number = session.number
    with pytest.raises(RequestTooLargeError, match=r"/large: \d+ bytes in one request, at most 1000000"):
        session.set_value("/large", whole, 0)
    with pytest.raises(RequestTooLargeError):
        session.create("/larger", whole)
    with pytest.raises(RequestTooLargeError):
        session.transact([Create("/half", half), Create("/other", half)])
    assert session.exists("/half") is None
    assert session.number == number


def test_many_nodes_are_read_in_pieces(open_session: Open) -> None:
    session = open_session()
    session.create("/many", b"")
    session.transact([Create(f"/many/{number}", b"%d" % number) for number in range(600)])
    nodes = session.get_many([f"/many/{number}" for number in range(1200)])
    assert [node.value for node in nodes if node is not None] == [b"%d" % number for number in range(600)]
    assert nodes[600:] == [None] * 600


def test_credentials_close_the_nodes_to_everyone_else(open_session: Open) -> None:
    owner = open_session(credentials=Credentials("txmq", "secret"))
    owner.create("/closed", b"")
    owner.transact([Create("/closed/too", b"")])
    for other in (open_session(), open_session(credentials=Credentials("txmq", "guess"))):
        for path in ("/closed", "/closed/too"):
            with pytest.raises(AccessDeniedError, match=path):
                other.get(path)
            with pytest.raises(AccessDeniedError):
                other.set_value(path, b"", 0)
    assert open_session(credentials=Credentials("txmq", "secret")).get("/closed/too").value == b""


def test_the_server_keeps_its_address_and_says_what_is_wrong(tmp_path: Path) -> None:
    with ZooKeeper(tmp_path / "z") as server:
        address = server.address
        session = KazooSession(address, session_timeout_ms=20_000, call_timeout_ms=60_000)
        session.create("/kept", b"x")
        session.close()
        server.stop()
        assert server.ask("srvr") == ""
        server.restart()
        assert server.address == address
        session = KazooSession(address, session_timeout_ms=20_000, call_timeout_ms=60_000)
        with pytest.raises(NodeExistsError):
            session.create("/kept", b"")
        session.close()
