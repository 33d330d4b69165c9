"""``broker_identity``: new ids of topics and sessions come from the broker's own state, or from a source outside."""

from __future__ import annotations

import json

import pytest

from txmq.errors import InvariantError

from ..support import Registry, node, put, restarted, values


def test_topic_ids_of_the_source_survive_a_restart() -> None:
    broker = node()
    broker.context.ids = Registry(70, 40)
    client = broker.connect()
    made = [json.loads(client.ask("topic", "create", name).body)["topic_id"] for name in ("far", "near")]
    assert made == [70, 40]
    put(client, b"1", topic="far")
    put(client, b"2", topic="near")
    broker = restarted(broker)
    assert (values(broker, "far"), values(broker, "near")) == ([b"1"], [b"2"])
    assert json.loads(broker.connect().ask("topic", "create", "own").body)["topic_id"] == 71


def test_session_numbers_of_the_source_survive_a_restart() -> None:
    broker = node()
    broker.context.ids = Registry(255, 16)
    assert [json.loads(broker.connect().hello("new").body)["session"] for _ in range(2)] == ["ff", "10"]
    broker = restarted(broker)
    assert sorted(broker.state.sessions) == [16, 255]
    broker.session()
    assert broker.newest_session > 255


def test_an_id_in_use_is_refused_before_it_is_journaled() -> None:
    broker = node()
    broker.session()
    client = broker.connect()
    broker.context.ids = Registry(1, 1)
    with pytest.raises(InvariantError, match="topic id 1 is in use"):
        client.ask("topic", "create", "again")
    with pytest.raises(InvariantError, match="session number 1 is in use"):
        broker.connect().hello("new")
    broker = restarted(broker)
    assert [topic.config.name for topic in broker.state.topics] == ["a", "b"]
    assert list(broker.state.sessions) == [1]
