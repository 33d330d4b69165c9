"""Calls that wait for a peer are ended when they are due, and nothing else is."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from txmq.runtime.call_limits import CallLimit

LONG_S = 600.0
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    made = [socket.socketpair() for _ in range(3)]
    yield made
    for one in [each for pair in made for each in pair]:
        one.close()


def until_ended(ours: socket.socket) -> CallLimit:
    """Wait for a peer that never says a word."""
    limit = CallLimit(ours.fileno)
    limit.begin(0.0)
    with limit:
        assert ours.recv(1) == b""
    limit.end()
    return limit


def test_call_ends_when_it_is_due(pairs: list[Pair]) -> None:
    assert until_ended(pairs[0][0]).has_passed


@pytest.mark.parametrize("state", ["between calls", "extended", "over"])
def test_connection_is_left_alone_if_no_call_is_due(pairs: list[Pair], state: str) -> None:
    ours, theirs = pairs[2]
    limit = CallLimit(ours.fileno)
    limit.begin(0.0)
    if state == "extended":
        limit.extend(LONG_S)
    if state == "over":
        limit.end()
    if state != "between calls":
        limit.calls = 1
    for other, _ in pairs[:2]:  # the second one ends in a later look than the first
        until_ended(other)
    theirs.send(b"x")
    assert ours.recv(1) == b"x"
    assert not limit.has_passed
    limit.end()


def test_socket_that_is_closed_already_harms_nobody(pairs: list[Pair]) -> None:
    ours, _ = pairs[2]
    ours.close()
    limit = CallLimit(ours.fileno)
    limit.begin(0.0)
    limit.calls = 1
    for other, _ in pairs[:2]:
        until_ended(other)
    limit.end()
    assert not limit.has_passed
