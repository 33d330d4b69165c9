"""Logins at a real broker over TLS: bound to its certificate, by a client's, altered, replayed, relayed."""

from __future__ import annotations

import asyncio
import selectors
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from threading import Thread

import pytest

import txmq
import txmq.aio
from txmq.addresses import TlsFiles
from txmq.broker.state.refusals import FREE_MAX
from txmq.client.admin.cluster import Users
from txmq.errors import ConfigError, UnauthenticatedError
from txmq.protocol.answers import AnswerReader
from txmq.protocol.certificates import end_point
from txmq.protocol.scram import ScramAttempt
from txmq.runtime.tls import ClientTls
from txmq.testing.certificates import CertificateAuthority
from txmq.testing.processes.broker import BrokerProcess

from .tls_brokers import address, settings_of, trusting

PASSWORD = "pencil"
_sources = count(2)  # failed logins slow down their address, and no other


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return CertificateAuthority(tmp_path_factory.mktemp("tls") / "ca")


@pytest.fixture(scope="module")
def certificate(authority: CertificateAuthority) -> TlsFiles:
    return authority.issue("broker")


@pytest.fixture(scope="module")
def shop(authority: CertificateAuthority) -> TlsFiles:
    return authority.issue("shop", hosts=["shop.example.org"])


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory, certificate: TlsFiles) -> Iterator[BrokerProcess]:
    with serving(tmp_path_factory.mktemp("broker"), certificate) as running:
        yield running


@pytest.fixture
def fresh(tmp_path: Path, certificate: TlsFiles) -> Iterator[BrokerProcess]:
    """One where no login has failed: those of clients come all from one address."""
    with serving(tmp_path, certificate) as running:
        yield running


@contextmanager
def serving(directory: Path, certificate: TlsFiles) -> Iterator[BrokerProcess]:
    """A broker that has the users ``ops``, by password, and ``shop``, by certificate."""
    settings = settings_of(certificate, tls_ca=certificate.ca, tls_client_certificates="optional")
    trusted = TlsFiles(certificate.ca)
    with BrokerProcess(directory / "data", settings=settings) as running:
        with txmq.connect(address(running, trusted)) as client:
            Users(client.control, client.timeout).add("ops", PASSWORD)
        with txmq.connect(as_user("ops", running, trusted), password=PASSWORD) as client:
            users = Users(client.control, client.timeout)
            users.add("shop", None, "DNS:shop.example.org")
            users.acl("grant", "shop", {"may": "write", "topic": "a"})
            client.topics.create("a")
        yield running


def as_user(user: str, broker: BrokerProcess, files: TlsFiles) -> str:
    return address(broker, files).replace("://", f"://{user}@")


# --- clients ----------------------------------------------------------------------------------------------------------


def test_password_logs_in_over_tls(fresh: BrokerProcess, authority: CertificateAuthority) -> None:
    text = as_user("ops", fresh, trusting(authority))
    with txmq.connect(text, password=PASSWORD) as client, client.producer() as producer:
        producer.send("a", b"hello")
    with pytest.raises(UnauthenticatedError, match="user or password is wrong"):
        txmq.connect(text, password="pencils")


def test_certificate_logs_its_user_in(fresh: BrokerProcess, shop: TlsFiles, certificate: TlsFiles) -> None:
    with txmq.connect(as_user("shop", fresh, shop)) as client, client.producer() as producer:
        producer.send("a", b"from the shop")
    with pytest.raises(UnauthenticatedError, match="this client's certificate is not ops's"):
        txmq.connect(as_user("ops", fresh, shop))
    with pytest.raises(UnauthenticatedError, match="this client's certificate is not shop's"):
        txmq.connect(as_user("shop", fresh, certificate))
    with pytest.raises(ConfigError, match="there is no password of shop"):
        txmq.connect(as_user("shop", fresh, TlsFiles(shop.ca)))


def test_client_on_an_event_loop_logs_in(fresh: BrokerProcess, shop: TlsFiles) -> None:
    async def played() -> None:
        for text, password in ((as_user("shop", fresh, shop), ""), (as_user("ops", fresh, shop), PASSWORD)):
            async with await txmq.aio.connect(text, password=password) as client, client.producer() as producer:
                await producer.send("a", b"from a loop")
        with pytest.raises(UnauthenticatedError):
            await txmq.aio.connect(as_user("ops", fresh, shop), password="pencils")

    asyncio.run(played())


# --- somebody in between ----------------------------------------------------------------------------------------------


@contextmanager
def relayed(broker: BrokerProcess, shown: TlsFiles, trusted: TlsFiles) -> Iterator[int]:
    """Somebody shows a certificate of his own that clients trust, and passes on what both sides say; his port."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(shown.cert, shown.key)
    ends: list[ssl.SSLSocket] = []

    def serve() -> None:
        with suppress(OSError):
            while True:
                client = server.wrap_socket(listener.accept()[0], server_side=True)
                ends.append(client)
                behind = socket.create_connection((broker.host, broker.port), 60)
                ends.append(ClientTls(trusted).context.wrap_socket(behind, server_hostname="localhost"))
                threads.append(Thread(target=_pass_on, args=tuple(ends[-2:])))
                threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threads = [Thread(target=serve)]
        threads[0].start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            threads[0].join()
            for end in ends:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()
            for end in ends:
                end.close()


def _pass_on(client: ssl.SSLSocket, broker: ssl.SSLSocket) -> None:
    """Both ways in one thread: OpenSSL takes a connection's reads and writes from one thread at a time."""
    targets = {client: broker, broker: client}
    with suppress(OSError), selectors.DefaultSelector() as readable:
        for source, target in targets.items():
            readable.register(source, selectors.EVENT_READ, (source, target))
        while all(_is_passed_on(*key.data) for key, _ in readable.select()):
            """Go on."""
    for end in targets:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _is_passed_on(source: ssl.SSLSocket, target: ssl.SSLSocket) -> bool:
    """Pass on what has come; False if that was the end."""
    source.settimeout(0.0)
    target.settimeout(60.0)
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
    except ssl.SSLWantReadError:  # a part of a record, or what TLS itself has to say
        return True
    return False


