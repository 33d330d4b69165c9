"""TLS sans-I/O: conversations of two sessions in memory, and a stream over a socket that takes little at a time."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import cast

import pytest

from txmq.addresses import TlsFiles
from txmq.errors import ConfigError
from txmq.protocol.certificates import names_of
from txmq.runtime import net
from txmq.runtime.ports import Buffer
from txmq.runtime.tls import ALPN, ClientTls, ServerTls, TlsSession, TlsStream, explained
from txmq.testing.certificates import CertificateAuthority

RECORD = bytes(range(256)) * 64


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    made = CertificateAuthority(tmp_path_factory.mktemp("tls") / "ca")
    made.issue("broker")
    return made


def files(authority: CertificateAuthority, name: str = "broker") -> TlsFiles:
    directory = authority.directory
    return TlsFiles(str(authority.certificate), str(directory / f"{name}.pem"), str(directory / f"{name}.key"))


def trusted(authority: CertificateAuthority) -> ClientTls:
    return ClientTls(TlsFiles(str(authority.certificate)))


def shaken(client: TlsSession, server: TlsSession, pieces: Callable[[bytes], Sequence[bytes]] = lambda b: [b]) -> None:
    """Let both shake hands. Raises what the first of them raises."""
    done = {client: False, server: False}
    for _ in range(6):
        for one, other in ((client, server), (server, client)):
            try:
                done[one] = done[one] or one.shake()
            finally:
                for piece in pieces(one.take()):
                    other.feed(piece)
    assert all(done.values())


def joined(authority: CertificateAuthority, host: str = "localhost") -> tuple[TlsSession, TlsSession]:
    client, server = trusted(authority).session(host), ServerTls(files(authority)).session()
    shaken(client, server)
    return client, server


def plain(session: TlsSession) -> bytes:
    buffer = memoryview(bytearray(1 << 16))
    return bytes(buffer[: session.read_into(buffer)])


def test_what_one_side_encrypts_the_other_reads(authority: CertificateAuthority) -> None:
    client, server = joined(authority)
    wire = client.encrypt(b"hello")
    assert b"hello" not in wire
    server.feed(wire)
    assert plain(server) == b"hello"
    assert plain(server) == b""
    client.feed(server.encrypt(RECORD * 3))
    assert plain(client) == RECORD * 3


def test_both_sides_know_the_certificate_that_was_shown(tmp_path: Path) -> None:
    authority = CertificateAuthority(tmp_path / "ca")
    broker, other = authority.issue("broker"), authority.issue("other")
    certificates = []
    for shown in (broker, other):
        client, server = trusted(authority).session("localhost"), ServerTls(shown).session()
        shaken(client, server)
        assert ssl.DER_cert_to_PEM_cert(server.server_certificate) == Path(shown.cert).read_text("ascii")
        assert client.server_certificate == server.server_certificate
        certificates.append(client.server_certificate)
    assert certificates[0] != certificates[1]


@pytest.mark.parametrize("asked", ["none", "optional", "required"])
def test_replaced_certificate_is_shown_from_then_on(tmp_path: Path, asked: str) -> None:
    authority = CertificateAuthority(tmp_path / "ca")
    shown, other = authority.issue("broker"), authority.issue("other")
    server_tls = ServerTls(shown, asked)
    old = server_tls.session()
    for there, now in ((other.cert, shown.cert), (other.key, shown.key)):
        Path(now).write_bytes(Path(there).read_bytes())
    server_tls.reload()
    client, server = ClientTls(other).session("localhost"), server_tls.session()
    shaken(client, server)
    assert client.server_certificate == server.server_certificate != old.server_certificate


def test_server_knows_what_a_client_has_shown(tmp_path: Path) -> None:
    authority = CertificateAuthority(tmp_path / "ca")
    shown, shop = authority.issue("broker"), authority.issue("shop", hosts=["shop.example.org"])
    for files_of_client, names in ((shop, {"CN=shop", "DNS:shop.example.org"}), (TlsFiles(shop.ca), set[str]())):
        client, server = ClientTls(files_of_client).session("localhost"), ServerTls(shown, "optional").session()
        shaken(client, server)
        assert names_of(server.client_certificate) == names


def test_record_of_16_kib_comes_byte_by_byte(authority: CertificateAuthority) -> None:
    client, server = joined(authority)
    wire = client.encrypt(RECORD)
    assert len(wire) > 1 << 14
    for number in range(len(wire) - 1):
        server.feed(wire[number : number + 1])
        assert plain(server) == b""
    server.feed(wire[-1:])
    assert plain(server) == RECORD


def test_handshake_comes_byte_by_byte(authority: CertificateAuthority) -> None:
    client, server = trusted(authority).session("localhost"), ServerTls(files(authority)).session()
    shaken(client, server, lambda data: [data[at : at + 1] for at in range(len(data))])


def test_buffer_that_is_full_leaves_the_rest(authority: CertificateAuthority) -> None:
    client, server = joined(authority)
    server.feed(client.encrypt(RECORD * 2))
    small, read = memoryview(bytearray(5000)), b""
    while (size := server.read_into(small)) == len(small):
        read += small
    assert read + bytes(small[:size]) == RECORD * 2


@pytest.mark.parametrize("at", [0, 5, 100, -1])
def test_altered_record_ends_the_conversation(authority: CertificateAuthority, at: int) -> None:
    client, server = joined(authority)
    wire = bytearray(client.encrypt(b"hello" * 100))
    wire[at] ^= 1
    server.feed(wire)
    with pytest.raises(ssl.SSLError):
        plain(server)


def test_replayed_record_ends_the_conversation(authority: CertificateAuthority) -> None:
    client, server = joined(authority)
    wire = client.encrypt(b"put")
    server.feed(wire)
    assert plain(server) == b"put"
    server.feed(wire)
    with pytest.raises(ssl.SSLError):
        plain(server)


def test_end_is_told_to_the_other_side(authority: CertificateAuthority) -> None:
    client, server = joined(authority)
    server.feed(client.encrypt(b"last"))
    server.feed(client.end())
    assert plain(server) + plain(server) == b"last"
    assert server.has_ended
    client.feed(server.encrypt(b"answer"))
    assert plain(client) == b"answer"


# --- who is trusted ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1"])
def test_certificate_holds_for_its_hosts(authority: CertificateAuthority, host: str) -> None:
    joined(authority, host)


@pytest.mark.parametrize("host", ["example.org", "127.0.0.2", "localhost.example.org"])
def test_certificate_of_another_host_is_refused(authority: CertificateAuthority, host: str) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        joined(authority, host)


def test_common_name_is_no_alternative_name(tmp_path: Path) -> None:
    authority = CertificateAuthority(tmp_path / "ca")
    broker = authority.issue("broker", hosts=(), name="localhost")
    with pytest.raises(ssl.SSLCertVerificationError):
        shaken(trusted(authority).session("localhost"), ServerTls(broker).session())


@pytest.mark.parametrize(("hosts", "is_right"), [(("localhost",), True), ((), False), (("other",), False)])
def test_socket_of_a_library_checks_alike(tmp_path: Path, hosts: tuple[str, ...], *, is_right: bool) -> None:
    authority = CertificateAuthority(tmp_path / "ca")
    shown = authority.issue("zoo", hosts=hosts, name="localhost")
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(shown.cert, shown.key)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            accepted, _ = listener.accept()
            with accepted, suppress(OSError), serving.wrap_socket(accepted, server_side=True) as encrypted:
                encrypted.sendall(b"hello")
                encrypted.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            address = listener.getsockname()
            if is_right:
                with trusted(authority).connected_socket(address, "localhost", 60.0) as connected:
                    assert connected.recv(5) == b"hello"
            else:
                with pytest.raises(ssl.SSLCertVerificationError):
                    trusted(authority).connected_socket(address, "localhost", 60.0)
        finally:
            thread.join()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("asks_for_tickets", [True, False])
def test_session_is_not_resumed(
    authority: CertificateAuthority, version: ssl.TLSVersion, *, asks_for_tickets: bool
) -> None:
    """A client's certificate would not be looked at again: it may have expired, or its CA be trusted no more."""
    server, asking = ServerTls(files(authority), "optional"), trusted(authority).context
    asking.maximum_version = version
    asking.options |= 0 if asks_for_tickets else ssl.OP_NO_TICKET
    met: list[bool] = []
    kept: ssl.SSLSession | None = None
    for _ in range(3):
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = asking.wrap_bio(incoming, outgoing, server_hostname="localhost", session=kept)
        other = server.session()
        try:
            while not other.shake():
                with suppress(ssl.SSLWantReadError):
                    incoming.write(other.take())
                    client.do_handshake()
                other.feed(outgoing.read())
        except ssl.SSLError:
            met.append(False)
            kept = None  # a client asks for it once: then the server knows it no more
            continue
        incoming.write(other.take())
        with suppress(ssl.SSLWantReadError):
            client.do_handshake()
            client.read(1)  # tickets come after the handshake
        assert not client.session_reused
        met.append(True)
        kept = client.session
        assert kept is None or not kept.has_ticket
        with suppress(ssl.SSLWantReadError):
            client.unwrap()
        other.feed(outgoing.read())
        assert plain(other) == b""
        other.end()
    assert met == ([True, False, True] if version is ssl.TLSVersion.TLSv1_2 else [True] * 3)


