"""Fences for one database at a broker that is killed: what was told holds, what was not may be asked again."""

from __future__ import annotations

from pathlib import Path

import pytest

import txmq
from txmq.client.admin.cluster import Users
from txmq.errors import ConnectionLostError, ForbiddenError, RequestTimeoutError
from txmq.testing.processes.broker import BrokerProcess

PASSWORD = "correct horse"
UUID = "a" * 32
WORDS = {"uuid": UUID}
WAIT_S = 60.0


def _connected(broker: BrokerProcess, user: str) -> txmq.Client:
    return txmq.connect(broker.address.replace("://", f"://{user}@"), password=PASSWORD)


def _begin(broker: BrokerProcess) -> str:
    """Users, a session of the administrator's, and the id of a transaction in it that the broker does not know."""
    with txmq.connect(broker.address) as client:
        Users(client.control, client.timeout).add("ops", PASSWORD)
    with _connected(broker, "ops") as client:
        users = Users(client.control, client.timeout)
        users.add("settler", PASSWORD)
        users.acl("grant", "settler", {"may": "settle", "resource": UUID})
        return client.session.next_txid()[1]


@pytest.mark.parametrize(
    ("point", "found"),
    [("broker.database.fenced:1", b"unknown\n"), ("broker.database.fenced>journal.sync.done:1", b"rolled-back\n")],
)
def test_fence_is_there_or_not_when_broker_dies(tmp_path: Path, point: str, found: bytes) -> None:
    with BrokerProcess(tmp_path / "data", settings={"mark_idle_ms": 60_000}) as broker:
        txid = _begin(broker)
        broker.stop()
        broker.start(env={"TXMQ_CRASH": point})
        with _connected(broker, "settler") as client, pytest.raises((ConnectionLostError, RequestTimeoutError)):
            client.control.call("outcome", txid, extensions={**WORDS, "fence": None}, timeout=WAIT_S)
        assert broker.wait(WAIT_S) == -9
        broker.start()
        with _connected(broker, "settler") as client:
            told = client.control.call("outcome", txid, extensions=WORDS, timeout=WAIT_S)
            assert told == found
            fenced = client.control.call("outcome", txid, extensions={**WORDS, "fence": None}, timeout=WAIT_S)
            assert fenced == b"rolled-back\n"
            with pytest.raises(ForbiddenError):
                client.control.call("outcome", txid, extensions={"uuid": "b" * 32, "fence": None}, timeout=WAIT_S)
        broker.kill()
        broker.start()
        with _connected(broker, "settler") as client:
            assert client.control.call("outcome", txid, extensions=WORDS, timeout=WAIT_S) == b"rolled-back\n"