@pytest.mark.parametrize("is_other", [True, False], ids=["another certificate", "the broker's own"])
def test_login_through_a_relay_needs_the_broker_s_certificate(
    fresh: BrokerProcess, authority: CertificateAuthority, certificate: TlsFiles, is_other: bool
) -> None:
    shown = authority.issue("relay") if is_other else certificate
    with relayed(fresh, shown, trusting(authority)) as port:
        text = as_user("ops", fresh, trusting(authority)).replace(f":{fresh.port}?", f":{port}?")
        if is_other:
            with pytest.raises(UnauthenticatedError):
                txmq.connect(text, password=PASSWORD)
        else:
            txmq.connect(text, password=PASSWORD).close()


# --- messages ---------------------------------------------------------------------------------------------------------


class Stranger:
    """A connection of its own address, which logs in by messages that somebody may have altered."""

    def __init__(self, broker: BrokerProcess, files: TlsFiles) -> None:
        number = next(_sources)
        source = (f"127.9.{number >> 8}.{number & 255}", 0)
        bare = socket.create_connection((broker.host, broker.port), 10, source)
        self._socket = ClientTls(files).context.wrap_socket(bare, server_hostname="localhost")
        self._reader = AnswerReader()
        self.binding = end_point(self._socket.getpeercert(binary_form=True) or b"")

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def auth(self, message: bytes, mechanism: str = "scram-sha-256") -> tuple[int, bytes]:
        """One message; the code and text of the answer."""
        self._socket.sendall(b"auth %b %d A1\r\n%b" % (mechanism.encode(), len(message), message))
        return self._answer()

    def is_in(self) -> bool:
        """Whether it may ask something."""
        self._socket.sendall(b"meta * A2\r\n")
        return self._answer()[0] == 200

    def _answer(self) -> tuple[int, bytes]:
        while True:
            for code, _opaque, body, _ in self._reader.feed(self._socket.recv(1 << 16)):
                return code, bytes(body).removesuffix(b"\n")

    def attempt(self) -> ScramAttempt:
        return ScramAttempt("ops", PASSWORD, "abcdef", self.binding)


def test_client_messages_altered_in_every_position_log_nobody_in(
    broker: BrokerProcess, authority: CertificateAuthority
) -> None:
    files = trusting(authority)
    with Stranger(broker, files) as one:
        attempt = one.attempt()
        first = attempt.first()
        final = attempt.final(one.auth(first)[1])
        assert one.auth(final)[0] == 200
        assert one.is_in()
    for begin in range(0, max(len(first), len(final)), FREE_MAX):
        with Stranger(broker, files) as one:
            for position in range(begin, min(begin + FREE_MAX, len(final))):
                attempt = one.attempt()
                told = one.auth(attempt.first())[1]
                assert one.auth(_altered(attempt.final(told), position))[0] == 401, position
                assert not one.is_in(), position
        with Stranger(broker, files) as one:
            for position in range(begin, min(begin + FREE_MAX, len(first))):
                attempt = one.attempt()
                code, told = one.auth(_altered(attempt.first(), position))
                assert code == 401 or not _is_taken(one, attempt, told), position
                assert not one.is_in(), position


def _is_taken(one: Stranger, attempt: ScramAttempt, server_first: bytes) -> bool:
    """The login's end; a client that finds the answer altered sends none, and another one's message ends it."""
    try:
        final = attempt.final(server_first)
    except UnauthenticatedError:
        final = b"c=biws,r=x,p=eA=="
    return one.auth(final)[0] != 401


def _altered(message: bytes, position: int) -> bytes:
    altered = bytearray(message)
    altered[position] ^= 1
    return bytes(altered)


@pytest.mark.parametrize("header", [b"n,,", b"y,,", b"p=tls-unique,,"])
def test_binding_taken_off_is_refused(broker: BrokerProcess, authority: CertificateAuthority, header: bytes) -> None:
    with Stranger(broker, trusting(authority)) as one:
        bound = one.attempt().first()
        assert bound.startswith(b"p=tls-server-end-point,,")
        assert one.auth(header + bound.split(b",,", 1)[1])[0] == 401
        assert not one.is_in()
        unbound = ScramAttempt("ops", PASSWORD, "abcdef")
        assert one.auth(unbound.first())[0] == 401
        wrong = ScramAttempt("ops", PASSWORD, "abcdef", bytes(32))
        assert one.auth(wrong.final(one.auth(wrong.first())[1]))[0] == 401


def test_messages_heard_once_log_nobody_in(broker: BrokerProcess, authority: CertificateAuthority) -> None:
    with Stranger(broker, trusting(authority)) as one:
        attempt = one.attempt()
        first = attempt.first()
        final = attempt.final(one.auth(first)[1])
        assert one.auth(final)[0] == 200
    with Stranger(broker, trusting(authority)) as eavesdropper:
        assert eavesdropper.auth(final)[0] == 401
        assert eavesdropper.auth(first)[0] == 200
        assert eavesdropper.auth(final)[0] == 401
        assert not eavesdropper.is_in()


def test_plain_password_logs_in_over_tls(broker: BrokerProcess, authority: CertificateAuthority) -> None:
    with Stranger(broker, trusting(authority)) as one:
        assert one.auth(b"\0ops\0pencils", "plain")[0] == 401
        assert one.auth(b"\0ops\0pencil", "plain")[0] == 200
        assert one.is_in()
