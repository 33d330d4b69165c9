"""``txmq group`` against a real broker."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import txmq
from tests.services.consumer.consuming import take, values
from txmq.protocol.group_rows import GroupOffsets, OffsetRow, encode_offsets
from txmq.testing.eventually import eventually
from txmq.testing.processes import fork_server
from txmq.testing.processes.broker import BrokerProcess

TIMEOUT_S = 60.0


def run(broker: BrokerProcess, *words: str, status: int = 0) -> str:
    """The command; its standard output, or its standard error where it fails."""
    command = [sys.executable, "-m", "txmq.cli.main", "group", *words, "--bootstrap", broker.address]
    done = fork_server.run(command, timeout=TIMEOUT_S)
    assert done.returncode == status, done.stderr
    return (done.stderr if status else done.stdout).decode()


def offsets(broker: BrokerProcess) -> dict[int, Any]:
    """What is saved, by partition."""
    found = json.loads(run(broker, "describe", "billing", "--json"))
    return {row["partition"]: row["offset"] for row in found["partitions"]}


def test_a_group_is_listed_described_reset_skipped_and_deleted(broker: BrokerProcess) -> None:
    with txmq.connect(broker.address) as client:
        client.topics.create("orders", partitions=2)
        producer = client.producer()
        for number in range(6):
            producer.send("orders", b"%d" % number, partition=number % 2)
        with client.consumer("billing", ["orders"]) as consumer:
            taken = 0
            while taken < 6:
                for message in consumer.poll():
                    message.ack()
                    taken += 1
            described = run(broker, "describe", "billing")
            assert "lag" in described
            assert "sticky" in described
            assert "has 1 members" in run(broker, "reset", "billing", "-t", "orders", "--to", "earliest", status=1)
        time_ms = client.fetch("orders", 0, 2)[0].timestamp_ms
    assert json.loads(run(broker, "list", "--json")) == [{"group": "billing", "members": 0}]
    assert offsets(broker) == {0: 3, 1: 3}
    run(broker, "reset", "billing", "--topic", "orders", "--to", "earliest")
    assert offsets(broker) == {0: 0, 1: 0}
    run(broker, "skip", "billing", "--topic", "orders", "--partition", "1", "--count", "2")
    assert offsets(broker) == {0: 0, 1: 2}
    run(broker, "reset", "billing", "--topic", "orders", "--partition", "0", "--to", "1")
    assert offsets(broker) == {0: 1, 1: 2}
    run(broker, "reset", "billing", "--topic", "orders", "--to", f"time:{time_ms + 60_000}")
    assert offsets(broker) == {0: 3, 1: 3}
    run(broker, "reset", "billing", "--topic", "orders", "--to", "2026-01-31T12:00:00Z")
    assert offsets(broker) == {0: 0, 1: 0}
    run(broker, "reset", "billing", "--topic", "orders", "--to", f"@{time_ms + 60_000}")
    assert offsets(broker) == {0: 3, 1: 3}
    assert "0 to 3" in run(broker, "reset", "billing", "-t", "orders", "--to", "9", status=2)
    assert "earliest, latest" in run(broker, "reset", "billing", "-t", "orders", "--to", "soon", status=2)
    assert "0 to 1" in run(broker, "reset", "billing", "-t", "orders", "-p", "7", "--to", "latest", status=2)
    run(broker, "delete", "billing")
    assert "no group" in run(broker, "describe", "billing", status=1)


def test_misspelt_name_is_answered_with_the_nearest_and_changes_nothing(broker: BrokerProcess) -> None:
    with txmq.connect(broker.address) as client:
        client.topics.create("orders", partitions=2)
        run(broker, "reset", "billing", "--topic", "orders", "--to", "earliest", "--create")
        for words in (
            ("reset", "biling", "--topic", "orders", "--to", "earliest"), ("describe", "biling"), ("delete", "biling"),
            ("skip", "biling", "--topic", "orders", "--partition", "0"),
        ):  # fmt: skip
            assert "did you mean 'billing'?" in run(broker, *words, status=1), words
        assert "did you mean 'orders'?" in run(broker, "reset", "billing", "-t", "ordrs", "--to", "latest", status=1)
        assert [row["group"] for row in client.groups.list()] == ["billing"]


def test_damaged_message_stops_its_partition_until_skipped_by_hand(broker: BrokerProcess) -> None:
    with txmq.connect(broker.address) as client:
        client.topics.create("orders")
        producer = client.producer()
        for number in range(3):
            producer.send("orders", b"%d" % number)
    broker.stop()
    [segment] = (broker.data_dir / "log").rglob("*.log")
    content = bytearray(segment.read_bytes())
    content[content.index(b"1", len(content) // 3 + 60)] ^= 1  # the value of the second of three equal batches
    segment.write_bytes(content)
    broker.start()
    with txmq.connect(broker.address) as client:
        with client.consumer("billing", ["orders"]) as consumer:
            assert values(take(consumer, 1)) == [b"0"]
            eventually(lambda: "txmq log verify" in consumer.stopped.get(("orders", 0), ""), "it says so")
        assert offsets(broker) == {0: 1}
        run(broker, "skip", "billing", "--topic", "orders", "--partition", "0")
        with client.consumer("billing", ["orders"]) as consumer:
            assert values(take(consumer, 1)) == [b"2"]
            assert consumer.stopped == {}
        found: list[bytes | None] = []
        with pytest.raises(txmq.errors.InvalidBatchError, match="at offset 1"):
            found.extend(message.value for message in client.browse("orders"))
        assert found == [b"0"]


def test_describe_names_the_transaction_that_a_partition_waits_for(broker: BrokerProcess) -> None:
    with txmq.connect(broker.address) as client:
        client.topics.create("orders")
        _, txid = client.session.next_txid()
        words = {"member": "one", "topics": "orders"}
        client.control.call("group", "join", "billing", timeout=30.0, extensions=words, body=[b"[]"])
        body = encode_offsets([GroupOffsets("billing", 0, (OffsetRow("orders", 0, 1, 5, None),))])
        given: dict[str, str | int | bytes | None] = {
            "resource": "db",
            "uuid": "0" * 32,
            "table": "t",
            "offsets": len(body),
        }
        client.control.call("prepare", txid, "last-resource", timeout=30.0, extensions=given, body=[body])
        assert f"orders 0 waits for a transaction: txmq tx show {txid}" in run(broker, "describe", "billing")
        client.transactions.rollback(txid, "the test is over")
        assert "waits" not in run(broker, "describe", "billing")


def test_offsets_that_consumers_keep_themselves_are_said_to_be_elsewhere(broker: BrokerProcess, tmp_path: Path) -> None:
    with txmq.connect(broker.address) as client:
        client.topics.create("orders")
        client.producer().send("orders", b"v")
        store = txmq.FileOffsetStore(str(tmp_path / "offsets"))
        with client.consumer("billing", ["orders"], offset_store=store) as consumer:
            assert values(take(consumer, 1)) == [b"v"]
            assert "FileOffsetStore" in run(broker, "describe", "billing")
        with client.consumer("shipping", ["orders"]) as consumer:
            for message in take(consumer, 1):
                message.ack(sync=True)
            assert "FileOffsetStore" not in run(broker, "describe", "shipping")
