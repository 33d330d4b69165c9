"""A door for TLS: what it lets in, what it refuses, and that a connection through it is read as one without."""

from __future__ import annotations

import asyncio
import gc
import os
import ssl
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import cast

import pytest

from txmq.addresses import TlsFiles
from txmq.broker.core import REQUESTS_A_TURN
from txmq.broker.shell.connection import RECEIVE_SIZE_BYTES
from txmq.broker.shell.throttle import Admission
from txmq.broker.shell.tls_transport import HANDSHAKE_SIZE_BYTES_MAX, TlsTransport
from txmq.config import BrokerSettings
from txmq.protocol.certificates import end_point
from txmq.runtime.tls import ClientTls, ServerTls
from txmq.testing.certificates import CertificateAuthority

from .tls_world import Socket, World

Play = Callable[["World"], Coroutine[None, None, None]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return CertificateAuthority(tmp_path_factory.mktemp("tls") / "ca").issue("broker")


@pytest.fixture
def play(files: TlsFiles) -> Callable[..., None]:
    def played(part: Play, *, takes_plaintext: bool = False, client_certificates: str = "none") -> None:
        async def run() -> None:
            client = ClientTls(TlsFiles(files.ca)).session("localhost")
            await part(World(ServerTls(files, client_certificates), client, takes_plaintext=takes_plaintext))

        asyncio.run(run())

    return played


def test_requests_are_answered_encrypted(play: Callable[..., None]) -> None:
    async def part(world: World) -> None:
        world.shake()
        world.say(b"ping 1\r\n")
        assert world.answers().startswith(b"result 200 ")
        world.say(b"ping 2\r\nping 3\r\n")
        assert world.answers().count(b"result 200") == 2

    play(part)


def test_door_says_what_a_login_is_bound_to(play: Callable[..., None]) -> None:
    async def part(world: World) -> None:
        assert world.connection.client.binding is None
        world.shake()
        assert world.connection.client.binding == end_point(world.client.server_certificate)
        assert world.connection.client.certificates == frozenset()

    play(part, client_certificates="optional")


def test_door_says_whose_certificate_was_shown(files: TlsFiles) -> None:
    async def part() -> None:
        world = World(ServerTls(files, "required"), ClientTls(files).session("localhost"), takes_plaintext=False)
        world.shake()
        assert {"CN=broker", "DNS:localhost"} <= world.connection.client.certificates
        assert world.connection.client.certificate.startswith("CN=broker serial ")

    asyncio.run(part())


def test_certificate_whose_names_are_no_text_ends_its_connection(files: TlsFiles) -> None:
    """OpenSSL takes one byte of Latin-1 there, and Python's ``ssl`` raises what is no error of TLS."""
    authority = CertificateAuthority(Path(files.ca).parent.parent / "careless")
    odd, plain = authority.issue("odd", hosts=["localhost", b"caf\xe9.org"]), authority.issue("plain")

    async def part() -> None:
        server = ServerTls(TlsFiles(odd.ca, files.cert, files.key), "required")
        for shown in (odd, plain):
            world = World(
                server, ClientTls(TlsFiles(files.ca, shown.cert, shown.key)).session("localhost"), takes_plaintext=False
            )
            world.shake()
            assert world.socket.is_closed == (shown is odd)
        world.say(b"ping 1\r\n")
        assert world.answers().startswith(b"result 200 ")

    asyncio.run(part())


def test_every_first_byte_but_tls_is_refused(play: Callable[..., None]) -> None:
    async def part(world: World) -> None:
        for first in set(range(256)) - {0x16}:
            world.leave()
            world.meet()
            world.receive(bytes([first]) + b"ing 1\r\n")
            refusal = world.socket.taken()
            assert refusal.startswith(b"result 403 ")
            assert b"txmqs://" in refusal
            assert world.socket.is_closed

    play(part)


def test_plaintext_goes_on_without_the_door(play: Callable[..., None]) -> None:
    async def part(world: World) -> None:
        world.receive(b"ping 1\r\npi")
        assert world.socket.protocol is world.connection
        assert world.socket.taken().startswith(b"result 200 ")
        world.receive(b"ng 2\r\n")
        assert world.socket.taken().startswith(b"result 200 ")

    play(part, takes_plaintext=True)


def test_door_for_both_takes_tls(play: Callable[..., None]) -> None:
    async def part(world: World) -> None:
        world.shake()
        world.say(b"ping 1\r\n")
        assert world.answers().startswith(b"result 200 ")

    play(part, takes_plaintext=True)


def test_garbage_ends_its_connection_and_nothing_else(play: Callable[..., None]) -> None:
    async def part(world: World) -> None:
        world.receive(b"\x16" + os.urandom(1000).replace(b"\x03", b"\x04"))  # else it may be a whole header
        assert world.socket.is_closed
        assert b"result" not in world.socket.taken()

    for _ in range(20):
        play(part)


def test_altered_record_ends_its_connection(play: Callable[..., None]) -> None:
    async def part(world: World) -> None:
        world.shake()
        wire = bytearray(world.client.encrypt(b"ping 1\r\n"))
        wire[-1] ^= 1
        world.receive(bytes(wire))
        assert world.socket.is_closed
        assert not world.connection.client.unanswered
        with pytest.raises(ssl.SSLError, match="BAD_RECORD_MAC"):
            world.answers()

    play(part)


def test_client_without_a_certificate_is_not_heard(play: Callable[..., None]) -> None:
    async def part(world: World) -> None:
        while not world.client.shake():
            world.receive(world.client.take())
            world.client.feed(world.socket.taken())
        world.receive(world.client.take() + world.client.encrypt(b"ping 1\r\n"))
        assert world.socket.is_closed
        with pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"):
            world.answers()

    play(part, client_certificates="required")


def test_handshake_is_bounded_in_bytes(play: Callable[..., None]) -> None:
    async def part(world: World) -> None:
        record = b"\x16\x03\x01\x40\x00" + bytes([1, 0x01, 0xFF, 0xF0]) + bytes((1 << 14) - 4)  # of one long message
        for _ in range(1 + HANDSHAKE_SIZE_BYTES_MAX // len(record)):
            if not world.socket.is_closed:
                world.receive(record)
        assert world.socket.is_closed

    play(part)


def test_handshake_is_bounded_in_time(play: Callable[..., None]) -> None:
    async def part(world: World) -> None:
        world.client.shake()
        hello = world.client.take()
        world.receive(hello[:50])
        liveness = world.host.context.liveness
        for _ in range(2):
            liveness.now_ms += world.host.settings.handshake_timeout_ms / 2
            world.receive(hello[50:60])
            world.connection.check_deadlines()
            assert not world.socket.is_aborted
        liveness.now_ms += 1
        world.connection.check_deadlines()
        assert world.socket.is_aborted

    play(part)


def test_record_that_is_begun_is_bounded_in_time(play: Callable[..., None]) -> None:
    """Also after the first request, and whatever was complete before it."""

    async def part(world: World) -> None:
        world.shake()
        liveness, allowed_ms = world.host.context.liveness, world.host.settings.handshake_timeout_ms
        for number in range(20):
            record = world.client.encrypt(b"ping %d\r\n" % number)
            beginning = world.client.encrypt(b"ping x\r\n")
            world.receive(record + beginning[: number + 1])
            liveness.now_ms += allowed_ms
            world.connection.check_deadlines()
            assert not world.socket.is_closed
            world.receive(beginning[number + 1 :])
            assert world.answers().count(b"result 200") == 2
            liveness.now_ms += 2 * allowed_ms
            world.connection.check_deadlines()  # idle
            assert not world.socket.is_closed
        world.receive(world.client.encrypt(b"ping 1\r\n") + world.client.encrypt(b"ping 2\r\n")[:1])
        liveness.now_ms += allowed_ms + 1
        world.connection.check_deadlines()
        assert world.socket.is_aborted

    play(part)


def test_slow_record_earns_no_time(play: Callable[..., None]) -> None:
    async def part(world: World) -> None:
        world.shake()
        world.say(b"ping 1\r\n")
        record = world.client.encrypt(b"ping 2\r\n")
        for at in range(5):
            world.receive(record[at : at + 1])
            world.host.context.liveness.now_ms += world.host.settings.handshake_timeout_ms / 4
            world.connection.check_deadlines()
        assert world.socket.is_aborted

    play(part)


def test_held_connection_gets_its_bytes_later(play: Callable[..., None]) -> None:
    async def part(world: World) -> None:
        world.shake()
        world.connection.hold()
        assert not world.socket.is_read
        world.say(b"ping 1\r\n")
        assert world.answers() == b""
        world.connection.release()
        assert not world.socket.is_read  # what is here comes first
        await asyncio.sleep(0)
        assert world.socket.is_read
        assert world.answers().startswith(b"result 200 ")

    play(part)


def test_many_small_requests_are_taken_in_turns(play: Callable[..., None]) -> None:
    async def part(world: World) -> None:
        world.shake()
        requests = b"".join(b"ping %05d\r\n" % number for number in range(4000))
        wire = world.client.encrypt(requests)
        assert len(wire) < RECEIVE_SIZE_BYTES
        world.receive(wire)
        assert not world.socket.is_read
        first = world.answers().count(b"result 200")
        assert first == REQUESTS_A_TURN
        while not world.socket.is_read:
            await asyncio.sleep(0)
        assert first + world.answers().count(b"result 200") == 4000

    play(part)


def test_reads_that_fill_the_buffer_let_others_go_on(play: Callable[..., None]) -> None:
    async def part(world: World) -> None:
        world.shake()
        wire = world.client.encrypt(b"".join(b"put a 0 raw 500 %016d\r\n%b" % (n, bytes(500)) for n in range(2000)))
        reads = 0
        while world.socket.is_read:
            world.receive(wire[reads * RECEIVE_SIZE_BYTES : (reads + 1) * RECEIVE_SIZE_BYTES])
            reads += 1
        assert 1 < reads < 1 + 2 * REQUESTS_A_TURN * 500 // RECEIVE_SIZE_BYTES
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert world.socket.is_read

    play(part)


def test_client_that_ends_gets_its_answers(play: Callable[..., None]) -> None:
    async def part(world: World) -> None:
        world.shake()
        world.receive(world.client.encrypt(b"ping 1\r\n") + world.client.end())
        assert world.answers().startswith(b"result 200 ")
        assert world.client.has_ended
        assert world.socket.is_closed
        assert world.door.eof_received()
        world.receive(b"behind the end")

    play(part)


def test_end_within_a_handshake_closes(play: Callable[..., None]) -> None:
    async def part(world: World) -> None:
        world.client.shake()
        world.receive(world.client.take()[:100])
        assert not world.door.eof_received()

    play(part)


def test_broker_that_stops_tells_the_end(play: Callable[..., None]) -> None:
    async def part(world: World) -> None:
        world.shake()
        world.connection.finish()
        assert world.answers() == b""
        assert world.client.has_ended
        world.connection.abandon()  # and nothing can be written any more

    play(part)


def test_too_many_connections_are_refused_before_the_handshake(files: TlsFiles, tmp_path: Path) -> None:
    async def part() -> None:
        server, client = ServerTls(files), ClientTls(TlsFiles(files.ca)).session("localhost")
        world = World(server, client, takes_plaintext=False)
        world.host.admission = Admission(BrokerSettings(connections_max=1))
        world.host.admission.enter("10.0.0.9:1", 0.0)
        door, socket = TlsTransport(world.host, server.session(), takes_plaintext=False), Socket()
        door.connection_made(cast(asyncio.Transport, socket))
        assert socket.is_closed
        assert socket.sent == b""

    asyncio.run(part())


def test_door_that_is_gone_leaves_nothing(play: Callable[..., None]) -> None:
    """Nothing collects old cycles in a broker."""

    async def part(world: World) -> None:
        gc.collect()
        gc.disable()
        try:
            before = doors()
            world.shake()
            world.leave()
            del world.connection, world.door, world.socket
            assert doors() == before - 1
        finally:
            gc.enable()

    def doors() -> int:
        return sum(type(one) is TlsTransport for one in gc.get_objects())

    play(part)
