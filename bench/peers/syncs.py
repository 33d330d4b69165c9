"""Counts what a peer forces to the disk for each acknowledged message, with strace: its words are not taken for it."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from bench.model import DeclinedError, NotInstalledError
from bench.peers.model import VALUE, Peer, Running
from txmq.testing.eventually import eventually

MESSAGES = 200
_CALLS = "fsync,fdatasync,msync,sync_file_range"
ATTACH_S_MAX, END_S_MAX = 20.0, 20.0
_BEGINS = re.compile(rf"\b({_CALLS.replace(',', '|')})\(")  # not where one that was interrupted is resumed


def syncs_of(peer: Peer, running: Running, directory: Path) -> dict[str, float]:
    """Forced writes per message published alone, and per transaction if the peer has some.

    Raises:
        NotInstalledError: there is no strace.
    """
    with closing(peer.connect(running.address)) as link:
        figures = {"syncs": _counted(partial(link.publish, VALUE), running.pids(), directory)}
        try:
            figures["syncs, tx"] = _counted(partial(link.transaction, VALUE), running.pids(), directory)
        except DeclinedError:
            pass
    return figures


def _counted(work: Callable[[], object], pids: Sequence[int], directory: Path) -> float:
    work()  # files are there
    program, output = shutil.which("strace"), directory / "syncs"
    if program is None:
        raise NotInstalledError("not counted: apt-get install strace")
    attached = [word for pid in pids for word in ("-p", str(pid))]
    command = [program, "-f", "-qq", "-e", f"trace={_CALLS}", "-o", str(output), *attached]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as tracing:
        try:
            eventually(
                lambda: tracing.poll() is not None or all(map(_is_traced, pids)), "strace looks on", ATTACH_S_MAX,
                TimeoutError,
            )  # fmt: skip
            if tracing.poll() is not None:
                raise NotInstalledError("not counted: strace may not trace here")
            for _ in range(MESSAGES):
                work()
            tracing.send_signal(signal.SIGINT)
            tracing.wait(END_S_MAX)
        finally:
            tracing.kill()
    return sum(_BEGINS.search(line) is not None for line in output.read_text().splitlines()) / MESSAGES


def _is_traced(pid: int) -> bool:
    """All its threads are; one that has just ended does not count."""
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        try:
            text = status.read_text()
        except OSError:
            continue
        if "TracerPid:\t0\n" in text:
            return False
    return True
