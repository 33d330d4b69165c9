"""TLS against none: puts by the raw generator at one broker that takes both on one port, and connections that idle."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from urllib.parse import urlencode

from bench.model import Bound, Measure, NotMeasuredError, Row, Surroundings
from bench.rows.put import OUTSTANDING, VALUE_SIZE_BYTES
from txmq.addresses import TlsFiles
from txmq.runtime import os_process
from txmq.runtime.tls import ClientTls
from txmq.testing.bench import loads
from txmq.testing.bench.limits import rss_mib
from txmq.testing.bench.model import Run, Target
from txmq.testing.certificates import CertificateAuthority
from txmq.testing.processes.broker import BrokerProcess, free_port

IDLE_CONNECTIONS = 5000
_OWN_DESCRIPTORS = 200
_PING = b"ping 1\r\n"


@contextmanager
def _both(
    surroundings: Surroundings, load: Callable[[Target], AbstractContextManager[Run]], sync: str
) -> Iterator[tuple[Run, Run]]:
    files = CertificateAuthority(surroundings.directory / "tls").issue("broker")
    listen = f"127.0.0.1:{free_port()}"
    settings = {"sync": sync, "tls_certificate": files.cert, "tls_key": files.key, "listen_plaintext": listen}
    with BrokerProcess(surroundings.directory / "data", listen=listen, settings=settings), ExitStack() as stack:
        addresses = (f"txmq://{listen}", f"txmqs://{listen}?{urlencode({'ca': files.ca})}")
        plain, encrypted = [
            stack.enter_context(
                load(Target(address, topic=topic, size_bytes=VALUE_SIZE_BYTES, outstanding=OUTSTANDING))
            )
            for topic, address in zip(("plain", "encrypted"), addresses, strict=True)
        ]
        yield plain, encrypted


@contextmanager
def _pipelined(surroundings: Surroundings) -> Iterator[Measure]:
    count = surroundings.count(200_000)
    with _both(surroundings, loads.put_pipelined, "interval") as runs:

        def measure() -> dict[str, float]:
            plain, encrypted = (run(count)["rate"] for run in runs)
            return {"plaintext": plain, "TLS": encrypted, "share": encrypted / plain * 100}

        for run in runs:
            run(count // 10)
        yield measure


@contextmanager
def _one_at_a_time(surroundings: Surroundings) -> Iterator[Measure]:
    count = surroundings.count(5000)
    with _both(surroundings, loads.put_single, "interval") as runs:

        def measure() -> dict[str, float]:
            plain, encrypted = (run(count)["p50"] for run in runs)
            return {"plaintext p50": plain, "TLS p50": encrypted, "added": (encrypted - plain) * 1000}

        for run in runs:
            run(count // 10)
        yield measure


@contextmanager
def _idle(surroundings: Surroundings) -> Iterator[Measure]:
    """Each connection has shaken hands and been answered once."""
    count = surroundings.count(IDLE_CONNECTIONS)
    limit = os_process.raise_descriptor_limit(count + _OWN_DESCRIPTORS)
    if limit < count + _OWN_DESCRIPTORS:
        raise NotMeasuredError(f"ulimit -n is {limit}: {count + _OWN_DESCRIPTORS} open files are needed")
    files = CertificateAuthority(surroundings.directory / "tls").issue("broker")
    settings = {"tls_certificate": files.cert, "tls_key": files.key}
    context, number = ClientTls(TlsFiles(files.ca)).context, iter(range(1000))

    def measure() -> dict[str, float]:
        directory = surroundings.directory / f"data-{next(number)}"
        with BrokerProcess(directory, settings=settings) as broker, ExitStack() as stack:
            before = rss_mib(broker.pid)
            for _ in range(count):
                bare = socket.create_connection((broker.host, broker.port), 30)
                bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # 40 ms each without
                connection = stack.enter_context(context.wrap_socket(bare, server_hostname="localhost"))
                connection.sendall(_PING)
                connection.recv(100)
            after = rss_mib(broker.pid)
        return {"rss": after, "a connection": (after - before) * 1024 / count}

    yield measure


ROWS = (
    Row(
        "tls-put-pipelined", "pipelined put with TLS beside without, 200 B, sync interval", _pipelined,
        {"plaintext": "msg/s", "TLS": "msg/s", "share": "%"}, (Bound("share", 60, "%"),),
    ),
    Row(
        "tls-put-single", "one put at a time with TLS beside without, 200 B, sync interval", _one_at_a_time,
        {"plaintext p50": "ms", "TLS p50": "ms", "added": "us"}, (Bound("added", 40, "us", at_least=False),),
    ),
    Row(
        "tls-idle", f"{IDLE_CONNECTIONS} idle connections with TLS", _idle,
        {"rss": "MiB", "a connection": "KiB"}, (Bound("rss", 250, "MiB", at_least=False),),
    ),
)  # fmt: skip
