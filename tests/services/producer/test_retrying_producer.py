"""A plain producer with a retry store against a real broker; kills of both sides are in ``test_ordered_producer``."""

from __future__ import annotations

import enum
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

import txmq
from tests.services.loop_client import Connect
from txmq.errors import LocalProtocolError
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess

ACKNOWLEDGED, SPOOLED, PENDING = txmq.SendStatus.ACKNOWLEDGED, txmq.SendStatus.SPOOLED, txmq.SendStatus.PENDING
PARTITIONS = 4


@pytest.fixture
def client(shared_broker: BrokerProcess, connect: Connect) -> Iterator[txmq.Client]:
    """A client of the broker, which has the topic ``t``, empty."""
    with connect(shared_broker.address, timeout=30.0) as made:
        made.topics.create("t", partitions=PARTITIONS)
        yield made
        if not shared_broker.is_running:
            shared_broker.start()
        made.topics.delete("t")


@pytest.fixture
def producer(client: txmq.Client, tmp_path: Path) -> Iterator[txmq.Producer]:
    """With a store."""
    with client.producer(retry_store=str(tmp_path / "store"), timeout=30.0) as made:
        yield made


def arrived(client: txmq.Client) -> dict[int, list[bytes | None]]:
    """Values by partition."""
    found: dict[int, list[bytes | None]] = {number: [] for number in range(PARTITIONS)}
    for message in client.browse("t"):
        found[message.partition].append(message.value)
    return found


def test_while_broker_is_there_it_is_producer_like_any(client: txmq.Client, producer: txmq.Producer) -> None:
    plain = client.producer(timeout=30.0)
    assert plain.send("t", b"0", b"k").partition == producer.send("t", b"1", b"k").partition
    assert {producer.send("t", b"any").partition for _ in range(PARTITIONS)} == set(range(PARTITIONS))
    placed = producer.send("t", b"there", b"k", partition=3, headers={"h": b"1"}, tag="red", timeout=5.0)
    assert (placed.partition, placed.status) == (3, ACKNOWLEDGED)
    assert placed.offset is not None
    (message,) = client.fetch("t", 3, placed.offset)
    assert (message.value, message.key, message.headers["h"], message.tag) == (b"there", b"k", b"1", "red")
    assert producer.send_async("t", b"later").result(30.0).status is ACKNOWLEDGED
    results = producer.send_many("t", [(b"%d" % number, b"%d" % number) for number in range(20)])
    for number, result in enumerate(results):
        assert result.offset is not None
        assert client.fetch("t", result.partition, result.offset)[0].value == b"%d" % number
    assert (producer.spooled, list(producer.parked())) == (0, [])


def test_unsent_messages_are_kept_and_sent_later_in_order(
    shared_broker: BrokerProcess, client: txmq.Client, producer: txmq.Producer
) -> None:
    sent = [producer.send("t", b"0", b"k")]
    shared_broker.kill()
    sent += [producer.send("t", b"%d" % number, b"k") for number in range(1, 10)]
    sent += [producer.send_async("t", b"10", b"k").result(0)]
    sent += producer.send_many("t", [(b"k", b"%d" % number) for number in range(11, 20)])
    assert [result.status for result in sent] == [ACKNOWLEDGED] + 19 * [SPOOLED]
    assert {result.offset for result in sent[1:]} == {None}
    assert producer.spooled == 19
    with pytest.raises(txmq.errors.RequestTimeoutError):
        producer.flush(timeout=0.1)
    shared_broker.start()
    eventually(lambda: producer.spooled == 0, "it is sent in the background")
    sent.append(producer.send("t", b"20", b"k"))
    assert (sent[-1].status, sent[-1].offset) == (ACKNOWLEDGED, 20)
    assert arrived(client)[sent[0].partition] == [b"%d" % number for number in range(21)]


