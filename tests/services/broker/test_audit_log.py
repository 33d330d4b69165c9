"""The audit lines of a real broker: who logged in, was refused, changed what; written before it is done."""

from __future__ import annotations

import json
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import txmq
from txmq.client.admin.cluster import Users
from txmq.errors import ConnectionLostError, ForbiddenError, RequestTimeoutError, UnauthenticatedError
from txmq.testing.processes.broker import BrokerProcess

PASSWORD = "correct horse"
WAIT_S = 60.0


def named(broker: BrokerProcess, user: str) -> str:
    return broker.address.replace("://", f"://{user}@")


def audited(broker: BrokerProcess) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in broker.logs().splitlines() if line.startswith("{")]
    return [line for line in lines if line.get("audit")]


def told(broker: BrokerProcess, event: str) -> list[dict[str, Any]]:
    """The lines of an event: they are written before the answer."""
    return [line for line in audited(broker) if line["event"] == event]


def test_log_says_who_did_what(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as broker:
        with txmq.connect(broker.address) as client:
            client.topics.create("orders")
            Users(client.control, client.timeout).add("ops", PASSWORD)
        with txmq.connect(named(broker, "ops"), password=PASSWORD) as client:
            users = Users(client.control, client.timeout)
            users.add("shop", PASSWORD)
            users.acl("grant", "shop", {"may": "write,describe", "topic": "orders"})
            users.acl("grant", "shop", {"may": "write", "topic": "orders"})  # changes nothing
            users.acl("revoke", "shop", {"may": "describe", "topic": "orders"})
            users.quota("set", "user", "shop", {"requests_per_s": 1000})
            with pytest.raises(UnauthenticatedError):
                txmq.connect(named(broker, "shop"), password="guess")
            with txmq.connect(named(broker, "shop"), password=PASSWORD) as shop, pytest.raises(ForbiddenError):
                shop.topics.delete("orders")
            users.passwd("shop", PASSWORD)
            users.remove("shop")
        changes = {"user added", "granted", "revoked", "quota changed", "user changed", "user removed"}
        assert told(broker, "user removed")
        lines = audited(broker)
        made = [(line["event"], line["user"]) for line in lines if line["event"] in changes]
        assert made[:4] == [("user added", "-"), ("user added", "ops"), ("granted", "ops"), ("revoked", "ops")]
        assert made[4:] == [("quota changed", "ops"), ("user changed", "ops"), ("user removed", "ops")]
        by_event = {line["event"]: line for line in lines}
        assert (by_event["granted"]["whom"], by_event["granted"]["may"]) == ("shop", "write,describe")
        assert by_event["quota changed"]["limits"] == "requests_per_s=1000"
        assert (by_event["login failed"]["tried"], by_event["login failed"]["level"]) == ("shop", "warning")
        assert (by_event["refused"]["user"], by_event["refused"]["verb"]) == ("shop", "topic")
        assert all(line["address"].startswith("127.0.0.1:") for line in lines)
        assert PASSWORD not in broker.logs()
        assert "stored_key" not in broker.logs()


def test_operator_s_word_about_a_transaction_is_in_the_log(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as broker:
        with txmq.connect(broker.address) as client:
            client.topics.create("orders")
            Users(client.control, client.timeout).add("ops", PASSWORD)
        with txmq.connect(named(broker, "ops"), password=PASSWORD) as client:
            producer = client.producer(group="billing", checker=lambda _message: txmq.Resolution.UNKNOWN)
            txid = producer.half("orders", b"v").txid
            client.transactions.rollback(txid, "the shop is gone, says Ada")
        line = told(broker, "settled by hand")[0]
        assert (line["user"], line["txid"], line["reason"]) == ("ops", str(txid), "the shop is gone, says Ada")


def test_change_is_in_the_log_before_it_is_made(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data", settings={"mark_idle_ms": 60_000}) as broker:
        with txmq.connect(broker.address) as client:
            Users(client.control, client.timeout).add("ops", PASSWORD)
        broker.stop()
        broker.start(env={"TXMQ_CRASH": "journal.append.before:8"})
        with txmq.connect(named(broker, "ops"), password=PASSWORD) as client:
            users = Users(client.control, WAIT_S)
            with suppress(ConnectionLostError, RequestTimeoutError):
                for number in range(20):
                    users.add(f"u{number}", PASSWORD)
        assert broker.wait(WAIT_S) == -signal.SIGKILL
        added = [line["whom"] for line in told(broker, "user added")]
        assert len(added) < 20
        broker.restart()
        with txmq.connect(named(broker, "ops"), password=PASSWORD) as client:
            kept = [row["user"] for row in Users(client.control, client.timeout).list()]
        assert added[: len(kept)] == kept
        assert len(added) == len(kept) + 1  # the last one was said, and not made
