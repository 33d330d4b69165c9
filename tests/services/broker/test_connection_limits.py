"""An address that takes its share of connections, plain and with TLS: refused beyond it, while others are served."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import txmq
from txmq.errors import BrokerAwayError
from txmq.testing.certificates import CertificateAuthority
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess

from .tls_brokers import address, settings_of
from .wire import Wire

SHARE = 3
OTHER_ADDRESS = "127.0.0.2"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    settings = {"connections_per_address_max": SHARE}
    with BrokerProcess(tmp_path_factory.mktemp("limits") / "data", settings=settings) as running:
        yield running


def test_address_beyond_its_share_is_refused_alone(broker: BrokerProcess) -> None:
    with ExitStack() as stack:
        wires = [stack.enter_context(Wire(broker)) for _ in range(SHARE)]
        assert all(wire.ask(b"ping 1\r\n")[0] == 200 for wire in wires)
        for _ in range(3):
            with Wire(broker) as refused:
                [(code, _, body)] = refused.hear(1).answers
                assert (code, b"connections_per_address_max 3 is reached by 127.0.0.1" in body) == (503, True)
                assert refused.is_closed_by_broker()
        eventually(lambda: b"connections_refused 3\n" in wires[0].ask(b"stats * s\r\n")[1], "they are counted")
        other = socket.create_connection((broker.host, broker.port), 10, (OTHER_ADDRESS, 0))
        with stack.enter_context(other):
            other.sendall(b"ping 1\r\n")
            assert other.recv(100).startswith(b"result 200")
        wires[0].socket.close()
        eventually(lambda: _is_served(broker), "room is given back")


def _is_served(broker: BrokerProcess) -> bool:
    with Wire(broker) as wire:
        wire.send(b"ping 1\r\n")
        return wire.hear(1).codes == [200]


def test_share_holds_in_front_of_the_handshake(tmp_path: Path) -> None:
    authority = CertificateAuthority(tmp_path / "ca")
    files = authority.issue("broker")
    settings = settings_of(files, connections_per_address_max=2, handshake_timeout_ms=60_000)
    with (
        BrokerProcess(tmp_path / "data", settings=settings) as broker,
        txmq.connect(address(broker, files)) as client,
        Wire(broker) as silent,
    ):
        with pytest.raises(BrokerAwayError, match=r"reset by peer|too many connections"):
            txmq.connect(address(broker, files))
        silent.socket.close()
        client.ping()
        eventually(lambda: _connects(broker, address(broker, files)), "room is given back")


def _connects(broker: BrokerProcess, text: str) -> bool:
    try:
        txmq.connect(text).close()
    except BrokerAwayError:
        return False
    return True
