"""Waiting for a prepare: what the error of a timeout tells."""

from __future__ import annotations

import pytest

from tools.simulated.broker import SimulatedBroker
from txmq.client.transaction.conversation import Conversation
from txmq.errors import OverloadedError, RequestTimeoutError
from txmq.xa.broker_port import Answer


def test_timeout_says_why_tries_before_last_were_refused() -> None:
    broker, tries = SimulatedBroker(), [OverloadedError("no room"), RequestTimeoutError("no answer in time")]
    part = Conversation(broker, broker.clock, 30.0)

    def submit() -> Answer:
        raise tries.pop(0)

    with pytest.raises(RequestTimeoutError) as told:
        part.await_prepare(submit, waits_for_room=True, waits_for_broker=True)
    assert isinstance(told.value.__cause__, OverloadedError)
