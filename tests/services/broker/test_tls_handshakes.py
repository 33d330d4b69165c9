"""At a door for TLS: handshakes that are altered, stop, or are none; rule R0 of ``watch`` at a real broker."""

from __future__ import annotations

import random
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta

import pytest

from tools.fuzz.probes import PROBES
from txmq.addresses import TlsFiles
from txmq.runtime.tls import ClientTls, TlsSession
from txmq.testing.certificates import CertificateAuthority
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess, free_port

from .tls_brokers import address, raw, refusal, settings_of, shake_hands, trusting
from .watch import FLOOD_DELAY_S_MAX, Watch

HANDSHAKE_MS = 1000
ALTERED = 40  # handshakes of each version; all positions: tests/unit/broker/shell/test_tls_transport_altered.py
STOPPED = 5000
STOPPED_BYTES_MAX = 40 << 10  # of memory for each of them


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return CertificateAuthority(tmp_path_factory.mktemp("tls") / "ca")


@pytest.fixture(scope="module")
def files(authority: CertificateAuthority) -> TlsFiles:
    return authority.issue("both")


@pytest.fixture(scope="module")
def watch(tmp_path_factory: pytest.TempPathFactory, files: TlsFiles) -> Iterator[Watch]:
    """One port for plaintext, by which it is watched, and for TLS with client certificates."""
    listen = f"127.0.0.1:{free_port()}"
    settings = settings_of(
        files, tls_ca=files.ca, tls_client_certificates="required", listen_plaintext=listen,
        handshake_timeout_ms=HANDSHAKE_MS,
    )  # fmt: skip
    data = tmp_path_factory.mktemp("broker") / "data"
    with BrokerProcess(data, listen=listen, settings=settings | {"log_level": "debug"}) as broker:
        watch = Watch(broker)
        watch.under_rule(lambda: _shake_and_leave(broker, files), growth_bytes_max=32 << 20)  # OpenSSL's own tables
        watch.rebase()
        yield watch


