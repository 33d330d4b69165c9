"""Every byte that a client sends in a handshake, altered: that connection ends, says why, and nothing is left of it."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import ssl
from collections.abc import Iterator

import pytest

from txmq.broker.shell.tls_transport import TlsTransport
from txmq.runtime.tls import ClientTls, ServerTls, TlsSession
from txmq.testing.certificates import CertificateAuthority

from ....logged import said
from .tls_world import World

RECORD_HEADER = 5
VERSIONS = {"TLS 1.2": ssl.TLSVersion.TLSv1_2, "TLS 1.3": ssl.TLSVersion.TLSv1_3}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return CertificateAuthority(tmp_path_factory.mktemp("tls") / "ca")


class Alterations:
    """Handshakes with client certificates, of which one byte is altered on its way to the broker."""

    def __init__(self, authority: CertificateAuthority, version: ssl.TLSVersion) -> None:
        files = authority.issue(f"both{version}")
        self._client = ClientTls(files)
        self._client.context.maximum_version = version
        self.world = World(ServerTls(files, "required"), self._session(), takes_plaintext=False)
        self.world.leave()

    def _session(self) -> TlsSession:
        return self._client.session("localhost")

    def flights(self) -> list[bytes]:
        """What a client sends, each up to where it waits for the broker; the connection is over."""
        sent = list[bytes]()
        for flight in self._conversation():
            sent.append(flight)
            self.world.receive(flight)
        assert self.world.served == 1
        self.world.leave()
        return sent

    def _conversation(self) -> Iterator[bytes]:
        """A client's flights, the last followed by a request; its alert where it does not like what it reads."""
        client = self.world.client = self._session()
        self.world.meet()
        try:
            while not client.shake():
                yield client.take()
                arrived = self.world.socket.taken()
                if not arrived:
                    return
                client.feed(arrived)
            yield client.take() + client.encrypt(b"ping 1\r\n")
        except ssl.SSLError:
            yield client.take()

    def is_served(self, altered_flight: int, at: int, mask: int) -> bool:
        """Whether a connection is still served whose byte was altered; what is not closed yet runs out of time."""
        world = self.world
        for number, flight in enumerate(self._conversation()):
            data = bytearray(flight)
            if number == altered_flight:
                data[min(at, len(data) - 1)] ^= mask  # a signature's length varies
            if not world.socket.is_closed:
                world.receive(bytes(data))
        if world.served:
            return True
        if not world.socket.is_closed:
            world.host.context.liveness.now_ms += world.host.settings.handshake_timeout_ms + 1
            world.connection.check_deadlines()
        assert world.socket.is_closed
        return False


@pytest.mark.parametrize("version", VERSIONS)
def test_any_altered_byte_of_handshake_ends_its_connection(
    authority: CertificateAuthority, version: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a record's header its version is nobody's: RFC 8446, 5.1, has it ignored."""
    rng = random.Random(seed := random.randrange(1 << 32))

    async def played() -> None:
        alterations = Alterations(authority, VERSIONS[version])
        world = alterations.world
        flights = alterations.flights()
        assert len(flights) >= 2
        doors = _doors()
        for number, flight in enumerate(flights):
            ignored = _record_versions(flight)
            for at in range(len(flight)):
                mask = rng.randrange(1, 256)
                caplog.clear()
                if alterations.is_served(number, at, mask):
                    assert at in ignored, (seed, number, at, mask)
                else:
                    [line] = said(caplog)
                    assert line["event"].startswith("connection closed: ")
                    assert line["address"] == "10.0.0.7:40001"
                world.leave()
        assert not world.host.connections
        assert world.host.budget.used == 0
        assert _doors() <= doors

    caplog.set_level(logging.DEBUG, "txmq")
    gc.collect()
    gc.disable()  # nothing collects old cycles in a broker
    try:
        asyncio.run(played())
    finally:
        gc.enable()


def _record_versions(flight: bytes) -> set[int]:
    """Where the records' versions stand."""
    found, start = set[int](), 0
    while start < len(flight):
        found |= {start + 1, start + 2}
        start += RECORD_HEADER + int.from_bytes(flight[start + 3 : start + 5], "big")
    return found


def _doors() -> int:
    return sum(type(one) is TlsTransport for one in gc.get_objects())
