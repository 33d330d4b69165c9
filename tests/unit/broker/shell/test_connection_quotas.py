"""A connection whose next put is over a quota: it is not read, nothing is lost or paid twice, and it goes on."""

from __future__ import annotations

import asyncio

from tools.images.requests import batch
from txmq.broker.core import REQUESTS_A_TURN
from txmq.broker.verbs.access.authorizer import strangers_from_now_on
from txmq.protocol.transaction_bodies import encode_part
from txmq.redo import entries
from txmq.xid import TxId

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


def test_quota_refuses_transactions_at_their_begin_and_never_after() -> None:
    async def played() -> None:
        connection, transport, host = connected()
        core, client = host.core, connection.client
        receive(connection, b"hello 1 me session=new h\r\n")
        [session] = core.state.sessions.values()
        session.bound, client.session = client.number, session  # forced
        identity = core.context.identity
        txids = [
            str(TxId(identity.cluster, identity.node, session.number, counter)).encode() for counter in range(1, 4)
        ]
        core.state.principals.fold(entries.QUOTA_SET, {"kind": "topic", "name": "a", "limits": {"bytes_per_s": 100}})
        host.throttle.look()
        content = batch(bytes(2000))
        line = b"put a 0 tx=%b %d %b\r\n%b"

        def answers() -> dict[bytes, object]:
            return {opaque: getattr(reply, "code", 200) for opaque, reply in client.out}

        receive(connection, line % (txids[0], len(content), b"p1", content))
        receive(connection, line % (txids[0], len(content), b"p2", content))
        receive(connection, line % (txids[1], len(content), b"p3", content))
        body = b"".join(bytes(piece) for piece in encode_part("a", 0, content))
        receive(connection, b"commit %b %d c3\r\n%b" % (txids[2], len(body), body))
        assert {opaque: answers().get(opaque) for opaque in (b"p1", b"p2", b"p3", b"c3")} == {
            b"p1": None, b"p2": None, b"p3": 429, b"c3": 429,  # the first two wait for the journal
        }  # fmt: skip
        streamed = core.state.transactions[session.number, 1]
        assert len(streamed.parts) == 2
        stated = b"parts=2 bytes=%d crc=%d" % (streamed.size_bytes, streamed.checksum)
        receive(connection, b"commit %b %b 0 c1\r\n" % (txids[0], stated))
        assert (session.number, 1) not in core.state.transactions
        assert (transport.is_read, client.closing, host.throttle.waiting, host.throttle.refused) == (True, False, 0, 2)
        host.clock.advance(60.0)
        receive(connection, b"commit %b %d c4\r\n%b" % (txids[2], len(body), body))
        assert answers().get(b"c4") is None

    asyncio.run(played())