def test_expired_certificate_is_refused(tmp_path: Path) -> None:
    authority = CertificateAuthority(tmp_path)
    authority.issue("broker", valid=timedelta(seconds=-10))
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        joined(authority)


def test_certificate_of_another_ca_is_refused(authority: CertificateAuthority, tmp_path: Path) -> None:
    client = trusted(CertificateAuthority(tmp_path)).session("localhost")
    with pytest.raises(ssl.SSLCertVerificationError) as raised:
        shaken(client, ServerTls(files(authority)).session())
    assert "the other side's certificate is refused" in str(explained(raised.value))


def test_client_shows_its_certificate_where_that_is_required(authority: CertificateAuthority) -> None:
    server = ServerTls(files(authority), "required")
    shaken(ClientTls(files(authority)).session("localhost"), server.session())
    with pytest.raises(ssl.SSLError, match="PEER_DID_NOT_RETURN_A_CERTIFICATE"):
        shaken(trusted(authority).session("localhost"), server.session())


def test_certificate_that_is_optional_must_be_valid(authority: CertificateAuthority, tmp_path: Path) -> None:
    server = ServerTls(files(authority), "optional")
    shaken(trusted(authority).session("localhost"), server.session())
    stranger = CertificateAuthority(tmp_path).issue("client")
    client = ClientTls(TlsFiles(str(authority.certificate), stranger.cert, stranger.key))
    with pytest.raises(ssl.SSLCertVerificationError):
        shaken(client.session("localhost"), server.session())


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_versions_of_today_are_spoken(authority: CertificateAuthority, version: ssl.TLSVersion) -> None:
    client = trusted(authority)
    client.context.maximum_version = version
    session = client.session("localhost")
    shaken(session, ServerTls(files(authority)).session())
    assert session.version == version.name.replace("_", ".")


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_versions_of_yesterday_are_refused(authority: CertificateAuthority) -> None:
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.load_verify_locations(authority.certificate)
    old.set_ciphers("ALL:@SECLEVEL=0")
    old.minimum_version = ssl.TLSVersion.TLSv1
    old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError, match="UNSUPPORTED_PROTOCOL"):
        shaken(TlsSession(old, server_side=False, host="localhost"), ServerTls(files(authority)).session())


