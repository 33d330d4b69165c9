"""The machine, and its bare limits, measured in the same run as the loads: what no broker could be faster than here.

Theory of operation. A figure of a broker says little without the disk and the network under it. So the same run
measures, with nothing in between, a loop of write and ``fdatasync``, an echo between two processes, and an echo that
syncs before it answers: that last one is the least an acknowledged message can cost one waiting caller.

Invariants:
* Every limit ends after its count or its time, whichever comes first: a disk of 10 ms a sync takes no minute.
* A sync is the journal's, whatever the system calls it.
* The files are written out with zeros beforehand, as the journal's are, and removed.
"""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from txmq.runtime.build import is_compiled
from txmq.runtime.os_disk import OSFile
from txmq.testing.bench.raw import percentile

BUSY_SHARE = 0.5  # of the cores: with half of them taken, client and broker get in each other's way

# An echo; with a file to sync as argument, it writes and syncs 4 KiB of it before every answer.
_ECHO = """
import os, socket, sys
from txmq.runtime.os_disk import OSFile
journal = OSFile(os.open(sys.argv[1], os.O_RDWR), sys.argv[1]) if len(sys.argv) > 1 else None
position, block = 0, b"x" * 4096
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
peer, _ = listener.accept()
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
while data := peer.recv(1 << 18):
    if journal is not None:
        journal.pwrite(block, position)
        journal.fdatasync()
        position = (position + 4096) % (16 << 20)
    peer.sendall(data)
"""
_FILE_SIZE_BYTES = 16 << 20
_SYNCS, _ECHOES, _STREAM_BYTES = 1500, 5000, 128 << 20
SECONDS_MAX = 1.0  # for each limit


SYNC, ECHO, SYNCED_ECHO = "sync 4 KiB p50 ms", "echo p50 ms", "echo after a sync p50 ms"
LOOPBACK_MESSAGES, LOOPBACK_BYTES = "loopback of 261 B a message/s", "loopback bytes/s"
BARE_LIMITS = (SYNC, ECHO, SYNCED_ECHO, LOOPBACK_MESSAGES, LOOPBACK_BYTES)


def facts(directory: Path) -> dict[str, str]:
    """The machine that the figures were measured on."""
    status = Path("/proc/meminfo")
    memory = status.read_text().split()[1] if status.exists() else "0"
    cpu = Path("/proc/cpuinfo")
    models = [line for line in cpu.read_text().splitlines() if line.startswith("model name")] if cpu.exists() else []
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": models[0].partition(":")[2].strip() if models else platform.processor(),
        "cores": str(os.cpu_count()),
        "memory": f"{int(memory) // (1 << 20)} GiB",
        "file system": _file_system(directory),
        "python": platform.python_version(),
        "hot modules": "compiled" if is_compiled() else "source",
        "load before": f"{os.getloadavg()[0]:.1f}",
    }


def busy(known: Mapping[str, str]) -> str | None:
    """A remark on figures taken while others used the machine; None if it was quiet."""
    if float(known["load before"]) <= int(known["cores"]) * BUSY_SHARE:
        return None
    return (
        f"Others used this machine (load {known['load before']} on {known['cores']} cores): repeat it when it is quiet."
    )


def _file_system(directory: Path) -> str:
    best = ("", "unknown")
    mounts = Path("/proc/mounts")
    for line in mounts.read_text().splitlines() if mounts.exists() else []:
        _, mount_point, kind, *_ = line.split()
        if str(directory.resolve()).startswith(mount_point) and len(mount_point) > len(best[0]):
            best = (mount_point, kind)
    return best[1]


def cpu_seconds(pid: int | None) -> float:
    """Processor time a process has used, user and system: what a loaded machine blurs least."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mib(pid: int | None) -> float:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmRSS")


def bare_limits(directory: Path, seconds_max: float = SECONDS_MAX) -> dict[str, float]:
    """By name: what a row of the catalogue may ask to be compared with; each measured for ``seconds_max`` at most."""
    with _zeroed_file(directory) as path:
        sync_ms = _sync_ms(path, seconds_max)
        with _echo(str(path)) as client:
            synced_echo_ms = _echo_ms(client, seconds_max)
    with _echo() as client:
        echo_ms = _echo_ms(client, seconds_max)
    with _echo() as client:
        bytes_per_s = _stream_bytes_per_s(client, seconds_max)
    return dict(zip(BARE_LIMITS, (sync_ms, echo_ms, synced_echo_ms, bytes_per_s / 261, bytes_per_s), strict=True))


@contextmanager
def _zeroed_file(directory: Path) -> Iterator[Path]:
    """A file that holds written zeros, as the journal does."""
    path = directory / "sync-loop"
    with path.open("wb") as file:
        file.write(bytes(_FILE_SIZE_BYTES))
        file.flush()
        os.fsync(file.fileno())
    yield path
    path.unlink()


def _sync_ms(path: Path, seconds_max: float) -> float:
    """The median of write and fdatasync of 4 KiB."""
    file = OSFile(os.open(path, os.O_RDWR), str(path))
    try:
        block, taken, clock = b"x" * 4096, [], time.perf_counter
        end = clock() + seconds_max
        for number in range(_SYNCS):
            started = clock()
            file.pwrite(block, number * 4096 % _FILE_SIZE_BYTES)
            file.fdatasync()
            taken.append(clock() - started)
            if started > end:
                break
    finally:
        file.close()
    return percentile(sorted(taken), 50) * 1000


@contextmanager
def _echo(*arguments: str) -> Iterator[socket.socket]:
    with socket.socket() as client:
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and text
            [sys.executable, "-c", _ECHO, *arguments], stdout=subprocess.PIPE, start_new_session=True
        )
        try:
            assert process.stdout is not None
            client.connect(("127.0.0.1", int(process.stdout.readline())))
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield client
        finally:  # before the connection: a reset one would end it with a traceback on our standard error
            process.kill()
            process.communicate()


def _echo_ms(client: socket.socket, seconds_max: float) -> float:
    block, taken, clock = b"x" * 64, [], time.perf_counter
    end = clock() + seconds_max
    for _ in range(_ECHOES):
        started = clock()
        client.sendall(block)
        client.recv(64)
        taken.append(clock() - started)
        if started > end:
            break
    return percentile(sorted(taken), 50) * 1000


def _stream_bytes_per_s(client: socket.socket, seconds_max: float) -> float:
    """There and back: 64 KiB sent, what has come back taken."""
    block, sent, received = b"x" * (64 << 10), 0, 0
    started = time.perf_counter()
    while received < _STREAM_BYTES and time.perf_counter() < started + seconds_max:
        while sent < _STREAM_BYTES and sent - received < 4 * len(block):
            client.sendall(block)
            sent += len(block)
        received += len(client.recv(1 << 18))
    return received / (time.perf_counter() - started)
