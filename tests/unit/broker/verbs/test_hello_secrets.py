"""Where the secret of a session comes from, sessions of older brokers that have none, and that no tool shows it."""

from __future__ import annotations

import json
import random
from typing import Any

from tools.images.node import Client, Node
from tools.simulated.clock import SimRandom
from txmq.broker.state.session import BrokerSession
from txmq.redo import entries, inspect

from ..support import node, restarted

WRONG = "0" * 32


def _hello(client: Client, wish: str) -> dict[str, Any]:
    answer = client.ask("hello", 1, "tester", extensions={"session": wish})
    assert answer.code == 200, answer
    told: dict[str, Any] = json.loads(answer.body)
    return told


def _new(broker: Node) -> tuple[Client, str]:
    """A client, and the secret of its session."""
    client = broker.connect()
    return client, _hello(client, "new")["secret"]


def test_each_session_has_secret_of_its_own_from_random_door() -> None:
    broker = node()
    drawn = SimRandom(random.Random(5))
    broker.context.random = drawn
    secrets = [_new(broker)[1] for _ in range(3)]
    again = SimRandom(random.Random(5))
    assert secrets == [f"{again.bits(128):032x}" for _ in range(3)]


def test_session_without_secret_from_older_broker_is_nobodys() -> None:
    broker = node()
    _, _ = _new(broker)
    broker.state.sessions[1].secret = ""
    for wish in ("1.0." + WRONG, "1.1." + WRONG):
        assert broker.connect().hello(wish).error == "fenced"


def test_what_an_older_broker_journaled_and_checkpointed_is_read() -> None:
    broker = node()
    fields = {"session": 7, "epoch": 0, "name": "old", "time_ms": 1}
    broker.context.group.add_entry(entries.json_entry(entries.SESSION, fields))
    broker.pump()
    broker = restarted(broker)
    assert broker.state.sessions[7].secret == ""
    snapshot = broker.state.sessions[7].snapshot()
    restored = BrokerSession.restore(*snapshot[:7])  # type: ignore[arg-type]
    assert (restored.number, restored.secret) == (7, "")


def test_no_tool_shows_a_secret() -> None:
    broker = node()
    _, secret = _new(broker)
    entry = entries.json_entry(entries.SESSION, {"session": 1, "secret": secret})
    ((kind, flags, body),) = entries.split(entry)
    shown = str(inspect.summary(kind, flags, body))
    assert secret not in shown
    assert "secret" in shown
