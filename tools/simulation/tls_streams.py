"""How real clients shake hands on the simulated network; after that they have the ``TlsStream`` that ships."""

from __future__ import annotations

from contextlib import suppress
from typing import cast

from txmq.runtime import tls
from txmq.runtime.net import TcpStream
from txmq.runtime.tls import ClientTls, TlsSession, TlsStream

from .stream import Network, SimStream
from .tls import NOBODY, files_of


class SimTls(ClientTls):
    """``ClientTls`` of a world: shakes hands over the simulated network."""

    def __init__(self, network: Network) -> None:
        super().__init__(files_of(NOBODY))
        self._network = network

    def connect(self, host: str, port: int, timeout: float) -> TlsStream:
        """See ``ClientTls``."""
        return shake(self._network.connect(host, port, timeout), self.session(host), timeout)


def shake(stream: SimStream, session: TlsSession, timeout: float) -> TlsStream:
    """The handshake, and what goes on after it. Raises OSError."""
    try:
        until = stream.now + timeout
        while not tls._shaken(session):
            stream.send_all(session.take())
            arrived = stream.receive(until - stream.now)
            if arrived is None and stream.now >= until:
                raise TimeoutError("timed out in the TLS handshake")
            if arrived is not None:
                session.feed(tls._not_empty(bytes(arrived)))
        stream.send_all(session.take())
    except BaseException:
        with suppress(OSError):
            stream.shut_down()
        raise
    return TlsStream(cast("TcpStream", stream), session)
