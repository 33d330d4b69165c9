"""Whose a session is: a secret that resuming needs, and an epoch that rises when somebody takes it over."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tools.images.node import Client, Node
from tools.images.requests import batch, part
from tools.simulated.clock import SimRandom
from txmq.broker.state.session import EPOCH_MAX, BrokerSession
from txmq.redo import entries, inspect

from ..support import node, put, restarted, stated, values

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


@pytest.mark.parametrize("wish", ["1.0", "1.0." + WRONG, "1.1." + WRONG, "2.0." + WRONG, "1.0.x", "1.0." + "0" * 31])
def test_missing_or_wrong_secret_gets_no_session_and_changes_nothing(wish: str) -> None:
    broker = node()
    owner, _ = _new(broker)
    stranger = broker.connect()
    stranger.send_bytes(f"hello 1 stranger session={wish} q\r\n".encode())
    broker.pump()
    assert stranger.received[b"q"].code == (410 if wish.endswith(WRONG) else 400)
    assert not owner.client.closing
    assert put(owner, producer=1).code == 200
    assert broker.state.sessions[1].epoch == 0


@pytest.mark.parametrize("checkpoint", [False, True])
def test_the_secret_survives_the_broker(checkpoint: bool) -> None:
    broker = node()
    _, secret = _new(broker)
    if checkpoint:
        broker.checkpoint()
    broker = restarted(broker)
    assert broker.connect().hello("1.0." + WRONG).error == "fenced"
    assert _hello(broker.connect(), f"1.0.{secret}")["secret"] == secret


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


# --- taken over ------------------------------------------------------------------------------------------------------


def test_equal_epoch_resumes_and_raises_nothing() -> None:
    broker = node()
    _, secret = _new(broker)
    assert [_hello(broker.connect(), f"1.0.{secret}")["epoch"] for _ in range(3)] == [0, 0, 0]


def test_higher_epoch_takes_session_over_and_fences_older_holder() -> None:
    broker = node()
    older, secret = _new(broker)
    newer = broker.connect()
    assert _hello(newer, f"1.1.{secret}")["epoch"] == 1
    assert older.client.closing
    assert put(newer, producer=1, epoch=1).code == 200
    answer = broker.connect().hello(f"1.0.{secret}")
    assert (answer.code, answer.error) == (410, "fenced")
    assert "epoch 1" in answer.text
    assert broker.state.sessions[1].bound == newer.client.number


def test_taking_over_may_be_repeated_where_its_answer_was_lost() -> None:
    broker = node()
    _, secret = _new(broker)
    assert [_hello(broker.connect(), f"1.4.{secret}")["epoch"] for _ in range(2)] == [4, 4]
    assert broker.connect().hello(f"1.3.{secret}").error == "fenced"


@pytest.mark.parametrize("checkpoint", [False, True])
def test_who_was_fenced_stays_fenced_over_a_restart(checkpoint: bool) -> None:
    broker = node()
    client, secret = _new(broker)
    assert client.ask("commit", broker.txid(1, 1), body=part("a", 0, batch(b"1"))).code == 200
    _hello(broker.connect(), f"1.1.{secret}")
    if checkpoint:
        broker.checkpoint()
    broker = restarted(broker)
    assert broker.connect().hello(f"1.0.{secret}").error == "fenced"
    newer = broker.connect()
    assert _hello(newer, f"1.1.{secret}")["epoch"] == 1
    again = newer.ask("commit", broker.txid(1, 1), body=part("a", 0, batch(b"1")))
    assert (again.text, values(broker)) == ("a 0 0 1\n", [b"1"])


def test_new_holder_may_repeat_puts_of_the_older_ones_epoch() -> None:
    """An ordered producer's spool: the same bytes, so that the broker knows what it has."""
    broker = node()
    older, secret = _new(broker)
    put(older, b"1", producer=1)
    newer = broker.connect()
    _hello(newer, f"1.1.{secret}")
    assert put(newer, b"1", producer=1).text == "0\n"
    assert put(newer, b"2", producer=1, sequence=1).text == "1\n"
    assert put(newer, b"3", producer=1, epoch=1, sequence=2).text == "2\n"
    assert put(newer, b"4", producer=1, epoch=2, sequence=3).error == "fenced"
    assert values(broker) == [b"1", b"2", b"3"]


def test_takeover_rolls_streams_back_and_keeps_prepared_transactions() -> None:
    broker = node()
    older, secret = _new(broker)
    streamed, prepared = broker.txid(1, 1), broker.txid(1, 2)
    older.ask("put", "a", 0, extensions={"tx": streamed}, body=batch(b"1"))
    older.ask("prepare", prepared, "half", extensions={"group": "g"}, body=part("a", 0, batch(b"2")))
    newer = broker.connect()
    _hello(newer, f"1.1.{secret}")
    assert newer.ask("outcome", streamed).text == "rolled-back\n"
    assert newer.ask("commit", streamed, extensions=stated([batch(b"1")]), body=b"").error == "transaction-conflict"
    assert newer.ask("outcome", prepared).text == "prepared\n"
    assert newer.ask("commit", prepared, body=b"").code == 200
    assert values(broker) == [b"2"]


def test_an_epoch_that_no_batch_can_carry_is_refused() -> None:
    broker = node()
    _, secret = _new(broker)
    assert broker.connect().hello(f"1.{EPOCH_MAX + 1}.{secret}").error == "bad-request"
    assert _hello(broker.connect(), f"1.{EPOCH_MAX}.{secret}")["epoch"] == EPOCH_MAX


def test_no_tool_shows_a_secret() -> None:
    broker = node()
    _, secret = _new(broker)
    entry = entries.json_entry(entries.SESSION, {"session": 1, "secret": secret})
    ((kind, flags, body),) = entries.split(entry)
    shown = str(inspect.summary(kind, flags, body))
    assert secret not in shown
    assert "secret" in shown
