"""Brokers with TLS, and the connections made to them."""

from __future__ import annotations

import socket
import ssl
from urllib.parse import urlencode

import pytest

import txmq
from txmq.addresses import TlsFiles
from txmq.errors import BrokerAwayError
from txmq.runtime.tls import ClientTls, TlsSession
from txmq.testing.certificates import CertificateAuthority
from txmq.testing.processes.broker import BrokerProcess

PATIENT_MS = 60_000  # a busy machine must not take a first request for one that does not come


def settings_of(files: TlsFiles, **more: object) -> dict[str, object]:
    return {"tls_certificate": files.cert, "tls_key": files.key, "handshake_timeout_ms": PATIENT_MS, **more}


def address(broker: BrokerProcess, files: TlsFiles, host: str | None = None) -> str:
    parameters = {name: text for name, text in (("ca", files.ca), ("cert", files.cert), ("key", files.key)) if text}
    return f"txmqs://{host or broker.host}:{broker.port}?{urlencode(parameters)}"


def trusting(authority: CertificateAuthority) -> TlsFiles:
    return TlsFiles(str(authority.certificate))


def raw(broker: BrokerProcess) -> socket.socket:
    return socket.create_connection((broker.host, broker.port), 60)


def encrypted(broker: BrokerProcess, authority: CertificateAuthority) -> ssl.SSLSocket:
    context = ClientTls(trusting(authority)).context
    return context.wrap_socket(raw(broker), server_hostname="localhost")


def refusal(text: str) -> str:
    with pytest.raises(BrokerAwayError) as raised:
        txmq.connect(text)
    return str(raised.value)


def shake_hands(connection: socket.socket, session: TlsSession) -> None:
    """With the broker at the other end."""
    while not session.shake():
        connection.sendall(session.take())
        session.feed(connection.recv(1 << 16))
    connection.sendall(session.take())
