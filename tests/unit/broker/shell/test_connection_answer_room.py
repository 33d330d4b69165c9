"""A connection where answers are not taken: what waits, in which order, and that nothing is forgotten."""

from __future__ import annotations

import asyncio
from typing import Any

from txmq.broker.shell.answer_budget import STALLED_MS
from txmq.broker.shell.connection import Connection
from txmq.broker.state.deadlines import TICK_MS
from txmq.protocol.answers import Records

from .test_connection import Transport, connected, receive, turn

LIMIT = 1 << 20


LINE_SIZE_BYTES = len(b"value 1048576 1\r\n")


def full(host: Any) -> tuple[Connection, Transport]:
    """Another connection of the same server, that has taken nothing of what fills the budget."""
    connection, transport = Connection(host), Transport()
    connection.connection_made(transport)  # type: ignore[arg-type]
    transport.is_taken = False
    connection.client.out.append((b"1", Records(bytes(LIMIT - LINE_SIZE_BYTES))))
    connection.send()
    return connection, transport


def test_request_with_long_answer_waits_and_short_one_not() -> None:
    async def played() -> None:
        connection, transport, host = connected()
        _, filled = full(host)
        receive(connection, b"ping 1\r\nmeta * 2\r\nping 3\r\n")
        await turn()
        assert len(connection.client.out) == 1
        assert connection.client.held
        assert not transport.is_read
        assert not host.answers.turned()
        filled.unsent_bytes = 0
        assert host.answers.turned()
        await turn()
        assert len(connection.client.out) == 3
        assert not connection.client.held
        assert transport.is_read

    asyncio.run(played())


def test_a_read_that_found_no_room_is_asked_for_again() -> None:
    async def played() -> None:
        connection, _, host = connected()
        _, filled = full(host)
        reads: list[Any] = ["first", "second"]
        assert [connection.may_read(read) for read in reads] == [False, False]
        filled.unsent_bytes = 0
        assert host.answers.turned()
        assert host.context.reads == ["first"]
        connection.send()  # its answer
        assert host.context.reads == reads

    asyncio.run(played())


def test_reads_of_one_who_stalls_wait_until_he_goes_on() -> None:
    connection, _, host = connected()
    connection.pause_writing()
    read: Any = "read"
    assert not connection.may_read(read)
    assert not host.answers.turned()
    connection.resume_writing()
    assert host.context.reads == [read]


def test_unread_answers_of_one_user_leave_the_others_theirs() -> None:
    """Shop's connections leave half of the room untaken: its next one waits, and billing's does not."""
    billing, _, host = connected()
    shop, another = Connection(host), Connection(host)
    for connection in (shop, another):
        transport = Transport()
        connection.connection_made(transport)  # type: ignore[arg-type]
        connection.client.user = "shop"
        transport.is_taken = False
    billing.client.user = "billing"
    shop.client.out.append((b"1", Records(bytes(LIMIT // 2))))
    shop.send()
    read: Any = "read"
    assert not another.may_read(read)
    assert billing.may_read(read)


def test_who_takes_nothing_is_cut_off_for_one_who_waits() -> None:
    connection, _, host = connected()
    stranger, filled = full(host)
    read: Any = "read"
    assert not connection.may_read(read)
    for _ in range(STALLED_MS // TICK_MS):
        assert host.answers.stalled(host.context.liveness.now_ms) == []
        host.core.tick(host.clock.now_ms())
    assert host.answers.stalled(host.context.liveness.now_ms) == [stranger]
    stranger.cut_off()
    assert filled.is_aborted
    stranger.connection_lost(None)
    assert host.answers.turned()
    assert host.context.reads == [read]


def test_what_a_reader_thread_makes_counts_from_the_start() -> None:
    connection, _, host = connected()
    connection.reserve(LIMIT)
    assert host.answers.used == LIMIT
    connection.reserve(-LIMIT)
    assert host.answers.used == 0


def test_what_a_closing_connection_has_not_sent_counts() -> None:
    _, _, host = connected()
    _, filled = full(host)
    filled.is_closing = lambda: True  # type: ignore[method-assign]
    host.answers.look()
    assert host.answers.used == LIMIT
