"""TLS between a socket and its ``Connection``: the protocol of the one, the transport of the other.

Theory of operation. The first byte tells TLS (0x16) from plaintext, which never begins with it. Where the door takes
plaintext as well, the connection gets the socket itself, and this object is gone. Otherwise encrypted bytes come in the
loop's one receive buffer and leave it for the session; their plain bytes are read back into it, and given to the
connection as if they had come that way. A connection that is not read keeps what it was sent encrypted.

Invariants:
    * a door that requires TLS answers plaintext with one refusal, whatever its first byte;
    * a record that is begun is complete in the time of a request (``Connection.awaits``);
    * no byte reaches the connection before the handshake is complete, which is bounded by ``HANDSHAKE_SIZE_BYTES_MAX``
      and, as the first request is, by ``handshake_timeout_ms`` (the connection watches that);
    * a connection that is held gets no bytes, and its socket is not read: 64 KiB and a record wait at most;
    * what the other side sends can end its own connection, and nothing else.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from txmq.broker.shell.connection import Connection
from txmq.protocol import answers
from txmq.protocol.certificates import described, end_point, names_of
from txmq.runtime.tls import ClientTls, RecordBounds, ServerTls, TlsError, TlsSession, explained

if TYPE_CHECKING:
    from txmq.broker.shell.server import Server

HANDSHAKE_SIZE_BYTES_MAX: Final = 64 << 10  # certificates of a client are some KiB
_TLS_FIRST_BYTE: Final = 0x16
_REFUSAL: Final = answers.result(403, b"-", b"forbidden this port takes TLS only; connect with txmqs://")


class BrokerTls(NamedTuple):
    """How a broker speaks TLS."""

    to_clients: ServerTls
    to_brokers: ClientTls | None  # None: the other brokers are spoken to in plaintext


class TlsTransport(asyncio.BufferedProtocol):
    """See the module's docstring. On the loop.

    Args:
        host: the server.
        session: the server's side of a conversation that has not begun.
        takes_plaintext: whether a connection may do without.
    """

    __slots__ = (
        "_connection", "_handshake_bytes", "_has_more", "_is_held", "_is_shaken", "_records", "_session",
        "_takes_plaintext", "_transport",
    )  # fmt: skip

    def __init__(self, host: Server, session: TlsSession, *, takes_plaintext: bool) -> None:
        self._session, self._takes_plaintext = session, takes_plaintext
        self._connection = Connection(host)
        self._transport: asyncio.Transport
        self._records = RecordBounds()
        self._handshake_bytes = 0
        self._is_shaken = False
        self._is_held = False  # the connection is not read
        self._has_more = False  # for the connection, when it is read again

    # --- the protocol of the socket ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A connection that has said nothing yet."""
        self._transport = cast(asyncio.Transport, transport)
        self._connection.connection_made(cast(asyncio.Transport, self))

    def get_buffer(self, sizehint: int) -> memoryview:
        """The loop's one receive buffer."""
        return self._connection.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        """Take in what one read brought."""
        arrived = self.get_buffer(nbytes)[:nbytes]
        if not self._is_shaken and not self._handshake_bytes and arrived[0] != _TLS_FIRST_BYTE:
            self._met_plaintext(nbytes)
            return
        session = self._session
        if session.has_ended:
            return
        session.feed(arrived)
        is_within_record = self._records.is_within(arrived)
        try:
            if self._is_shaken or self._shake(nbytes):
                self._deliver()
                self._connection.awaits(is_within_record)
        except Exception as error:  # noqa: BLE001  such as a certificate whose names are no text
            self._failed(error)

    def _met_plaintext(self, nbytes: int) -> None:
        transport = self._transport
        if self._takes_plaintext:
            self._connection.now_on(transport)
            transport.set_protocol(self._connection)
            self._connection.buffer_updated(nbytes)
        else:
            self._connection.tell("connection closed: plaintext where TLS is required", "")
            transport.write(_REFUSAL)
            transport.close()

    def _shake(self, nbytes: int) -> bool:
        self._handshake_bytes += nbytes
        if self._handshake_bytes > HANDSHAKE_SIZE_BYTES_MAX:
            self._connection.tell("connection closed: the handshake is too long", "")
            self._transport.abort()
            return False
        self._is_shaken = self._session.shake()
        self._send()
        if self._is_shaken:
            client = self._connection.client
            client.binding = end_point(self._session.server_certificate)
            shown = self._session.client_certificate
            client.certificates, client.certificate = names_of(shown), described(shown)
        return self._is_shaken

    def _failed(self, error: Exception) -> None:
        """It is no TLS, or of another conversation, or cannot be read: the alert that says so, and the end."""
        reason = str(explained(error)) if isinstance(error, TlsError) else repr(error)
        self._connection.tell("connection closed: TLS failed", reason)
        self._send()
        self._transport.close()

    def _send(self) -> None:
        data = self._session.take()
        if data:
            self._transport.write(data)

    def _deliver(self) -> bool:
        """Give the connection its bytes, as long as it is read; whether it has them all and can take more."""
        session, connection, transport = self._session, self._connection, self._transport
        buffer = self.get_buffer(0)
        self._has_more = True
        while not self._is_held and not transport.is_closing():
            size = session.read_into(buffer)
            self._send()  # such as that it does not shake hands again
            if size:
                connection.buffer_updated(size)
            if session.has_ended:
                self._has_more = False
                self._ended()
                return True
            if size < len(buffer):
                self._has_more = False
                return not self._is_held and not transport.is_closing()
        return False

    def _ended(self) -> None:
        if not self._connection.eof_received():
            self._transport.close()

    def eof_received(self) -> bool:
        """The other side's system sends no more; requests are whole by themselves, and are still answered."""
        if self._session.has_ended:
            return True
        return self._is_shaken and self._connection.eof_received()

    def pause_writing(self) -> None:
        """As of ``Connection``."""
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        """As of ``Connection``."""
        self._connection.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._connection.connection_lost(exc)
        del self._connection  # a cycle with this: nothing would free it (``runtime.garbage``)

    # --- the transport of the connection -----------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Encrypt and send; nothing before the handshake, when nobody could read it."""
        if self._is_shaken and not self._transport.is_closing():
            self._transport.write(self._session.encrypt(data))

    def close(self) -> None:
        """Say that nothing more comes, and close when all is sent."""
        if self._is_shaken and not self._transport.is_closing():
            self._transport.write(self._session.end())
        self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    def is_closing(self) -> bool:
        """Whether it is closed, or is being closed."""
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        """Give the connection nothing more."""
        self._is_held = True
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Give the connection what has come, and then what comes."""
        self._is_held = False
        if self._has_more:
            asyncio.get_running_loop().call_soon(self._go_on)
        else:
            self._transport.resume_reading()

    def _go_on(self) -> None:
        if self._is_held or not self._has_more or self._transport.is_closing():
            return
        try:
            if self._deliver():
                self._transport.resume_reading()
        except Exception as error:  # noqa: BLE001  as in ``buffer_updated``
            self._failed(error)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """As of a transport."""
        self._transport.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        """Bytes that the socket has not taken, encrypted."""
        return self._transport.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """As of a transport."""
        return self._transport.get_extra_info(name, default)
