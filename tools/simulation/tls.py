"""TLS on the simulated network: real records, by the sessions that ship, in the pieces and at the times of a ``Link``.

Theory of operation. Half of the worlds with users have it, on every connection. A real client goes on with
the ``TlsStream`` that ships (``tls_streams``). A scripted one, and a broker that asks another, has its side in
the link (``End``); so has the broker that is asked, as ``TlsTransport`` has it over a socket. Whose certificate a
client has shown is what ``auth external`` goes by then.

Records hold random bytes, and a seed must repeat: nothing that is drawn or traced may depend on them, but their sizes
do count. So every size is fixed: TLS 1.3 without tickets, and Ed25519, whose signatures have one size (those of a curve
such as P-256 do not), with keys and certificates made of their names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from multiprocessing.util import Finalize
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

from txmq.addresses import TlsFiles
from txmq.protocol.certificates import end_point, names_of
from txmq.runtime.tls import ClientTls, ServerTls, TlsError, TlsSession

from .world import Violation

BROKER: Final = "broker"  # whose certificate every home shows
NOBODY: Final = ""  # shows none
_HOSTS: Final = (BROKER, *(f"home{number}" for number in range(10)))
_CA: Final = "ca"
_VALID: Final = datetime(2020, 1, 1, tzinfo=UTC), datetime(2120, 1, 1, tzinfo=UTC)  # of the machine's clock
_READ_BYTES: Final = 256 << 10


# --- certificates ----------------------------------------------------------------------------------------------------


@cache
def _folder() -> Path:
    folder = mkdtemp(prefix="txmq")
    Finalize(None, rmtree, (folder, True), exitpriority=1)  # a worker of a pool ends without what atexit has
    return Path(folder)


def _key(name: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest())


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


@cache
def files_of(name: str) -> TlsFiles:
    """Of a certificate for a common name, and the CA; ``NOBODY`` has the CA alone."""
    ca = str(_folder() / f"{_CA}.pem") if name == _CA else files_of(_CA).ca
    if name == NOBODY:
        return TlsFiles(ca)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(_named(name))
        .issuer_name(_named(_CA))
        .public_key(_key(name).public_key())
        .serial_number(1 + int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]))
        .not_valid_before(_VALID[0])
        .not_valid_after(_VALID[1])
        .add_extension(x509.BasicConstraints(ca=name == _CA, path_length=None), critical=True)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(_key(_CA).public_key()), critical=False
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(_key(name).public_key()), critical=False)
    )  # fmt: skip
    if name == BROKER:
        hosts = x509.SubjectAlternativeName([x509.DNSName(host) for host in _HOSTS])
        certificate = certificate.add_extension(hosts, critical=False)
    if name == _CA:
        usage = x509.KeyUsage(
            digital_signature=False, key_cert_sign=True, crl_sign=True, content_commitment=False,
            key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False,
            decipher_only=False,
        )  # fmt: skip
        certificate = certificate.add_extension(usage, critical=True)
    files = TlsFiles(ca, *(str(_folder() / f"{name}.{end}") for end in ("pem", "key")))
    Path(files.cert).write_bytes(certificate.sign(_key(_CA), None).public_bytes(serialization.Encoding.PEM))
    Path(files.key).write_bytes(
        _key(name).private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return files


@cache
def _of_brokers() -> ServerTls:
    return ServerTls(files_of(BROKER), "optional")


@cache
def _of(name: str) -> ClientTls:
    return ClientTls(files_of(name))


# --- one side in a link ----------------------------------------------------------------------------------------------


class End:
    """One side of a conversation.

    Args:
        send: takes what must be sent.
        take: takes plain bytes that arrived.
        shaken: called when the handshake is complete.
    """

    def __init__(
        self, session: TlsSession, send: Callable[[bytes], None], take: Callable[[bytes], None],
        shaken: Callable[[TlsSession], None],
    ) -> None:  # fmt: skip
        self._session, self._send, self._take, self._shaken = session, send, take, shaken
        self._is_shaken = False
        self._waiting: list[bytes] = []  # for the handshake

    @classmethod
    def of_client(
        cls, name: str, send: Callable[[bytes], None], take: Callable[[bytes], None],
        shaken: Callable[[TlsSession], None],
    ) -> End:  # fmt: skip
        """The side of one that shows the certificate of a name; it speaks first."""
        end = cls(_of(name).session(BROKER), send, take, shaken)
        end._go_on()
        return end

    @classmethod
    def of_broker(
        cls, send: Callable[[bytes], None], take: Callable[[bytes], None], shaken: Callable[[TlsSession], None]
    ) -> End:
        """The broker's side."""
        return cls(_of_brokers().session(), send, take, shaken)

    def write(self, plain: bytes) -> None:
        """Send it, encrypted; after the handshake."""
        if not self._is_shaken:
            self._waiting.append(plain)
        elif plain:
            self._send(self._session.encrypt(plain))

    def arrived(self, data: bytes) -> None:
        """Bytes of the network, which alters none.

        Raises:
            Violation: they are not what the other side should have sent; as an OSError it would pass for a disk's.
        """
        try:
            self._take_in(data)
        except TlsError as error:
            raise Violation(f"TLS: {error}") from None

    def _take_in(self, data: bytes) -> None:
        self._session.feed(data)
        if not self._is_shaken:
            self._go_on()
        if self._is_shaken:
            buffer = memoryview(bytearray(_READ_BYTES))
            while size := self._session.read_into(buffer):
                self._take(bytes(buffer[:size]))

    def _go_on(self) -> None:
        self._is_shaken = self._session.shake()
        data = self._session.take()
        if data:
            self._send(data)
        if self._is_shaken:
            self._shaken(self._session)
            waiting, self._waiting = self._waiting, []
            for plain in waiting:
                self.write(plain)


def shown_by(session: TlsSession) -> frozenset[str]:
    """By which names ``auth external`` knows a client."""
    return names_of(session.client_certificate)


def binding_of(session: TlsSession) -> bytes:
    """What a login is bound to."""
    return end_point(session.server_certificate)