def test_both_sides_name_the_protocol(authority: CertificateAuthority) -> None:
    client, server = joined(authority)
    assert client._ssl.selected_alpn_protocol() == server._ssl.selected_alpn_protocol() == ALPN


def test_garbage_is_no_handshake(authority: CertificateAuthority) -> None:
    server = ServerTls(files(authority)).session()
    server.feed(b"\x16" + os.urandom(2000))
    with pytest.raises(ssl.SSLError):
        server.shake()


# --- files ------------------------------------------------------------------------------------------------------------


def test_files_that_cannot_be_read_are_told(authority: CertificateAuthority, tmp_path: Path) -> None:
    good, other = files(authority), CertificateAuthority(tmp_path / "other").issue("broker")
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("nothing")
    with pytest.raises(ConfigError, match=r"cannot read .*absent.pem"):
        ServerTls(TlsFiles("", "absent.pem", good.key))
    with pytest.raises(ConfigError, match="do not belong together"):
        ServerTls(TlsFiles("", good.cert, other.key))
    with pytest.raises(ConfigError, match="are no certificate and key in PEM"):
        ServerTls(TlsFiles("", str(garbage), good.key))
    with pytest.raises(ConfigError, match=r"garbage.pem holds no certificates"):
        ClientTls(TlsFiles(str(garbage)))
    with pytest.raises(ConfigError, match="go together"):
        TlsFiles("", good.cert)


