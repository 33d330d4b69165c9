"""Checks of a half message back off and never end; and what other tests prepare half messages and branches with."""

from __future__ import annotations

from typing import Any

from tools.images.node import Answer, Client, Node
from tools.images.requests import batch, part
from txmq.broker.verbs.check_backs import PAUSE_MS
from txmq.protocol.transaction_bodies import DueHalf, split_halves

from ..support import node, values

GROUP = "order-service"
XID = "1.00ff.01"


def half(client: Client, txid: str, value: bytes = b"x", **extensions: Any) -> Answer:
    """Prepare a half message."""
    return client.ask(
        "prepare", txid, "half", extensions={"group": GROUP, **extensions}, body=part("a", 0, batch(value))
    )


def foreign(client: Client, txid: str, xid: str = XID) -> Answer:
    """Prepare a branch of another transaction manager."""
    return client.ask("prepare", txid, "foreign", extensions={"xid": xid}, body=part("a", 0, batch(b"x")))


def due(client: Client, group: str = GROUP, **extensions: int) -> list[DueHalf]:
    """What ``checks`` hands out now."""
    answer = client.ask("checks", group, extensions=extensions)
    assert answer.code == 200, answer
    return split_halves(answer.body)


def pass_time(made: Node, seconds: float) -> None:
    """The broker's timer runs."""
    made.clock.advance(seconds)
    made.core.tick(made.clock.now_ms())
    made.pump()


def test_checks_back_off_and_never_end() -> None:
    made = node()
    client, other = made.session(), made.connect()
    half(client, made.txid(1, 1))
    client.disconnect()
    pass_time(made, 1.0)
    for attempt in range(1, 1001):
        (found,) = due(other)
        assert found.attempt == attempt
        pause_ms = PAUSE_MS.after(attempt - 1)
        pass_time(made, (pause_ms - 1) / 1000)
        assert due(other) == []
        pass_time(made, 0.001)
    assert values(made) == []
    assert other.ask("commit", made.txid(1, 1), body=b"").code == 200
    assert values(made) == [b"x"]
