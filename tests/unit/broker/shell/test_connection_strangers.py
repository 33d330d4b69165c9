"""What a connection may send, and how long it may take, before it has logged in; and which one is no stranger."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from txmq.broker.shell.connection import STRANGER_BYTES_MAX, Connection
from txmq.broker.verbs.access.authorizer import strangers_from_now_on
from txmq.protocol.scram import peer_name
from txmq.redo import entries

from .test_connection import Transport, connected, receive, tiny

SHOP, HOME = "shop", peer_name(7)
PINGS = b"".join(map(tiny, range(STRANGER_BYTES_MAX // len(tiny(0)) + 1)))


def with_users(user: str) -> tuple[Connection, Transport, Any]:
    """A connection that speaks for a user, in a cluster that has users."""
    connection, transport, host = connected()
    principals = host.core.state.principals
    principals.fold(entries.USER, {"user": SHOP, "keys": None, "certificate": None})
    principals.fold(entries.ACCESS, {"version": 1, "secret": "ab", "between_brokers": "cd"})
    strangers_from_now_on(host.core.context)
    connection.client.user = user
    return connection, transport, host


@pytest.mark.parametrize(("user", "is_stranger"), [("", True), ("former", True), (SHOP, False), (HOME, False)])
def test_strangers_alone_have_little_to_say(user: str, is_stranger: bool) -> None:
    async def played() -> None:
        connection, transport, _ = with_users(user)
        receive(connection, PINGS)
        assert transport.is_aborted is is_stranger

    asyncio.run(played())


@pytest.mark.parametrize(("user", "is_stranger"), [("", True), ("former", True), (SHOP, False), (HOME, False)])
def test_strangers_alone_have_little_time(user: str, is_stranger: bool) -> None:
    async def played() -> None:
        connection, transport, host = with_users(user)
        receive(connection, tiny(1))
        host.context.liveness.now_ms += host.settings.login_timeout_ms + 1
        connection.check_deadlines()
        assert transport.is_aborted is is_stranger

    asyncio.run(played())
