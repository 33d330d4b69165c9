"""Peers whose machine vanished: no FIN, no RST, nothing. The system asks them, and the broker hears that they are gone.

What the system does with the options takes half a minute and a link that can be cut; tested is that they are set, on
the sockets that the broker accepted and that a client opened.
"""

from __future__ import annotations

import ctypes
import os
import socket
from contextlib import closing
from pathlib import Path

import pytest

import txmq
from txmq.runtime.net import VANISHED_S
from txmq.testing.processes.broker import BrokerProcess

from .wire import Wire

_ESTABLISHED = "01"
_PIDFD_GETFD = 438  # the system call's number, the same on every architecture since Linux 5.6


def _socket_of(pid: int, local: int, remote: int) -> socket.socket:
    """Another process's end of a connection between these ports."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        ports = [int(words[place].split(":")[1], 16) for place in (1, 2)]
        if ports == [local, remote] and words[3] == _ESTABLISHED:
            name = f"socket:[{words[9]}]"
            break
    else:
        raise AssertionError("the system knows no such connection")
    number = next(int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir() if str(path.readlink()) == name)
    process = os.pidfd_open(pid)
    try:
        found = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, number, 0)
    finally:
        os.close(process)
    assert found >= 0, os.strerror(ctypes.get_errno())
    return socket.socket(fileno=found)


def _options(of: socket.socket) -> dict[str, int]:
    names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT", "TCP_NODELAY")
    found = {name: of.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names}
    return {**found, "SO_KEEPALIVE": of.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)}


@pytest.mark.parametrize(("write_timeout_ms", "unacknowledged_ms"), [(100, VANISHED_S * 1000), (60_000, 60_000)])
def test_broker_has_system_ask_whether_those_it_accepted_are_there(
    tmp_path: Path, write_timeout_ms: int, unacknowledged_ms: int
) -> None:
    settings = {"write_timeout_ms": write_timeout_ms}
    with BrokerProcess(tmp_path / "broker", settings=settings) as broker, Wire(broker) as wire:
        assert wire.ask(b"ping 1\r\n")[0] == 200
        assert broker.pid is not None
        with closing(_socket_of(broker.pid, broker.port, wire.socket.getsockname()[1])) as accepted:
            assert _options(accepted) == {
                "SO_KEEPALIVE": 1, "TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3,
                "TCP_USER_TIMEOUT": unacknowledged_ms, "TCP_NODELAY": 1,
            }  # fmt: skip


def test_client_has_system_ask_whether_its_broker_is_there(broker: BrokerProcess) -> None:
    with txmq.connect(broker.address) as client:
        client.topics.list()
        ends = [line.split()[1:4] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        ports = [
            (int(local.split(":")[1], 16), int(remote.split(":")[1], 16))
            for local, remote, state in ends
            if state == _ESTABLISHED  # others may have been of an earlier broker with this port
        ]
        local = next(local for local, remote in ports if remote == broker.port)
        with closing(_socket_of(os.getpid(), local, broker.port)) as opened:
            options = _options(opened)
    assert (options["SO_KEEPALIVE"], options["TCP_KEEPIDLE"], options["TCP_NODELAY"]) == (1, 15, 1)
