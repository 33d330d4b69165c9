"""Processes besides the measuring one: readers that note when messages arrive, and what talks to them.

``time.perf_counter`` is one clock for all processes of a machine (CLOCK_MONOTONIC), so times of two processes can be
subtracted.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from bench.peers.model import Peer, Reader, number_of

READY_S_MAX, ARRIVAL_S_MAX = 60.0, 60.0
END_S_MAX = 20.0
_LOOK_S = 1.0

Arrivals = dict[int, float]


class HelperError(Exception):
    """A helper process failed or did not answer."""


class Helper:
    """A process that runs ``work(connection, *arguments)`` and says "ready" first."""

    def __init__(self, work: Callable[..., None], *arguments: object) -> None:
        context = get_context("spawn")  # this process has threads
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_begin, args=(work, theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    def receive(self, timeout: float) -> Any:
        """Its next answer."""
        end = time.monotonic() + timeout
        while not self.connection.poll(_LOOK_S):
            if not self.process.is_alive() or time.monotonic() > end:
                status = self.process.exitcode
                raise HelperError(f"no answer of a helper process within {timeout:.0f} s (exit status {status})")
        try:
            return self.connection.recv()
        except EOFError:
            raise HelperError("a helper process has ended, its error stands above") from None

    def ask(self, word: object, timeout: float = READY_S_MAX) -> Any:
        """Send a word, take the answer to it."""
        self.connection.send(word)
        return self.receive(timeout)

    def close(self) -> None:
        """Ask it to end; kill it if it does not."""
        self.connection.close()
        self.process.join(END_S_MAX)
        self.process.kill()
        self.process.join()


def _begin(work: Callable[..., None], *arguments: object) -> None:
    """Ctrl-C is the measuring process's: it ends this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    work(*arguments)


@contextmanager
def helper(work: Callable[..., None], *arguments: object) -> Iterator[Helper]:
    """A process that is ready; it ends with the block."""
    with closing(Helper(work, *arguments)) as started:
        started.receive(READY_S_MAX)
        yield started


class Arrived:
    """What a reader process has seen."""

    def __init__(self, helping: Helper) -> None:
        self._helper = helping

    def begin(self) -> None:
        """Pass over what is there, and read from now on: until then, and after ``of``, the reader rests."""
        self._helper.ask("begin")

    def of(self, numbers: range) -> Arrivals:
        """When each of these messages arrived; waits for all of them."""
        arrivals: Arrivals = self._helper.ask(numbers, ARRIVAL_S_MAX)
        return arrivals


@contextmanager
def arrivals(peer: Peer, address: str) -> Iterator[Arrived]:
    """A process that reads the first topic from now on."""
    with helper(_read, peer, address) as reading:
        yield Arrived(reading)


def _read(connection: Connection, peer: Peer, address: str) -> None:
    with closing(peer.reader(address)) as reader:
        connection.send("ready")
        with suppress(EOFError):
            while connection.recv():
                while reader.read():
                    pass
                connection.send("ready")
                connection.send(_seen(connection, reader))


def _seen(connection: Connection, reader: Reader) -> Arrivals:
    """Read until all messages that the connection asks for have arrived."""
    seen: Arrivals = {}
    wanted: range | None = None
    while wanted is None or not all(number in seen for number in wanted):
        values = reader.read()
        now = time.perf_counter()
        for value in values:
            seen.setdefault(number_of(value), now)
        if wanted is None and connection.poll():
            wanted = connection.recv()
    return {number: seen[number] for number in wanted}
