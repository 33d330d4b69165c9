"""Quotas at a real broker: the rate is held by waiting, nothing is refused, and nobody else waits."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path

import pytest

import txmq
from txmq.broker.shell.throttle import BURST_S
from txmq.client.admin.cluster import Users
from txmq.client.consumer.consumer import Consumer
from txmq.errors import BrokerAwayError, RolledBackError
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess

from .wire import Wire

RATE = 1_000_000
VALUE = random.Random(7).randbytes(10_000)  # is not compressed
HELD_S, TRIES_MAX = 4.0, 5
OUTSTANDING = 30
LOGIN_S = 3.0  # for a login on a busy machine
OPTIONS = txmq.ConsumerOptions(heartbeat_interval=0.2, session_timeout=3.0)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("quotas") / "data") as running, txmq.connect(running.address) as client:
        users = Users(client.control, client.timeout)
        users.add("ops", "pencil")
        with _connected(running, "ops") as ops:
            Users(ops.control, ops.timeout).add("shop", "pencil")
            # Permissions are tests of their own.
            Users(ops.control, ops.timeout).acl("grant", "shop", {"cluster": None})
        yield running


@pytest.fixture
def ops(broker: BrokerProcess) -> Iterator[txmq.Client]:
    with _connected(broker, "ops") as client:
        yield client
        for kind, name in (("user", "shop"), ("topic", "limited")):
            _limit(client, kind, name)


def _connected(broker: BrokerProcess, user: str, timeout: float = 30.0) -> txmq.Client:
    return txmq.connect(broker.address.replace("://", f"://{user}@"), password="pencil", timeout=timeout)


def _limit(ops: txmq.Client, kind: str, name: str, **limits: int) -> None:
    ops.control.call("quota", "set" if limits else "remove", kind, name, extensions=limits or None, timeout=60.0)


def _stored(ops: txmq.Client, topic: str) -> int:
    """Bytes of values that are in a topic."""
    return ops.offsets(topic, 0).end * len(VALUE)


class Flood:
    """A producer that sends as much as it may, until the block ends."""

    def __init__(self, client: txmq.Client, topic: str) -> None:
        self._client, self._topic = client, topic
        self._is_over, self._thread = threading.Event(), threading.Thread(target=self._send)

    def __enter__(self) -> Flood:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _send(self) -> None:
        with self._client.producer() as producer:
            waiting = deque[Future[txmq.SendResult]]()
            while not self._is_over.is_set():
                waiting.append(producer.send_async(self._topic, VALUE, timeout=60.0))
                if len(waiting) >= OUTSTANDING:
                    waiting.popleft().result(60.0)


def _delayed(ops: txmq.Client) -> int:
    """How many requests and reads have waited."""
    figures = dict(line.split(" ", 1) for line in ops.stats().splitlines())
    return int(figures["delayed_by_quota"])


def _generation(ops: txmq.Client, group: str) -> int:
    [row] = ops.groups.describe(group)["partitions"]
    return int(row["generation"])


def test_rate_is_held_and_heartbeats_come_in_time(broker: BrokerProcess, ops: txmq.Client) -> None:
    for topic in ("limited", "seen"):
        ops.topics.ensure(topic)
    _limit(ops, "user", "shop", bytes_per_s=RATE)
    with (
        _connected(broker, "shop") as shop,
        shop.consumer("watchers", ["seen"], options=OPTIONS) as consumer,
        ops.consumer("beside", ["seen"], options=OPTIONS) as beside,
    ):
        members = {"watchers": consumer, "beside": beside}
        with Flood(shop, "limited"):
            eventually(lambda: _delayed(ops) > 0, "the first burst is over")
            for _ in range(TRIES_MAX):
                kept = _held(ops, members)
                if kept["watchers"]:
                    return
                assert not kept["beside"], "who has a quota lost its partition, and who has none kept it"
    pytest.fail(f"{TRIES_MAX} times both lost their partitions")


def _held(ops: txmq.Client, members: dict[str, Consumer]) -> dict[str, bool]:
    """Hold the rate for a while; whose partition was its own all the time. A machine that is busy takes both."""
    for consumer in members.values():
        eventually(lambda: consumer.poll(timeout=0.1) or consumer.assignment, "it has its partition")  # noqa: B023  called here
    generations = {group: _generation(ops, group) for group in members}
    begun_s, before = time.monotonic(), _stored(ops, "limited")
    while time.monotonic() - begun_s < HELD_S:
        for consumer in members.values():
            consumer.poll(timeout=0.1)
    stored, elapsed_s = _stored(ops, "limited") - before, time.monotonic() - begun_s
    assert stored <= RATE * (elapsed_s + BURST_S + 0.1) * 1.1  # what nobody took before may be taken at once
    assert stored >= RATE * elapsed_s / 2  # 1.0 on a quiet machine
    return {group: _generation(ops, group) == generation for group, generation in generations.items()}


def test_nobody_else_waits_and_no_end_of_a_transaction(broker: BrokerProcess, ops: txmq.Client) -> None:
    for topic in ("limited", "free"):
        ops.topics.ensure(topic)
    _limit(ops, "user", "shop", bytes_per_s=10_000)
    before = _delayed(ops)
    with (
        _connected(broker, "shop") as shop,
        shop.producer(group="halves", checker=lambda _message: txmq.Resolution.UNKNOWN) as producer,
        ops.producer() as other,
    ):
        half = producer.half("free", b"begun before")

        def waited() -> bool:
            return producer.send("limited", VALUE, timeout=60.0).is_success and _delayed(ops) > before

        eventually(waited, "the quota counts")
        assert producer.send_async("limited", VALUE * 100, timeout=60.0).result(60.0).is_success
        last = producer.send_async("limited", VALUE, timeout=600.0)  # the one before is paid for in 100 s
        half.commit()
        for _ in range(10):
            with pytest.raises(RolledBackError, match="a quota is used up") as refused, producer.transaction() as tx:
                tx.send("free", b"the same producer's")
            assert refused.value.retriable
            shop.topics.describe("free")
            other.send("free", b"of another user")
        assert not last.done()
        _limit(ops, "user", "shop")
        assert last.result(60.0).is_success
        with producer.transaction() as tx:
            tx.send("free", b"the same producer's")
        assert tx.outcome is txmq.Outcome.COMMITTED


def test_reader_over_its_quota_gets_everything_later(broker: BrokerProcess, ops: txmq.Client) -> None:
    ops.topics.ensure("read")
    with ops.producer() as producer:
        producer.send_many("read", [(None, b"%08d" % number + VALUE) for number in range(100)])
    _limit(ops, "user", "shop", bytes_per_s=RATE)
    with _connected(broker, "shop") as shop:

        def browsed() -> list[bytes]:
            return [(message.value or b"")[:8] for message in shop.browse("read")]

        before = _delayed(ops)
        eventually(lambda: browsed() and _delayed(ops) > before, "the first burst is over")
        begun_s = time.monotonic()
        for _ in range(3):
            assert browsed() == [b"%08d" % number for number in range(100)]
        # Three megabytes; a burst may be saved up before, and the last read, of one at most, is paid for later.
        assert time.monotonic() - begun_s >= 3.0 - BURST_S - 1.0 - 0.1


def test_topic_may_be_limited_and_let_go_again(ops: txmq.Client) -> None:
    ops.topics.ensure("limited")
    ops.topics.ensure("free")
    _limit(ops, "topic", "limited", requests_per_s=1)
    before = _delayed(ops)
    with ops.producer() as first, ops.producer() as other:

        def waited() -> bool:
            return first.send("limited", VALUE, timeout=60.0).is_success and _delayed(ops) > before

        eventually(waited, "the quota counts")
        end = ops.offsets("limited", 0).end
        waiting = [first.send_async("limited", VALUE, timeout=60.0) for _ in range(20)]
        other.send("free", b"does not wait")
        _limit(ops, "topic", "limited")
        assert [future.result(30.0).offset for future in waiting] == [*range(end, end + 20)]


def test_connections_of_a_user_are_limited(broker: BrokerProcess, ops: txmq.Client) -> None:
    _limit(ops, "user", "shop", connections_max=1)
    eventually(lambda: _connects(broker), "those of the test before are gone")
    with _connected(broker, "shop") as shop:
        with pytest.raises(BrokerAwayError, match="connections_max 1 of user shop is reached"):
            _connected(broker, "shop", timeout=LOGIN_S).close()
        shop.ping()
    with _connected(broker, "ops") as other:
        other.ping()
    eventually(lambda: _connects(broker), "room is given back")


def _connects(broker: BrokerProcess) -> bool:
    try:
        _connected(broker, "shop", timeout=LOGIN_S).close()
    except BrokerAwayError:
        return False
    return True


def test_addresses_that_come_too_often_are_refused(tmp_path: Path) -> None:
    with (
        BrokerProcess(tmp_path / "data", settings={"connects_per_address_per_s_max": 1}) as limited,
        ExitStack() as stack,
    ):
        clients = [stack.enter_context(txmq.connect(limited.address)) for _ in range(10)]

        def refused() -> bool:
            wire = stack.enter_context(Wire(limited))
            wire.send(b"ping 1\r\n")
            [(code, _, body)] = wire.hear(1).answers
            return code == 503 and b"connects_per_address_per_s_max 1 is exceeded by 127.0.0.1" in body

        eventually(refused, "the address comes too often")
        assert all(client.stats() for client in clients)
