"""Only a group of completed branches waits, once and for a moment; whatever else comes takes it along."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from txmq.broker.patience import WAIT_S, Patience

from ...images.node import Client, Node
from .support import UUID, batch, node
from .test_decisions import OTHER_UUID, decide


class Timers:
    """What the loop was asked to call back."""

    def __init__(self) -> None:
        self.due: list[tuple[float, Callable[[], None]]] = []
        self.cancelled = self.woken = 0
        self.patience = Patience(self.call_later, self.wake)

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timers:
        self.due.append((delay_s, call))
        return self

    def cancel(self) -> None:
        self.cancelled += 1

    def wake(self) -> None:
        self.woken += 1


def decided(*uuids: str) -> tuple[Node, Client, str]:
    """A node with one decision."""
    made = node()
    client, txid = made.session(), made.txid(1, 1)
    assert decide(client, txid, ("a", 0, batch(b"x")), uuids=uuids).code == 200
    return made, client, txid


def test_a_group_of_completed_branches_waits_once() -> None:
    made, client, txid = decided(UUID, OTHER_UUID)
    timers, group = Timers(), made.core.context.group
    client.send("complete", txid, extensions={"uuid": UUID})
    client.send("complete", txid, extensions={"uuid": OTHER_UUID})
    assert timers.patience.keeps(group)
    assert timers.patience.keeps(group)
    [(delay_s, call)] = timers.due
    assert delay_s == WAIT_S
    call()
    assert timers.woken == 1
    assert not timers.patience.keeps(group)
    timers.patience.end()
    assert timers.patience.keeps(group)  # the next one waits again


def test_nothing_waits_where_nothing_is_queued() -> None:
    assert not Timers().patience.keeps(node().core.context.group)


@pytest.mark.parametrize("company", ["put", "rollback", "outcome", "heuristic"])
def test_whatever_else_comes_takes_it_along(company: str) -> None:
    made, client, txid = decided(UUID, OTHER_UUID)
    timers, group = Timers(), made.core.context.group
    client.send("complete", txid, extensions={"uuid": UUID})
    assert timers.patience.keeps(group)
    if company == "put":
        client.send("put", "a", 0, body=batch(b"y"))
    elif company == "rollback":
        client.send("rollback", made.txid(1, 2))
    elif company == "outcome":  # its answer rests on what is in the group
        client.send("outcome", txid)
    else:
        extensions = {"uuid": OTHER_UUID, "heuristic": "hazard", "reason": "r"}
        client.send("complete", txid, extensions=extensions)
    assert not timers.patience.keeps(group)
    timers.patience.end()
    assert timers.cancelled == 1