_THREADS = """
import os, sys, txmq
client = txmq.connect(sys.argv[1], lazy=True)
producer = client.producer(retry_store=sys.argv[2], timeout=30.0)
for number in range(5):
    assert producer.send("t", b"%d" % number, b"k").status is txmq.SendStatus.SPOOLED
os.kill(os.getpid(), 9)
"""
_LOOP = """
import asyncio, os, sys, txmq, txmq.aio

async def main():
    client = await txmq.aio.connect(sys.argv[1], lazy=True)
    producer = client.producer(retry_store=sys.argv[2], timeout=30.0)
    for number in range(5):
        assert (await producer.send("t", b"%d" % number, b"k")).status is txmq.SendStatus.SPOOLED
    os.kill(os.getpid(), 9)

asyncio.run(main())
"""


@pytest.mark.threads
@pytest.mark.parametrize("program", [_THREADS, _LOOP], ids=["threads", "loop"])
def test_kept_messages_survive_their_process_and_next_one_sends_them(
    shared_broker: BrokerProcess, client: txmq.Client, tmp_path: Path, program: str
) -> None:
    store = str(tmp_path / "store")
    with client.producer(retry_store=store, timeout=30.0) as first:
        place = first.send("t", b"first", b"k").partition
    shared_broker.kill()
    done = subprocess.run([sys.executable, "-c", program, shared_broker.address, store], check=False, timeout=60)
    assert done.returncode == -9
    shared_broker.start()
    with client.producer(retry_store=store, timeout=30.0) as following:
        assert following.send("t", b"5", b"k").is_success
        following.flush(timeout=60.0)
    assert arrived(client)[place] == [b"first", *(b"%d" % number for number in range(6))]


def test_inside_a_transaction_it_joins_and_a_failure_is_told(
    shared_broker: BrokerProcess, client: txmq.Client, producer: txmq.Producer
) -> None:
    with producer.transaction() as tx:
        assert producer.send("t", b"in", b"k").status is PENDING
        assert [result.status for result in producer.send_many("t", [(b"k", b"too")])] == [PENDING]
    assert tx.outcome is txmq.Outcome.COMMITTED

    def without_a_broker() -> None:
        with producer.transaction(timeout=1.0):
            producer.send("t", b"lost", b"k")
            shared_broker.kill()

    with pytest.raises(txmq.errors.TransactionError):
        without_a_broker()
    assert producer.spooled == 0
    assert producer.send("t", b"kept", b"k").status is SPOOLED
    shared_broker.start()
    producer.flush(timeout=60.0)
    assert [value for values in arrived(client).values() for value in values] == [b"in", b"too", b"kept"]


def test_what_is_refused_for_good_is_told_and_not_kept(client: txmq.Client, producer: txmq.Producer) -> None:
    with pytest.raises(txmq.errors.TooLargeError):
        producer.send("t", bytes(20 << 20))
    with pytest.raises(txmq.UnknownTopicError):
        producer.send("absent", b"x")
    with pytest.raises(txmq.errors.LocalProtocolError):
        producer.send("t", b"x", partition=PARTITIONS)
    with pytest.raises(TypeError):
        producer.send_many("t", [(None, "text")])  # type: ignore[list-item]
    with pytest.raises(txmq.UnknownTopicError):
        producer.send_many("absent", [(None, b"x")])
    assert (producer.spooled, list(client.browse("t"))) == (0, [])


def test_a_failure_in_send_many_says_how_many_are_safe(client: txmq.Client, producer: txmq.Producer) -> None:
    with pytest.raises(txmq.errors.TooLargeError) as caught:
        producer.send_many("t", [(b"k", b"small"), (b"k", bytes(20 << 20)), (b"k", b"small, too")])
    assert "2 of 3" in caught.value.__notes__[0]
    assert sorted(values for values in arrived(client).values() if values) == [[b"small", b"small, too"]]


