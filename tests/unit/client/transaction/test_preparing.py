"""Waiting for a prepare: what the error of a timeout tells."""

from __future__ import annotations

import pytest

from txmq.client.transaction.preparing import Preparing
from txmq.errors import OverloadedError, RequestTimeoutError, TransactionTimeoutError
from txmq.xa.broker_port import Answer


class Refusing:
    """A broker that has no room, and does not answer the last request in time."""

    def __init__(self) -> None:
        self.remaining_s, self.txid_or_none = 3.0, None

    def check_deadline(self) -> None:
        if self.remaining_s <= 0:
            raise TransactionTimeoutError("timeout= passed", None)

    def pause(self, _seconds: float) -> None:
        pass

    def submit(self) -> Answer:
        self.remaining_s -= 1.0
        if self.remaining_s <= 0:
            raise RequestTimeoutError("no answer in time")
        raise OverloadedError("no room")


def test_timeout_says_why_tries_before_last_were_refused() -> None:
    broker = Refusing()
    preparing = Preparing(broker, broker.submit, waits_for_room=True, waits_for_broker=True)  # type: ignore[arg-type]
    with pytest.raises(RequestTimeoutError) as told:
        preparing.wait()
    assert isinstance(told.value.__cause__, OverloadedError)
