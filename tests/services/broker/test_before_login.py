"""What a connection may do that has not logged in, once there are users: little, briefly, in plaintext and by TLS."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

import txmq
from txmq.broker.state.refusals import FREE_MAX
from txmq.client.admin.cluster import Users
from txmq.protocol.certificates import end_point
from txmq.protocol.scram import ScramAttempt
from txmq.testing.certificates import CertificateAuthority
from txmq.testing.processes.broker import BrokerProcess, free_port

from .tls_brokers import encrypted, settings_of
from .wire import Wire

BYTES_MAX = 4 << 10
LOGIN_MS = 5000  # for what each stranger does first, on a busy machine


class Doors(NamedTuple):
    """A broker that takes TLS and plaintext on one port, and has the user ``ops``."""

    broker: BrokerProcess
    authority: CertificateAuthority

    def knock(self, door: str) -> Wire:
        wire = Wire(self.broker)
        if door == "tls":
            wire.socket.close()
            wire.socket = encrypted(self.broker, self.authority)
        return wire


def _doors(directory: Path, stack: ExitStack, **settings: object) -> Doors:
    authority = CertificateAuthority(directory / "ca")
    listen = f"127.0.0.1:{free_port()}"
    both = {**settings_of(authority.issue("broker"), listen_plaintext=listen), **settings}
    broker = stack.enter_context(BrokerProcess(directory / "data", listen=listen, settings=both))
    with txmq.connect(broker.address) as client:
        Users(client.control, client.timeout).add("ops", "pencil")
    return Doors(broker, authority)


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    with ExitStack() as stack:
        yield _doors(tmp_path_factory.mktemp("doors"), stack)


both_doors = pytest.mark.parametrize("door", ["plaintext", "tls"])


def attempted(wire: Wire, password: str) -> ScramAttempt:
    """Bound to the certificate that was shown."""
    shown = wire.socket.getpeercert(binary_form=True) if isinstance(wire.socket, ssl.SSLSocket) else None
    return ScramAttempt("ops", password, "0" * 48, None if shown is None else end_point(shown))


def log_in(wire: Wire, password: str) -> int:
    """The code of the login's last answer."""
    attempt = attempted(wire, password)
    code, body = wire.ask(_message(attempt.first()))
    if code != 200:
        return code
    return wire.ask(_message(attempt.final(body.removesuffix(b"\n"))))[0]


def _message(text: bytes) -> bytes:
    return b"auth scram-sha-256 %d 1\r\n%b" % (len(text), text)


@both_doors
def test_stranger_is_cut_off_behind_4_kib(doors: Doors, door: str) -> None:
    line = b"ping 1\r\n"
    with doors.knock(door) as wire, doors.knock(door) as known:
        for _ in range(BYTES_MAX // len(line)):
            assert wire.ask(line)[0] == 200
        wire.send(b"p")
        assert wire.is_closed_by_broker()
        assert log_in(known, "pencil") == 200
        known.send(line * BYTES_MAX)
        assert known.hear(BYTES_MAX).codes == [200] * BYTES_MAX


@both_doors
def test_stranger_may_say_hello_and_little_more(doors: Doors, door: str) -> None:
    with doors.knock(door) as wire:
        for line in (b"hello 1 x session=none 1", b"version 2", b"help 3", b"ping 4"):
            assert wire.ask(line + b"\r\n")[0] == 200
        for line in (
            b"hello 1 x session=new 1", b"stats * 2", b"meta * 3", b"put a 0 raw 1 4\r\nx", b"get a 0 0 100 5",
            b"topic describe a 6", b"group describe g 0 7", b"user list * 0 8", b"recover 9",
        ):  # fmt: skip
            code, body = wire.ask(line + b"\r\n")
            assert (code, body.split()[0]) == (401, b"unauthenticated"), line
        assert wire.ask(b"quit 10\r\n")[0] == 200
        assert wire.is_closed_by_broker()


def test_connection_without_login_is_closed_in_time(tmp_path: Path) -> None:
    with ExitStack() as stack:
        doors = _doors(tmp_path, stack, login_timeout_ms=LOGIN_MS)
        known, strangers = list[Wire](), list[Wire]()
        for door in ("plaintext", "tls"):
            known.append(stack.enter_context(doors.knock(door)))
            assert log_in(known[-1], "pencil") == 200
            strangers.append(stack.enter_context(doors.knock(door)))
            assert strangers[-1].ask(b"ping 1\r\n")[0] == 200  # 4 KiB are not used up, and it is no silence
            strangers.append(stack.enter_context(doors.knock(door)))
            first = _message(attempted(strangers[-1], "pencil").first())
            assert strangers[-1].ask(first)[0] == 200  # and goes no further
            strangers.append(stack.enter_context(doors.knock(door)))
        assert all(wire.is_closed_by_broker() for wire in strangers)
        assert [wire.ask(b"ping 2\r\n")[0] for wire in known] == [200, 200]


def test_failed_logins_keep_nobody_out_who_is_right(doors: Doors) -> None:
    """The answers to wrong ones wait; those to right ones from the same address do not."""
    guesses = [doors.knock(door) for door in ("tls", "plaintext") * FREE_MAX]
    for wire in guesses[:FREE_MAX]:
        assert log_in(wire, "wrong") == 401
    for wire in guesses[FREE_MAX:]:
        attempt = attempted(wire, "wrong")
        told = wire.ask(_message(attempt.first()))[1]
        wire.send(_message(attempt.final(told.removesuffix(b"\n"))) + b"ping 2\r\n")
    for door in ("tls", "plaintext"):
        with doors.knock(door) as wire:
            assert log_in(wire, "pencil") == 200
    txmq.connect(doors.broker.address.replace("://", "://ops@"), password="pencil").close()
    for wire in guesses[FREE_MAX:]:
        assert wire.hear(2).codes == [401, 200]  # late, and then what was sent after it
    for wire in guesses:
        wire.socket.close()
