"""One connection's share of the loop: when it is read, and when the others come first."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from txmq.broker.connection import RECEIVE_SIZE_BYTES, Connection
from txmq.broker.core import REQUESTS_A_TURN
from txmq.config import BrokerSettings
from txmq.protocol.requests import ByteBudget
from txmq.runtime.sim_clock import SimClock

from .support import node


class Transport:
    """Notes whether it is read."""

    def __init__(self) -> None:
        self.is_read, self.pauses = True, 0

    def set_write_buffer_limits(self, high: int) -> None: ...

    def get_extra_info(self, name: str) -> str:
        return name

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None: ...

    def pause_reading(self) -> None:
        self.is_read, self.pauses = False, self.pauses + 1

    def resume_reading(self) -> None:
        self.is_read = True


def connected() -> tuple[Connection, Transport, Any]:
    core = node().core
    host: Any = SimpleNamespace(
        core=core, context=core.context, settings=BrokerSettings(pipeline_requests_max=100_000), clock=SimClock(),
        budget=ByteBudget(1 << 24), connections=set(), paused=False, received=lambda: None,
    )  # fmt: skip
    connection, transport = Connection(host), Transport()
    connection.connection_made(transport)  # type: ignore[arg-type]
    return connection, transport, host


def stream(request: Callable[[int], bytes]) -> Iterator[bytes]:
    """Reads that fill the buffer, cut out of endless requests."""
    ready = b""
    for number in itertools.count(1):
        ready += request(number)
        if len(ready) >= RECEIVE_SIZE_BYTES:
            yield ready[:RECEIVE_SIZE_BYTES]
            ready = ready[RECEIVE_SIZE_BYTES:]


def receive(connection: Connection, data: bytes) -> None:
    connection.get_buffer(0)[: len(data)] = data
    connection.buffer_updated(len(data))


def tiny(number: int) -> bytes:
    return b"ping %016d\r\n" % number


def larger(number: int) -> bytes:
    return b"put a 0 raw 500 %016d\r\n%b" % (number, bytes(500))


async def turn() -> None:
    """Everything that is due now."""
    await asyncio.sleep(0)


def test_many_small_requests_of_one_read_are_taken_in_turns() -> None:
    async def played() -> None:
        connection, transport, _ = connected()
        data = next(stream(tiny))
        receive(connection, data)
        taken = [len(connection.peer.out)]
        while not transport.is_read:
            await turn()
            taken.append(len(connection.peer.out))
        assert taken[0] == REQUESTS_A_TURN
        assert taken[-1] == data.count(b"\n") > 2 * REQUESTS_A_TURN

    asyncio.run(played())


def test_reads_that_fill_the_buffer_again_and_again_let_others_have_their_turn() -> None:
    async def played() -> None:
        connection, transport, _ = connected()
        reads = stream(larger)
        count = 0
        while transport.is_read:
            receive(connection, next(reads))
            count += 1
        assert REQUESTS_A_TURN <= len(connection.peer.unanswered) < REQUESTS_A_TURN + RECEIVE_SIZE_BYTES // 500
        assert count > 1
        await turn()
        assert transport.is_read
        receive(connection, next(reads))
        assert transport.is_read  # it counts anew

    asyncio.run(played())


def test_a_read_that_does_not_fill_the_buffer_is_all_there_is() -> None:
    async def played() -> None:
        connection, transport, _ = connected()
        for number in range(2 * REQUESTS_A_TURN):
            receive(connection, tiny(number))
        assert transport.pauses == 0

    asyncio.run(played())


def test_nobody_is_read_again_while_too_much_is_queued() -> None:
    async def played() -> None:
        connection, transport, host = connected()
        host.paused = True
        receive(connection, next(stream(tiny)))
        for _ in range(10):
            await turn()
        assert not transport.is_read
        host.paused = False
        connection.release()
        assert transport.is_read

    asyncio.run(played())