def _session(files: TlsFiles, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> TlsSession:
    client = ClientTls(files)
    client.context.maximum_version = version
    return client.session("localhost")


def _shake_and_leave(broker: BrokerProcess, files: TlsFiles) -> None:
    for _ in range(100):
        with raw(broker) as connection:
            shake_hands(connection, _session(files))


def _is_closed_by_broker(connection: socket.socket) -> bool:
    connection.settimeout(30)
    with suppress(ConnectionResetError):
        while connection.recv(1 << 16):
            pass
    return True


# --- handshakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=["1.2", "1.3"])
def test_altered_handshake_disturbs_nobody_else(watch: Watch, files: TlsFiles, version: ssl.TLSVersion) -> None:
    rng = random.Random(seed := random.randrange(1 << 32))

    def altered(data: bytes) -> bytes:
        made = bytearray(data)
        made[rng.randrange(len(made))] ^= rng.randrange(1, 256)
        return bytes(made)

    def work() -> None:
        for number in range(ALTERED):
            session, flights = _session(files, version), 0
            with raw(watch.broker) as connection:
                connection.settimeout(HANDSHAKE_MS / 100)
                with suppress(ssl.SSLError, ConnectionError):
                    while not session.shake():
                        data = session.take()
                        connection.sendall(altered(data) if flights == number % 2 else data)
                        flights += 1
                        session.feed(connection.recv(1 << 16) or b"\x15\x03\x03\x00\x02\x02\x28")
                    connection.sendall(altered(session.take() + session.encrypt(b"ping 1\r\n")))
                with suppress(OSError):  # ENOTCONN, which is no ConnectionError: the broker has ended it
                    connection.sendall(session.take())
                    connection.shutdown(socket.SHUT_WR)
                assert _is_closed_by_broker(connection), seed

    watch.under_rule(work)


def test_thousands_that_stop_in_handshake_take_bounded_memory(watch: Watch, files: TlsFiles) -> None:
    """Silent, in the middle of the first message, after it."""
    hello = _hello(files)
    beginnings = [*[b"", hello[:1], hello[:100], hello[:-1]] * 2, hello]

    def work() -> None:
        before = watch.rss_bytes_now()
        with ExitStack() as stack:
            waiting = [stack.enter_context(raw(watch.broker)) for _ in range(STOPPED)]
            for number, connection in enumerate(waiting):
                connection.sendall(beginnings[number % len(beginnings)])
            grown = watch.rss_bytes_now() - before
            assert grown < STOPPED * STOPPED_BYTES_MAX, f"{grown / STOPPED:.0f} bytes each"
            assert all(_is_closed_by_broker(connection) for connection in waiting)
        watch.rebase()  # an allocator keeps what it had for all of them

    watch.under_rule(work, growth_bytes_max=STOPPED * STOPPED_BYTES_MAX, delay_s_max=FLOOD_DELAY_S_MAX)


def _hello(files: TlsFiles) -> bytes:
    session = _session(files)
    session.shake()
    return session.take()


def test_slow_handshake_is_closed_in_its_time(watch: Watch, files: TlsFiles) -> None:
    hello = _hello(files)

    def work() -> None:
        with raw(watch.broker) as connection:
            connection.settimeout(HANDSHAKE_MS / 1000 / 10)
            sent = 0
            with suppress(ConnectionError):
                while sent < len(hello):  # for half a minute
                    connection.sendall(hello[sent : sent + 1])
                    sent += 1
                    with suppress(TimeoutError):
                        assert connection.recv(1) == b""
                        break
            assert 0 < sent < len(hello)

    watch.under_rule(work)


def test_record_whose_end_is_held_back_is_closed(watch: Watch, files: TlsFiles) -> None:
    def work() -> None:
        session = _session(files)
        with raw(watch.broker) as connection:
            shake_hands(connection, session)
            connection.sendall(session.encrypt(b"ping 1\r\n") + session.encrypt(bytes(16 << 10))[:-1])
            assert _is_closed_by_broker(connection)

    watch.under_rule(work)


def test_expired_client_certificate_is_refused(watch: Watch, authority: CertificateAuthority, files: TlsFiles) -> None:
    expired = authority.issue("expired", valid=timedelta(seconds=-10))
    assert "this certificate has expired" in refusal(address(watch.broker, expired))
    assert "asks for a client certificate" in refusal(address(watch.broker, trusting(authority)))
    eventually(lambda: "certificate has expired" in watch.broker.logs(), "the log has the reason")


# --- openssl ----------------------------------------------------------------------------------------------------------


def _s_client(watch: Watch, files: TlsFiles, version: str, *lines: bytes) -> tuple[bytes, bytes]:
    """What ``openssl s_client`` says to lines that are typed, each when the one before it was answered."""
    command = [
        "openssl",
        "s_client",
        "-connect",
        f"{watch.broker.host}:{watch.broker.port}",
        version,
        "-CAfile",
        files.ca,
    ]
    command += ["-cert", files.cert, "-key", files.key]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    ) as client:
        assert client.stdin
        assert client.stdout
        assert client.stderr
        said = told = b""
        for line in lines:
            client.stdin.write(line + b"\n")
            while line.startswith(b"ping") and not said.endswith(b"pong\n"):
                said += client.stdout.read(1 << 16) or pytest.fail(f"{said[-200:]!r}")
            said += b"."
            while line in (b"K", b"k") and not told.endswith(b"KEYUPDATE\n"):  # it reads lines one at a time
                told += client.stderr.read(1 << 16) or pytest.fail(f"{told!r}")
            told += b"."
        out, errors = client.communicate(timeout=30)
        return said + out, told + errors


def test_renegotiation_is_refused_and_told(watch: Watch, files: TlsFiles) -> None:
    def work() -> None:
        _, errors = _s_client(watch, files, "-tls1_2", b"ping 1\r", b"R")
        assert b"no renegotiation" in errors

    watch.under_rule(work)


def test_keys_are_renewed_while_requests_are_answered(watch: Watch, files: TlsFiles) -> None:
    def work() -> None:
        said, _ = _s_client(watch, files, "-tls1_3", b"ping 1\r", b"K", b"ping 2\r", b"k", b"ping 3\r", b"Q")
        assert said.count(b"result 200") == 3

    watch.under_rule(work)


# --- strangers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("probe", PROBES)
def test_scanner_learns_little_and_disturbs_nobody(watch: Watch, probe: str) -> None:
    def work() -> None:
        for _ in range(5):
            with raw(watch.broker) as connection:
                connection.sendall(PROBES[probe])
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_WR)
                assert _is_closed_by_broker(connection)

    watch.under_rule(work)
