"""What operators ask of brokers that are older than they."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from txmq.client.admin.transactions import Transactions
from txmq.errors import BadRequestError

TXID, UUID = "2819c0a9a0b6e771-db0886df688c2384-1-1", "0123456789abcdef" * 2


class OldBroker:
    """Knows no fences for one database, and refuses the word as any that it does not know."""

    def __init__(self) -> None:
        self.control = self

    def repeat(self, _verb: str, *_arguments: str, extensions: dict[str, Any], timeout: float) -> bytes:
        assert timeout > 0
        if "uuid" in extensions:
            raise BadRequestError("outcome knows no word uuid")
        return b"rolled-back\n"


def test_older_broker_is_told_from_a_mistake() -> None:
    broker = OldBroker()
    transactions = Transactions(cast("Any", SimpleNamespace(link_of_home=lambda _home: broker)), 1.0)
    with pytest.raises(BadRequestError, match="upgrade it, or let an administrator fence all of it"):
        transactions.fence(TXID, UUID)
    assert transactions.fence(TXID).value == "rolled-back"
