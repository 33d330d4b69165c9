"""A peer: a broker of others, or txmq itself, with one small interface.

A peer starts its servers, and connects callers and readers to them. Timing, alternation and tables are the same for
all (``works.py``). A call of a ``Link`` returns when the broker has acknowledged; ``Peer.acknowledged`` says what is on
the disk then. Work that a peer does not have raises ``DeclinedError``, whose text stands in the table.

Peers are values that can be pickled: readers and relays run in processes of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from bench.model import DeclinedError
from txmq.testing.bench.timing import timed

TOPICS = ("bench", "bench2")  # a transaction writes into both; everything else goes into the first
IN_FLIGHT = 512
WAIT_S = 0.05  # of a reader without messages
_VALUE_SIZE_BYTES = 100


def value_of(number: int) -> bytes:
    """A message of 100 bytes that tells its number."""
    return b"%016d" % number + b"x" * (_VALUE_SIZE_BYTES - 16)


def number_of(value: bytes) -> int:
    """The number of a message."""
    return int(value[:16])


VALUE = value_of(0)


Publish = Callable[[bytes], Awaitable[object]]


class Answer(Protocol):
    """A future."""

    def result(self) -> object:
        """Wait; raise what went wrong."""


def windowed(send: Callable[[bytes], Answer], values: Sequence[bytes]) -> None:
    """Send all with at most ``IN_FLIGHT`` unanswered, as long as answers come in order; wait for all."""
    waiting: deque[Answer] = deque()
    for value in values:
        if len(waiting) >= IN_FLIGHT:
            waiting.popleft().result()
        waiting.append(send(value))
    for answer in waiting:
        answer.result()


@dataclass(frozen=True, slots=True)
class Running:
    """The servers of a peer.

    Attributes:
        address: what ``Peer.connect`` takes.
        pids: processes whose syncs and processor time are the peer's.
    """

    address: str
    pids: Callable[[], Sequence[int]]


class Link(ABC):
    """The connection of one caller."""

    @abstractmethod
    def publish(self, value: bytes) -> None:
        """Publish one message; return when it is acknowledged."""

    @abstractmethod
    def publish_all(self, values: Sequence[bytes]) -> None:
        """Publish with at most ``IN_FLIGHT`` unacknowledged; return when all are acknowledged."""

    def alone(self, count: int) -> list[float]:
        """Publish one at a time; seconds each took, sorted."""
        return timed(partial(self.publish, VALUE), count)

    def transaction(self, value: bytes) -> None:
        """Publish the value into both topics, all or nothing; return when it is committed."""
        raise DeclinedError("no transactions")

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""


class Reader(ABC):
    """A consumer of the first topic, from its end on."""

    @abstractmethod
    def read(self) -> Sequence[bytes]:
        """Values that have arrived; waits at most ``WAIT_S`` for some."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""


@dataclass(frozen=True)
class Peer(ABC):
    """A broker in one configuration.

    Attributes:
        name: for ``--peers`` and names of rows.
        title: in tables and drawings.
        acknowledged: what is on the disk when a publish returns.
        is_durable: a message that was acknowledged survives a crash of the machine.
    """

    name: str
    title: str
    acknowledged: str
    is_durable: bool = True

    @abstractmethod
    def start(self, directory: Path) -> AbstractContextManager[Running]:
        """Start the servers over an empty directory; they end with the block.

        Raises:
            NotInstalledError: the server or its Python client is missing; the text has the line that installs it.
        """

    @abstractmethod
    def connect(self, address: str) -> Link:
        """A caller's connection, used by one thread."""

    def tasks(self, address: str) -> AbstractAsyncContextManager[Publish]:
        """A producer on the event loop that runs, shared by tasks: call it with the value of one message."""
        raise DeclinedError("no client for asyncio is measured")

    @abstractmethod
    def reader(self, address: str) -> Reader:
        """A consumer's connection."""