def test_a_closed_topic_is_waited_for(client: txmq.Client, producer: txmq.Producer) -> None:
    client.topics.alter("t", accept_publish=False)
    assert producer.send("t", b"0", b"k").status is SPOOLED
    client.topics.alter("t", accept_publish=True)
    producer.flush(timeout=60.0)
    assert [value for values in arrived(client).values() for value in values] == [b"0"]


def test_a_store_has_one_owner_and_nothing_lingers_in_memory(client: txmq.Client, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    with client.producer(retry_store=store, timeout=30.0) as producer:
        with pytest.raises(txmq.errors.DirectoryInUseError):
            client.producer(retry_store=store, timeout=30.0)
        with pytest.raises(txmq.errors.ConfigError, match="linger_ms, max_in_flight"):
            client.producer(retry_store=str(tmp_path / "other"), linger_ms=5, max_in_flight=2)
    with pytest.raises(txmq.errors.ClosedError):
        producer.send("t", b"x")
    with client.producer(retry_store=store, timeout=30.0) as again:
        assert again.send("t", b"x").is_success


@pytest.mark.threads
def test_the_command_line_shows_what_is_kept_and_drains_it(
    shared_broker: BrokerProcess, client: txmq.Client, tmp_path: Path
) -> None:
    store = str(tmp_path / "store")
    with client.producer(retry_store=store, timeout=30.0) as producer:
        producer.send("t", b"0", b"k")
        shared_broker.kill()
        producer.send_many("t", [(b"k", b"1"), (b"k", b"2")])
    command = [sys.executable, "-m", "txmq.cli.main", "spool"]
    shown = subprocess.run([*command, "show", store, "--json"], capture_output=True, text=True, check=True, timeout=60)
    assert [row["value"] for row in json.loads(shown.stdout)] == ["1", "2"]
    shared_broker.start()
    drain = [*command, "drain", store, "--bootstrap", shared_broker.address, "--json"]
    drained = subprocess.run(drain, capture_output=True, text=True, check=True, timeout=120)
    assert json.loads(drained.stdout) == {"sent": 2, "parked": 0}
    assert [value for values in arrived(client).values() for value in values] == [b"0", b"1", b"2"]


class Name(enum.StrEnum):
    SHOP = "shop"


class Token(bytes):
    pass


Headers = Mapping[str, bytes]
Send = Callable[[bytes, Headers], object]


@contextmanager
def _odd_sender(client: txmq.Client, store: str, kind: str) -> Iterator[Send]:
    if kind == "ordered":
        with client.ordered_producer(txmq.KeyHashSelector(), store) as ordered:
            yield lambda value, headers: ordered.send("t", value, b"k", headers=headers)
        return
    with client.producer(
        retry_store=store if kind == "retrying" else None, timeout=30.0, group="odd",
        checker=lambda _: txmq.Resolution.UNKNOWN,
    ) as producer:  # fmt: skip

        def in_block(value: bytes, headers: Headers) -> None:
            with producer.transaction():
                producer.send("t", value, b"k", headers=headers)

        yield {
            "block": in_block,
            "half": lambda value, headers: producer.half("t", value, b"k", headers=headers).commit(),
        }.get(kind, lambda value, headers: producer.send("t", value, b"k", headers=headers))


@pytest.mark.parametrize("kind", ["plain", "retrying", "ordered", "block", "half"])
def test_an_odd_header_is_stored_or_fails_alone(client: txmq.Client, tmp_path: Path, kind: str) -> None:
    with _odd_sender(client, str(tmp_path / "store"), kind) as send:
        send(b"1", {Name.SHOP: b"a"})
        send(b"2", {"shop": Token(b"b")})
        with pytest.raises(LocalProtocolError, match="UTF-8"):
            send(b"3", {"\ud800": b"c"})
        send(b"4", {})
    found = [(message.value, message.headers) for message in client.browse("t")]
    assert found == [(b"1", {"shop": b"a"}), (b"2", {"shop": b"b"}), (b"4", {})]
