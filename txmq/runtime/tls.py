"""TLS without a socket of its own: the only home of ``ssl``. Both sides of a broker's port speak it through here.

Theory of operation. ``TlsSession`` is one side of a conversation, sans-I/O: bytes from the network are fed, plain bytes
are read; plain bytes are encrypted, and what results is sent by the caller. It stands between the broker's sockets and
their shared receive buffer (``broker/shell/tls_transport.py``), and between a client's socket and its answers
(``TlsStream``, also for ``loop_stream``). asyncio's own TLS is slower over a ``BufferedProtocol``
(cpython#133112), takes 256 KiB for a connection, and its start_tls can lose bytes (uvloop#707).

``ClientTls`` and ``ServerTls`` hold what a session begins with. A client reads its files again if they have changed
when it connects, a broker when it is told (``reload``); conversations that stand keep what they began with.

Invariants:
    * TLS 1.2 and 1.3, nothing older, no renegotiation;
    * no session is resumed: each conversation checks certificates anew, as of its own time;
    * a client checks certificate and host name, always, by the alternative names alone; it has no way to speak
      plaintext;
    * a private key that needs a passphrase is refused: nobody is asked at a terminal.

Source: RFC 8446; Python documentation, "ssl", "Memory BIO Support".

Where the records of a TLS conversation end: OpenSSL keeps what it has of one, and does not say so.

Source: RFC 8446, 5.1: a header of five bytes, whose last two are the length of what follows.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast

from txmq.addresses import TlsFiles
from txmq.errors import ConfigError
from txmq.runtime import net
from txmq.runtime.ports import Buffer
from txmq.runtime.threads import Lock

TlsError = ssl.SSLError
ALPN: Final = "txmq"
RECORD_SIZE_BYTES_MAX: Final = (16 << 10) + 512  # with header, padding and authentication
_PIECE_SIZE_BYTES: Final = 128 << 10  # encrypted in one go, and sent before more is
_FIRST_READ_BYTES: Final = 16 << 10
_UNKNOWN_CA: Final = frozenset({18, 19, 20})  # of X509_verify_cert: self-signed, in the chain, too, and no issuer
_REASONS: Final = {
    "WRONG_VERSION_NUMBER": "the other side does not speak TLS there; a broker's setting is tls_certificate",
    "HTTP_REQUEST": "the other side does not speak TLS there; a broker's setting is tls_certificate",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the broker asks for a client certificate: give cert and key",
    "TLSV1_ALERT_UNKNOWN_CA": "the other side does not know the CA of this certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "the other side says that this certificate has expired",
    "SSLV3_ALERT_BAD_CERTIFICATE": "the other side refuses this certificate",
    "TLSV1_ALERT_PROTOCOL_VERSION": "the two sides have no version of TLS in common",
    "UNSUPPORTED_PROTOCOL": "the two sides have no version of TLS in common",
}
_HEADER_SIZE_BYTES: Final = 5


class TlsSession:
    """One side of a conversation; see the module's docstring. One thread at a time.

    Args:
        shown: of the server's side, the certificate that it shows, in DER.

    Attributes:
        has_ended: the other side has said that it sends no more.
    """

    __slots__ = ("_incoming", "_outgoing", "_shown", "_ssl", "has_ended")

    def __init__(
        self, context: ssl.SSLContext, *, server_side: bool, host: str | None = None, shown: bytes = b""
    ) -> None:
        self._shown = shown
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._ssl = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side, server_hostname=host)
        self.has_ended = False

    def feed(self, arrived: Buffer) -> None:
        """Take in what came from the network."""
        self._incoming.write(arrived)

    def shake(self) -> bool:
        """Go on with the handshake; whether it is complete. ``take`` has what must be sent, also after an error.

        Raises:
            ssl.SSLError: it failed, or the client resumes a session.
        """
        try:
            self._ssl.do_handshake()
        except ssl.SSLWantReadError:
            return False
        # By TLS 1.2 without tickets OpenSSL keeps sessions for two hours, and Python has no switch for that. It forgets
        # one that did not end well, so such a client is refused once, and then shakes hands as at first.
        if self._ssl.server_side and self._ssl.session_reused:
            raise ssl.SSLError(1, "the client resumes a session, and none is resumed here")
        return True

    def take(self) -> bytes:
        """What the caller must send."""
        return self._outgoing.read()

    def read_into(self, buffer: memoryview) -> int:
        """Fill a buffer with plain bytes; how many. Less than the buffer holds: there are no more.

        Raises:
            ssl.SSLError: what was fed is no TLS, or not of this conversation.
        """
        size, room = 0, len(buffer)
        incoming, conversation = self._incoming, self._ssl
        try:
            while size < room:
                got = cast(int, conversation.read(room - size, cast(bytearray, buffer[size:])))  # into any buffer
                if not got:
                    self.has_ended = True
                    break
                size += got
                if not incoming.pending and not conversation.pending():
                    break  # without this look the next read would raise, which costs 2 us
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self.has_ended = True
        return size

    def encrypt(self, plain: Buffer) -> bytes:
        """What must be sent for plain bytes. Raises ssl.SSLError."""
        write, size = self._ssl.write, len(plain)
        done = write(plain)
        if done < size:  # one record at a time
            rest = memoryview(plain)
            while done < size:
                done += write(rest[done:])
        return self._outgoing.read()

    def end(self) -> bytes:
        """What tells the other side that nothing more comes."""
        try:
            self._ssl.unwrap()
        except ssl.SSLError:
            pass  # the other side has not said so yet, or not even shaken hands
        return self._outgoing.read()

    @property
    def version(self) -> str:
        """Such as ``TLSv1.3``; empty before the handshake."""
        return self._ssl.version() or ""

    @property
    def server_certificate(self) -> bytes:
        """In DER, after the handshake: the same on both sides unless somebody stands between."""
        return self._shown or self._ssl.getpeercert(binary_form=True) or b""

    @property
    def client_certificate(self) -> Mapping[str, Any]:
        """Of the server's side, what the client has shown and what was checked, as ``ssl`` tells it; else empty."""
        return self._ssl.getpeercert() or {}


