"""Sessions of a broker that was restored from a copy; how many outcomes and fences are kept, and what that costs."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy

import pytest

from tests.growth import growth
from tools.images.node import Client, Node
from tools.images.requests import batch, part
from txmq.broker.state.session import BrokerSession
from txmq.broker.verbs.session_expiry import SESSION_IDLE_MS_MIN, end

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


def _idle(broker: Node, *clients: Client) -> None:
    for client in clients:
        client.disconnect()
    broker.clock.advance(SESSION_IDLE_MS_MIN / 1000)
    broker.pump()


def test_outcomes_of_all_sessions_without_floor_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txmq.broker.verbs.transaction_checks.OUTCOMES_OVER_MAX", 3)
    broker = node(outcomes_kept=2)

    def commits(client: Client, counters: range, **words: int) -> list[int]:
        number = client.client.session.number if client.client.session is not None else 0
        return [
            client.ask("commit", broker.txid(number, n), body=part("a", 0, batch(b"1")), extensions={**words}).code
            for n in counters
        ]

    first, second, third = broker.session(), broker.session(), broker.session()
    assert commits(first, range(1, 5)) == [200] * 4  # two over
    assert commits(second, range(1, 5)) == [200, 200, 200, 429]  # one more over
    assert commits(first, range(5, 6)) == [429]
    assert commits(third, range(1, 5)) == [200, 200, 200, 429]  # what each may keep has always room
    for counter in range(4, 9):
        assert commits(third, range(counter, counter + 1), floor=counter - 1) == [200]
    assert broker.state.outcomes_over == 3
    first.disconnect()
    broker.clock.advance(SESSION_IDLE_MS_MIN / 1000)
    end(broker.context, broker.state.sessions[1])
    assert broker.state.outcomes_over == 1
    assert commits(second, range(4, 5)) == [200]
    broker.checkpoint()
    assert restarted(broker).state.outcomes_over == broker.state.outcomes_over == 2


def test_fence_of_an_unused_counter_does_not_keep_later_outcomes() -> None:
    broker = node(outcomes_kept=2)
    client, invented = broker.session(), 1 << 60
    assert client.ask("rollback", broker.txid(1, invented)).code == 200
    for n in range(1, 40):
        body = part("a", 0, batch(b"%d" % n))
        assert client.ask("commit", broker.txid(1, n), extensions={"floor": n - 1}, body=body).code == 200
    session = broker.state.sessions[1]
    assert len(session.outcomes) <= 4
    assert session.outcomes[invented] is None
    assert session.floor < 39
    again = restarted(broker).state.sessions[1]
    assert (again.outcomes, again.floor) == (session.outcomes, session.floor)


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
