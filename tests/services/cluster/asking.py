"""Questions to one broker of a cluster, as text."""

from __future__ import annotations

import json
import signal
from typing import Any

from tests.services.broker.wire import Wire
from txmq.testing.eventually import WITHIN_S
from txmq.testing.processes.broker import BrokerProcess


def asked(broker: BrokerProcess, *words: str) -> tuple[int, str]:
    """The code of a request's answer, and its body."""
    with Wire(broker) as wire:
        code, body = wire.ask(" ".join([*words, "1"]).encode() + b"\r\n")
    return code, body.decode()


def described(broker: BrokerProcess) -> Any:
    """The broker's answer to ``cluster describe``."""
    code, body = asked(broker, "cluster", "describe")
    assert code == 200, body
    return json.loads(body)


def session_state(broker: BrokerProcess) -> str:
    """The broker's session with the registry."""
    return str(described(broker)["registry"]["state"])


def put(broker: BrokerProcess, topic: str, partition: int) -> tuple[int, str]:
    """Put one message; the code, and its offset or the refusal."""
    with Wire(broker) as wire:
        code, body = wire.ask(f"put {topic} {partition} raw 5 1\r\nhello".encode())
    return code, body.decode()


def placed(broker: BrokerProcess, topic: str) -> list[str]:
    """The home of each partition."""
    code, body = asked(broker, "topic", "describe", topic)
    assert code == 200, body
    homes: list[str] = json.loads(body)["homes"]
    return homes


def dies_of(broker: BrokerProcess, request: bytes) -> None:
    """A broker that is armed with a crash point dies before it answers; start it again."""
    with Wire(broker) as wire:
        wire.send(request)
        assert wire.hear(1).answers == []
    comes_back(broker)


def comes_back(broker: BrokerProcess) -> None:
    """Wait until a broker has killed itself, and start it again."""
    assert broker.wait(WITHIN_S) == -signal.SIGKILL
    broker.start(env={})