# --- a broker ---------------------------------------------------------------------------------------------------------


class ServerTls:
    """What a broker's door shows and asks for.

    Args:
        files: certificate and key, and the CA of clients if they are asked for theirs.
        client_certificates: ``none``, ``optional`` or ``required``.

    Raises:
        ConfigError: a file cannot be read.
    """

    def __init__(self, files: TlsFiles, client_certificates: str = "none") -> None:
        self._files, self._client_certificates = files, client_certificates
        self._context, self._shown = self._load()

    def session(self) -> TlsSession:
        """The server's side of a new conversation."""
        return TlsSession(self._context, server_side=True, shown=self._shown)

    def reload(self) -> None:
        """Read the files again, for conversations that begin from now on.

        Raises:
            ConfigError: a file cannot be read; what was read before counts on.
        """
        self._context, self._shown = self._load()

    def _load(self) -> tuple[ssl.SSLContext, bytes]:
        context = _hardened(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        context.num_tickets = 0  # by TLS 1.3: tickets would cost each connection half a KiB and a write
        context.options |= ssl.OP_NO_TICKET  # by TLS 1.2: one certificate, shown once, would let in for two hours
        _load_certificate(context, self._files)
        if self._client_certificates != "none":
            _load_ca(context, self._files.ca)
            is_required = self._client_certificates == "required"
            context.verify_mode = ssl.CERT_REQUIRED if is_required else ssl.CERT_OPTIONAL
        return context, _shown_by(context)


def _shown_by(context: ssl.SSLContext) -> bytes:
    """The certificate that a client is shown: asked as one, since the file may have changed since it was read."""
    asking = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    asking.check_hostname, asking.verify_mode = False, ssl.CERT_NONE  # it trusts nobody with anything
    client, server = TlsSession(asking, server_side=False), TlsSession(context, server_side=True)
    for one, other in ((client, server), (server, client)):
        one.shake()
        other.feed(one.take())
    client.shake()
    return client.server_certificate


# --- a client ---------------------------------------------------------------------------------------------------------


class ClientTls:
    """What a client trusts and shows.

    Raises:
        ConfigError: a file cannot be read.

    Thread safety: any thread.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._read_at = self._changed_at()
        self._context = self._load()

    def _load(self) -> ssl.SSLContext:
        context = _hardened(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))  # checks certificate and host name
        context.hostname_checks_common_name = False  # else it does where there is no alternative name (RFC 9110, 4.3.4)
        if self._files.ca:
            _load_ca(context, self._files.ca)
        else:
            context.load_default_certs()
        if self._files.cert:
            _load_certificate(context, self._files)
        return context

    def _changed_at(self) -> tuple[int, ...]:
        files = self._files
        try:
            return tuple(Path(name).stat().st_mtime_ns for name in (files.ca, files.cert, files.key) if name)
        except OSError:
            return ()  # ``_load`` says which

    @property
    def context(self) -> ssl.SSLContext:
        """For a conversation that begins now. Files that are being replaced do not count before they are whole."""
        changed_at = self._changed_at()
        if changed_at != self._read_at:
            try:
                self._context = self._load()
            except ConfigError:
                return self._context
            self._read_at = changed_at
        return self._context

    def session(self, host: str) -> TlsSession:
        """The client's side of a new conversation with the host of an address."""
        try:
            return TlsSession(self.context, server_side=False, host=host)
        except ValueError as error:  # such as a name of 64 characters without a dot
            raise OSError(f"{host!r} is no host name that a certificate could have: {error}") from None

    def connect(self, host: str, port: int, timeout: float) -> TlsStream:
        """As ``net.connect``, with the handshake.

        Raises:
            OSError: nobody answers there, not by TLS, or not with a certificate that is valid for the host.
        """
        deadline = time.monotonic() + timeout
        connected = net.connected_socket(host, port, timeout)

        def wait() -> None:
            connected.settimeout(max(deadline - time.monotonic(), 0.001))

        with _closed_on_error(connected):
            session = self.session(host)
            while not _shaken(session):
                wait()
                connected.sendall(session.take())
                wait()
                session.feed(_not_empty(connected.recv(_FIRST_READ_BYTES)))
            wait()
            connected.sendall(session.take())
            return TlsStream(net.adopt(connected), session)

    def connected_socket(self, address: tuple[str, int], host: str, timeout: float) -> ssl.SSLSocket:
        """A connected socket, for a library that wants one; ``host`` is whose certificate must be shown.

        Args:
            timeout: in seconds.

        Raises:
            OSError: as ``connect``.
        """
        connected = socket.create_connection(address, timeout)
        with _closed_on_error(connected):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return self.context.wrap_socket(connected, server_hostname=host)

    async def adopt_on(
        self, loop: asyncio.AbstractEventLoop, connected: socket.socket, host: str, until: float
    ) -> TlsStream:
        """As ``connect``, with a socket that is connected and does not block, in the loop's time."""
        with _closed_on_error(connected):
            session = self.session(host)
            try:
                async with asyncio.timeout_at(until):
                    while not _shaken(session):
                        await loop.sock_sendall(connected, session.take())
                        session.feed(_not_empty(await loop.sock_recv(connected, _FIRST_READ_BYTES)))
                    await loop.sock_sendall(connected, session.take())
            except TimeoutError:
                raise TimeoutError("timed out in the TLS handshake") from None
            return TlsStream(net.adopt(connected), session)


def _shaken(session: TlsSession) -> bool:
    try:
        return session.shake()
    except ssl.SSLError as error:
        raise explained(error) from None


def _not_empty(arrived: bytes) -> bytes:
    if not arrived:
        raise OSError(
            "the other side closed the connection in the TLS handshake: it does not speak TLS there, or has too many "
            "connections"
        )
    return arrived


@contextmanager
def _closed_on_error(connected: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connected.close()
        raise


def explained(error: ssl.SSLError) -> OSError:
    """What failed, in words that say what to look at."""
    if isinstance(error, ssl.SSLCertVerificationError):
        hint = "; name its CA (ca=FILE)" if error.verify_code in _UNKNOWN_CA else ""
        return OSError(f"TLS failed: the other side's certificate is refused: {error.verify_message}{hint}")
    known = _REASONS.get(error.reason or "")
    return OSError(f"TLS failed: {known or error.reason or error}")


# --- both -------------------------------------------------------------------------------------------------------------


def _hardened(context: ssl.SSLContext) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols([ALPN])
    return context


def _load_certificate(context: ssl.SSLContext, files: TlsFiles) -> None:
    def no_passphrase() -> bytes:
        raise ConfigError(f"the private key {files.key} needs a passphrase: give one that is not encrypted, mode 0600")

    try:
        context.load_cert_chain(files.cert, files.key, no_passphrase)
    except ssl.SSLError as error:
        what = (
            "do not belong together" if error.reason == "KEY_VALUES_MISMATCH" else "are no certificate and key in PEM"
        )
        raise ConfigError(f"{files.cert} and {files.key} {what} ({error.reason})") from None
    except OSError as error:
        raise ConfigError(f"cannot read {files.cert} or {files.key}: {error.strerror or error}") from None


def _load_ca(context: ssl.SSLContext, path: str) -> None:
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise ConfigError(f"{path} holds no certificates in PEM ({error.reason})") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None


class TlsStream:
    """An encrypted TCP stream after its handshake; port ``Stream``, and as ``TcpStream`` otherwise.

    ``send`` counts plain bytes as taken when what they were encrypted to is taken: the caller gives the rest again.
    """

    def __init__(self, tcp: net.TcpStream, session: TlsSession) -> None:
        self._tcp, self._session = tcp, session
        self._lock = Lock()  # a session is for one thread at a time: one reads, another sends
        self._buffer = memoryview(
            bytearray(net.RECEIVE_SIZE_BYTES + RECORD_SIZE_BYTES_MAX)
        )  # takes what one read brings
        self._unsent: memoryview = memoryview(b"")  # encrypted
        self._owed = 0  # plain bytes in ``_unsent`` that no ``send`` has reported yet

    def send(self, buffers: Sequence[Buffer]) -> int:
        """See ``Stream``. Raises OSError."""
        taken = 0
        plain = memoryview(buffers[0] if len(buffers) == 1 else b"".join(buffers))
        with self._lock:
            while self._is_sent():
                taken += self._owed
                piece = plain[taken : taken + _PIECE_SIZE_BYTES]
                self._owed = len(piece)
                if not piece:
                    break
                self._unsent = memoryview(self._session.encrypt(piece))
        return taken

    def _is_sent(self) -> bool:
        """Send what is encrypted; whether all of it is on its way."""
        unsent = self._unsent
        if unsent:
            unsent = self._unsent = unsent[self._tcp.send((unsent,)) :]
        return not unsent

    def receive(self, timeout: float = 0.0) -> memoryview | None:
        """See ``Stream``. Raises OSError."""
        arrived = self._tcp.receive(timeout)
        if arrived is None or not arrived:
            return arrived
        session = self._session
        try:
            with self._lock:
                session.feed(arrived)
                size = session.read_into(self._buffer)
        except ssl.SSLError as error:
            raise explained(error) from None
        return self._buffer[:size] if size or session.has_ended else None

    def wait(self, timeout: float, *, writable: bool) -> bool:
        """See ``Stream``."""
        return self._tcp.wait(timeout, writable=writable)

    @property
    def server_certificate(self) -> bytes | None:
        """See ``Stream``."""
        return self._session.server_certificate

    def wait_writable(self, timeout: float) -> bool:
        """See ``Stream``."""
        return self._tcp.wait_writable(timeout)

    def is_quiet(self) -> bool:
        """See ``Stream``."""
        return self._tcp.is_quiet()

    def shut_down(self) -> None:
        """See ``Stream``."""
        self._tcp.shut_down()

    def close(self) -> None:
        """See ``Stream``."""
        self._tcp.close()


class RecordBounds:
    """Follows one side of a conversation from its first byte on."""

    __slots__ = ("_header", "_missing_bytes")

    def __init__(self) -> None:
        self._header = b""  # what there is of an unfinished one
        self._missing_bytes = 0  # of the body of an unfinished record

    def is_within(self, arrived: memoryview) -> bool:
        """Whether a record is begun and not complete, after these bytes from the network."""
        at, size = self._missing_bytes, len(arrived)
        while at < size:
            end = at + _HEADER_SIZE_BYTES - len(self._header)
            header = self._header + arrived[at:end]
            if len(header) < _HEADER_SIZE_BYTES:
                self._header, at = header, size
            else:
                self._header, at = b"", end + (header[3] << 8 | header[4])
        self._missing_bytes = at - size
        return at > size or bool(self._header)