def test_key_with_a_passphrase_asks_nobody(authority: CertificateAuthority, tmp_path: Path) -> None:
    good, locked = files(authority), tmp_path / "locked.key"
    command = ["openssl", "pkey", "-in", good.key, "-aes256", "-passout", "pass:secret", "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(ConfigError, match=r"locked.key needs a passphrase"):
        ServerTls(TlsFiles("", good.cert, str(locked)))


def test_reloaded_certificate_counts_for_new_sessions(tmp_path: Path) -> None:
    old, new = CertificateAuthority(tmp_path / "old"), CertificateAuthority(tmp_path / "new")
    shown, replacement = old.issue("broker"), new.issue("broker")
    server = ServerTls(shown)
    client, kept = trusted(old).session("localhost"), server.session()
    shaken(client, kept)
    Path(replacement.cert).replace(shown.cert)
    with pytest.raises(ConfigError, match="do not belong together"):
        server.reload()
    shaken(trusted(old).session("localhost"), server.session())  # as before
    Path(replacement.key).replace(shown.key)
    server.reload()
    shaken(trusted(new).session("localhost"), server.session())
    kept.feed(client.encrypt(b"still here"))
    assert plain(kept) == b"still here"


def test_client_reads_files_that_changed(authority: CertificateAuthority, tmp_path: Path) -> None:
    other = CertificateAuthority(tmp_path / "other")
    ca = tmp_path / "ca.pem"
    ca.write_bytes(other.certificate.read_bytes())
    client, server = ClientTls(TlsFiles(str(ca))), ServerTls(files(authority))
    with pytest.raises(ssl.SSLCertVerificationError):
        shaken(client.session("localhost"), server.session())
    os.utime(ca, (1, 1))
    ca.write_text("half written")
    assert client.context is client.context
    ca.write_bytes(authority.certificate.read_bytes())
    os.utime(ca, (2, 2))
    shaken(client.session("localhost"), server.session())


# --- a stream ---------------------------------------------------------------------------------------------------------


class NarrowSocket:
    """Takes a few bytes at a time, and is full now and then."""

    def __init__(self) -> None:
        self.taken, self.arriving = b"", list[bytes]()
        self._turn = 0

    def send(self, buffers: Sequence[Buffer]) -> int:
        self._turn += 1
        size = min(777, len(buffers[0])) if self._turn % 3 else 0
        self.taken += bytes(buffers[0][:size])
        return size

    def receive(self, timeout: float = 0.0) -> memoryview | None:
        return memoryview(self.arriving.pop(0)) if self.arriving else None


def stream(authority: CertificateAuthority) -> tuple[TlsStream, NarrowSocket, TlsSession]:
    client, server = joined(authority)
    tcp = NarrowSocket()
    return TlsStream(cast(net.TcpStream, tcp), client), tcp, server


def test_stream_counts_what_the_socket_has_taken(authority: CertificateAuthority) -> None:
    """The caller gives the rest again, as it does with a plain socket, and each byte goes once."""
    opened, tcp, server = stream(authority)
    sent = os.urandom(300_000)
    rest, read, calls = [sent[:100], sent[100:200_000], sent[200_000:]], b"", 0
    while rest:
        before = len(tcp.taken)
        taken = opened.send(rest)
        calls += 1
        assert taken <= len(b"".join(rest))
        assert taken or len(tcp.taken) >= before
        left = b"".join(rest)[taken:]
        rest = [left] if left else []
    assert calls > 100
    for at in range(0, len(tcp.taken), 10_000):
        server.feed(tcp.taken[at : at + 10_000])
        read += plain(server)
    assert read == sent
    assert opened.send([b""]) == 0


def test_stream_has_nothing_until_a_record_is_whole(authority: CertificateAuthority) -> None:
    opened, tcp, server = stream(authority)
    wire = server.encrypt(b"answer")
    tcp.arriving = [wire[:-1], wire[-1:], server.end(), b""]
    assert opened.receive() is None
    answer = opened.receive()
    assert answer is not None
    assert bytes(answer) == b"answer"
    for _ in range(2):  # the other side's word, and its system's
        end = opened.receive()
        assert end is not None
        assert not end
    assert opened.receive() is None


def test_stream_explains_what_is_no_tls(authority: CertificateAuthority) -> None:
    opened, tcp, _ = stream(authority)
    tcp.arriving = [b"result 200 0 1\r\n"]
    with pytest.raises(OSError, match="TLS failed: the other side does not speak TLS there"):
        opened.receive()
