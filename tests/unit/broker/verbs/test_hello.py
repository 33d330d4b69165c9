"""Sessions of a broker that was restored from a copy; and what it costs to keep outcomes."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy

from tests.growth import growth
from tools.images.node import Node
from txmq.broker.state.session import BrokerSession
from txmq.broker.verbs.session_expiry import end

from ..support import node, restarted


def test_broker_restored_from_a_backup_issues_no_number_again() -> None:
    broker = node()
    backup = deepcopy(broker.disk).kill()
    issued = set[int]()
    for disk in (broker.disk.kill(), backup):  # it goes on, and is lost: the copy, which lacks that, takes its place
        broker.clock.advance(1)
        alive = Node(disk, broker.settings, clock=broker.clock)
        numbers = {int(json.loads(alive.connect().hello().body)["session"], 16) for _ in range(3)}
        assert not issued & numbers
        issued |= numbers


def test_broker_restored_from_a_backup_knows_which_sessions_it_issued() -> None:
    """Through checkpoints and restarts: those of its history, living or ended; not those issued since the copy."""
    broker = node(sessions_max=2)
    broker.connect().hello()
    backup = deepcopy(broker.disk).kill()
    lost = [int(json.loads(broker.connect().hello().body)["session"], 16)]
    broker = restarted(broker)
    for session in list(broker.state.sessions.values()):
        end(broker.core.context, session)
    lost.append(int(json.loads(broker.connect().hello().body)["session"], 16))
    for with_checkpoint in (False, True):
        broker = restarted(broker)
        asking = broker.connect()
        assert [asking.ask("outcome", broker.txid(number, 1)).error for number in (1, *lost)][:2] == ["fenced"] * 2
        assert asking.ask("outcome", broker.txid(lost[1], 1)).text == "unknown\n"
        if with_checkpoint:
            broker.checkpoint()
    broker.clock.advance(1)
    restored = Node(backup, broker.settings, clock=broker.clock)
    issued = int(json.loads(restored.connect().hello().body)["session"], 16)
    end(restored.core.context, restored.state.sessions[1])
    for with_checkpoint in (False, True):
        if with_checkpoint:
            restored.checkpoint()
        asking = restored.connect()
        errors = [asking.ask("outcome", restored.txid(number, 1)).error for number in (1, *lost)]
        assert errors == ["fenced", "never-issued", "never-issued"]
        assert asking.ask("outcome", restored.txid(issued, 1)).text == "unknown\n"
        restored = restarted(restored)


def test_cost_of_an_outcome_does_not_grow_with_their_number() -> None:
    def outcomes(kept_max: int) -> Callable[[], object]:
        session = BrokerSession(1, 0, "tester", 0)
        for counter in range(1, kept_max + 1):
            session.keep(counter, None, 0, kept_max)
        following = range(kept_max + 1, 2 * kept_max + 1)

        def keep() -> None:
            for counter in following:
                session.keep(counter, None, counter - 1, kept_max)

        return keep

    assert growth(outcomes, 1_000, 40_000) < 5
