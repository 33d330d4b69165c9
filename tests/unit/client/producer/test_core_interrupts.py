"""Ctrl-C while the core takes an answer: what follows keeps its numbers."""

from __future__ import annotations

import sys
from contextlib import suppress

from tests.interrupts import Strike
from txmq.client.producer import core as core_module
from txmq.client.producer.core import ProducerCore, ProducerLimits


def test_interrupted_answer_is_taken_or_comes_again() -> None:
    number, is_struck = 0, True
    while is_struck:
        number += 1
        core, strike = ProducerCore(ProducerLimits(linger_s=0.0)), Strike(number, core_module)
        core.connected(1, 1, 8)
        batches = [core.add("t", 0, bytearray(200), 2, 0.0, 60.0) for _ in range(4)]
        assert core.poll(0.0) == batches
        sys.setprofile(strike)
        with suppress(KeyboardInterrupt):
            for batch in (batches[1], batches[0]):
                core.answered(batch, 0)
        sys.setprofile(None)
        is_struck = strike.left <= 0
        core.disconnected()  # as ``Connection`` does after an interrupt
        core.connected(1, 1, 8)
        again = core.poll(0.0)
        assert [batch.sequence for batch in again] == [2 * batches.index(batch) for batch in again], number
        for batch in again:
            core.answered(batch, 0)
        assert (core.unfinished, core.buffered_bytes) == (0, 0), number
    assert number > 3
