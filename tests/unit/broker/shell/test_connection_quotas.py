"""A connection whose next put is over a quota: it is not read, nothing is lost or paid twice, and it goes on."""

from __future__ import annotations

import asyncio

from txmq.broker.core import REQUESTS_A_TURN
from txmq.broker.verbs.access.asking import strangers_from_now_on
from txmq.redo import entries

from .test_connection import connected, receive, tick, turn

PUT = b"put a 0 raw 500 %016d\r\n%b"


def puts(first: int, count: int) -> bytes:
    return b"".join(PUT % (number, bytes(500)) for number in range(first, first + count))


def test_puts_over_a_quota_wait_unread_for_their_turn() -> None:
    async def played() -> None:
        connection, transport, host = connected()
        host.core.state.principals.fold(
            entries.QUOTA_SET, {"kind": "topic", "name": "a", "limits": {"bytes_per_s": 10_000}}
        )
        host.throttle.look()
        receive(connection, puts(1, 40) + b"ping 99\r\n")
        taken = [len(connection.client.unanswered)]
        assert taken == [11]
        assert (transport.is_read, connection.client.held) == (False, True)
        assert host.budget.used == 29 * 500
        while len(connection.client.out) < 1:  # the ping's
            host.clock.advance(0.05)
            tick(connection, host)
            host.throttle.turned(host.clock.monotonic())
            await turn()
            taken.append(len(connection.client.unanswered))
        assert taken[-1] == 40
        assert taken == sorted(taken)
        assert 25 <= len(taken) <= 32  # 1.45 seconds of 10,000 bytes
        assert (transport.is_read, connection.client.held, host.budget.used) == (True, False, 0)

    asyncio.run(played())


def test_connection_that_ends_gives_back_what_waited() -> None:
    async def played() -> None:
        connection, _, host = connected()
        host.core.state.principals.fold(
            entries.QUOTA_SET, {"kind": "topic", "name": "a", "limits": {"requests_per_s": 1}}
        )
        host.throttle.look()
        receive(connection, puts(1, 40))
        assert host.budget.used == 39 * 500
        connection.connection_lost(None)
        assert host.budget.used == 0
        host.throttle.turned(host.clock.monotonic())
        assert host.throttle.waiting == 0

    asyncio.run(played())


def test_turns_of_the_loop_pay_for_each_put_once() -> None:
    async def played() -> None:
        connection, _, host = connected()
        host.core.state.principals.fold(
            entries.QUOTA_SET, {"kind": "topic", "name": "a", "limits": {"requests_per_s": 10_000}}
        )
        host.throttle.look()
        count = 2 * REQUESTS_A_TURN + 10
        receive(connection, b"".join(b"put a 0 raw 1 %016d\r\nx" % number for number in range(count))[: 64 << 10])
        for _ in range(5):
            await turn()
        assert len(connection.client.unanswered) > REQUESTS_A_TURN
        paid_s = next(iter(host.throttle._topics[b"a"].requests))._paid_s
        assert round((paid_s - host.clock.monotonic()) * 10_000) == len(connection.client.unanswered)

    asyncio.run(played())


def test_refused_puts_wait_for_no_quota_of_a_topic() -> None:
    async def played() -> None:
        connection, transport, host = connected()
        principals = host.core.state.principals
        principals.fold(entries.USER, {"user": "shop", "keys": None, "certificate": "CN=shop"})
        principals.fold(entries.QUOTA_SET, {"kind": "topic", "name": "a", "limits": {"bytes_per_s": 1000}})
        strangers_from_now_on(host.core.context)
        connection.client.user = "shop"
        host.throttle.look()
        receive(connection, puts(1, 40))
        assert (transport.is_read, host.throttle.waiting) == (True, 0)
        assert next(iter(host.throttle._topics[b"a"].bytes))._paid_s == 0.0

    asyncio.run(played())
