"""One connection's share of the loop: when it is read, and when the others come first."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tools.simulated.clock import SimClock
from txmq.broker.core import REQUESTS_A_TURN, Core
from txmq.broker.shell.answer_budget import AnswerBudget
from txmq.broker.shell.connection import RECEIVE_SIZE_BYTES, Connection
from txmq.broker.shell.throttle import Admission, Throttle
from txmq.broker.state.deadlines import TICK_MS
from txmq.config import BrokerSettings
from txmq.protocol.requests import ByteBudget
from txmq.runtime.logging import configure, leave_to_application

from ..support import node
from ..verbs.support import alone


class Transport:
    """Notes whether it is read."""

    def __init__(self) -> None:
        self.is_read, self.pauses, self.is_aborted = True, 0, False
        self.is_taken, self.unsent_bytes = True, 0
        self.options: dict[tuple[int, int], int] = {}

    def set_write_buffer_limits(self, high: int) -> None: ...

    def get_extra_info(self, name: str) -> Any:
        return self if name == "socket" else ("10.0.0.7", 40001)

    def setsockopt(self, level: int, name: int, value: int) -> None:
        self.options[level, name] = value

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        self.unsent_bytes += len(data) * (not self.is_taken)

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes

    def pause_reading(self) -> None:
        self.is_read, self.pauses = False, self.pauses + 1

    def resume_reading(self) -> None:
        self.is_read = True

    def abort(self) -> None:
        self.is_aborted = True


def connected(core: Core | None = None) -> tuple[Connection, Transport, Any]:
    core = core or node().core
    host: Any = SimpleNamespace(
        core=core, context=core.context, settings=BrokerSettings(pipeline_requests_max=100_000), clock=SimClock(),
        budget=ByteBudget(1 << 24), answers=AnswerBudget(1 << 20), connections=set(), paused=False,
        admission=Admission(BrokerSettings()), throttle=Throttle(core.state.principals), received=lambda: None,
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
        taken = [len(connection.client.out)]
        while not transport.is_read:
            await turn()
            taken.append(len(connection.client.out))
        assert taken[0] == REQUESTS_A_TURN
        assert taken[-1] == data.count(b"\n") > 2 * REQUESTS_A_TURN

    asyncio.run(played())


def test_reads_that_fill_the_buffer_repeatedly_let_others_go_on() -> None:
    async def played() -> None:
        connection, transport, _ = connected()
        reads = stream(larger)
        count = 0
        while transport.is_read:
            receive(connection, next(reads))
            count += 1
        assert REQUESTS_A_TURN <= len(connection.client.unanswered) < REQUESTS_A_TURN + RECEIVE_SIZE_BYTES // 500
        assert count > 1
        await turn()
        assert transport.is_read
        receive(connection, next(reads))
        assert transport.is_read  # it counts anew

    asyncio.run(played())


def test_read_that_does_not_fill_buffer_is_all_there_is() -> None:
    async def played() -> None:
        connection, transport, _ = connected()
        for number in range(2 * REQUESTS_A_TURN):
            receive(connection, tiny(number))
        assert transport.pauses == 0

    asyncio.run(played())


def test_connections_are_not_read_while_the_queue_is_full() -> None:
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


# --- deadlines -------------------------------------------------------------------------------------------------------


TIMEOUT_S = BrokerSettings().handshake_timeout_ms / 1000
BODY = b"put a 0 1000000 1\r\n" + bytes(40_000)


def tick(connection: Connection, host: Any) -> None:
    """As the server does."""
    connection.check_deadlines()
    host.core.tick(host.clock.now_ms(), is_reading=not host.paused)


def looked_at(connection: Connection, host: Any, seconds: float) -> None:
    """Time passes, and the broker looks at it now and then."""
    for _ in range(round(seconds * 1000 / TICK_MS)):
        host.clock.advance(TICK_MS / 1000)
        tick(connection, host)


def with_half_a_body() -> tuple[Connection, Transport, Any]:
    connection, transport, host = connected()
    receive(connection, b"ping 1\r\n")
    receive(connection, BODY)
    return connection, transport, host


def test_fast_body_that_stops_is_given_up_like_slow_one() -> None:
    connection, transport, host = with_half_a_body()
    for _ in range(15):
        receive(connection, bytes(60_000))
    assert host.budget.used > 900_000  # at the least rate they would be worth 14 seconds
    looked_at(connection, host, TIMEOUT_S - 0.1)
    assert not transport.is_aborted
    looked_at(connection, host, 0.3)
    assert transport.is_aborted


def test_body_that_keeps_up_least_rate_is_waited_for() -> None:
    connection, transport, host = with_half_a_body()
    for _ in range(12):
        looked_at(connection, host, 0.9)
        receive(connection, bytes(60_000))
    assert not transport.is_aborted


def test_a_body_below_the_least_rate_is_given_up() -> None:
    connection, transport, host = with_half_a_body()
    for _ in range(12):
        looked_at(connection, host, 0.9)
        receive(connection, bytes(20_000))
    assert transport.is_aborted


def test_while_broker_reads_nobody_no_time_passes_for_body() -> None:
    connection, transport, host = with_half_a_body()
    host.paused = True
    looked_at(connection, host, 10 * TIMEOUT_S)
    host.paused = False
    looked_at(connection, host, TIMEOUT_S - 0.1)
    assert not transport.is_aborted
    looked_at(connection, host, 0.3)
    assert transport.is_aborted


def test_input_that_arrived_during_a_standstill_is_read_first() -> None:
    connection, transport, host = with_half_a_body()
    host.clock.advance(10 * TIMEOUT_S)
    tick(connection, host)
    looked_at(connection, host, TIMEOUT_S - 0.1)
    assert not transport.is_aborted
    looked_at(connection, host, 0.3)
    assert transport.is_aborted


@pytest.fixture
def told() -> Iterator[io.StringIO]:
    """What is logged, at the level for those who look for a reason."""
    stream = io.StringIO()
    configure("debug", stream)
    yield stream
    leave_to_application()


def test_the_log_says_who_was_cut_off_and_why(told: io.StringIO) -> None:
    wrong, _, _ = connected()
    receive(wrong, b"FROBNICATE\r\n")
    slow, _, host = connected()
    looked_at(slow, host, TIMEOUT_S + 0.1)
    lines = [json.loads(line) for line in told.getvalue().splitlines()]
    assert [(line["level"], line["address"]) for line in lines] == [("debug", "10.0.0.7:40001")] * 2
    assert lines[0]["reason"] == "unknown verb; type: help"
    assert lines[1]["reason"] == "handshake_timeout_ms"


def test_requests_behind_a_parked_one_are_taken_in_then() -> None:
    async def played() -> None:
        broker = alone().lead()
        connection, transport, _ = connected(broker.node.core)
        receive(connection, b"offset a 0 latest 1\r\nping 2\r\n")
        receive(connection, b"ping 3\r\n")
        await turn()
        client = connection.client
        assert (client.out, client.held, transport.is_read) == ([], True, False)
        broker.work()
        assert broker.node.core.take_resumed() == []  # the harness took it
        connection.resumed()
        assert [opaque for opaque, _ in client.out] == [b"1", b"2", b"3"]
        assert (client.held, transport.is_read) == (False, True)

    asyncio.run(played())
