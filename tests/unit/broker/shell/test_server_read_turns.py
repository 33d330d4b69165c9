"""Reads that one message makes due by the ten thousand are carried out in turns, between which others have theirs."""

from __future__ import annotations

from typing import Any

from txmq.broker.context import Read
from txmq.broker.shell.server import READS_A_TURN, Server
from txmq.runtime.clocks import SteadyClock

from ..support import node


class Reads:
    """Notes what is read."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.read = self.done.append


class Loop:
    """Notes what is due."""

    def __init__(self) -> None:
        self.due: list[Any] = []
        self.call_soon = self.due.append


def test_message_that_wakes_many_polls_is_read_in_turns() -> None:
    made = node()
    count = 2 * READS_A_TURN + 1
    server = Server(made.core, made.store, made.settings, SteadyClock(made.clock))
    reads, loop = Reads(), Loop()
    server._reads, server._loop = reads, loop  # type: ignore[assignment]
    asked = [Read(made.connect().client, b"%d" % number, made.partition("a", 0), 0, 100) for number in range(count)]
    made.context.reads = list(asked)
    taken = []
    while made.context.reads:
        server._flush()
        taken.append(len(reads.done))
        assert bool(loop.due) == bool(made.context.reads)
        server._scheduled = False
        loop.due.clear()
    assert taken == [READS_A_TURN, 2 * READS_A_TURN, count]
    assert reads.done == asked
