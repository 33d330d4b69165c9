"""Three brokers against one, and transactions over two homes against those of one.

All of them share this machine: three brokers have no more processors than one has, and three journals to force.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

import txmq
from bench.model import Bound, Measure, NotInstalledError, Row, Surroundings
from bench.rows.client import TOPIC, VALUE
from bench.rows.put import OUTSTANDING
from bench.rows.transactions import IN_FLIGHT, commits, open_session
from txmq.testing.bench.limits import SYNC, SYNCED_ECHO
from txmq.testing.bench.model import latencies
from txmq.testing.bench.raw import RawConnection, chunked, message_of, put_requests
from txmq.testing.bench.timing import timed
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.cluster import Cluster
from txmq.testing.processes.zookeeper import Ensemble, ZooKeeperFailedError

BROKERS, PARTITIONS_OF_EACH = 3, 2
PER_CHUNK = 128


class _Part(NamedTuple):
    """A connection to a broker, and the partitions that it leads."""

    connection: RawConnection
    partitions: Sequence[int]


_Chunks = list[tuple[bytes, int]]
_Requests = Callable[[_Part, int], _Chunks]


def _puts(part: _Part, count: int) -> _Chunks:
    return put_requests(TOPIC, message_of(200), count, part.partitions, PER_CHUNK)


def _commits(part: _Part, count: int) -> _Chunks:
    requests = commits(open_session(part.connection), count, message_of(200), part.partitions)
    return chunked(requests, IN_FLIGHT // 8)


@contextmanager
def _cluster(surroundings: Surroundings) -> Iterator[Cluster]:
    directory = surroundings.directory
    with ExitStack() as stack:
        try:
            ensemble = stack.enter_context(Ensemble(directory / "zookeeper"))
        except ZooKeeperFailedError as error:
            raise NotInstalledError(str(error)) from error
        yield stack.enter_context(Cluster(directory / "cluster", ensemble, size=BROKERS))


@contextmanager
def _beside_one(
    surroundings: Surroundings, *, requests_of: _Requests, outstanding: int, full: int
) -> Iterator[Measure]:
    count = surroundings.count(full) // BROKERS * BROKERS
    with _cluster(surroundings) as cluster, BrokerProcess(surroundings.directory / "alone") as alone:
        for address in (alone.address, cluster.address):
            with txmq.connect(address) as client:
                client.topics.create(TOPIC, partitions=BROKERS * PARTITIONS_OF_EACH)

        def measure() -> dict[str, float]:
            one = _rate([alone], requests_of, count, outstanding)
            three = _rate(cluster.brokers, requests_of, count, outstanding)
            return {"one broker": one, "three brokers": three, "share": three / one * 100}

        yield measure


def _rate(brokers: Sequence[BrokerProcess], requests_of: _Requests, count: int, outstanding: int) -> float:
    """So many requests, each of the brokers taking an equal part at the same time; how many a second."""
    with ExitStack() as stack:
        parts = [_part(stack.enter_context(RawConnection(broker.host, broker.port))) for broker in brokers]
        chunks = [requests_of(part, count // len(parts)) for part in parts]  # before the clock starts
        each = outstanding // len(parts)
        threads = [
            threading.Thread(target=part.connection.pipeline, args=(of_part, each))
            for part, of_part in zip(parts, chunks, strict=True)
        ]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return count / (time.perf_counter() - started)


def _part(connection: RawConnection) -> _Part:
    own = json.loads(connection.ask(b"hello 1 bench 1\r\n").partition(b"\r\n")[2])["home"]
    (topic,) = json.loads(connection.ask(b"meta %b 2\r\n" % TOPIC.encode()).partition(b"\r\n")[2])["topics"]
    homes = topic.get("homes") or [own] * topic["partitions"]  # a broker that is alone has all
    return _Part(connection, [number for number, home in enumerate(homes) if home == own])


@contextmanager
def _two_homes(surroundings: Surroundings) -> Iterator[Measure]:
    """Transactions of two messages in two partitions, by one thread of the Python client."""
    count = surroundings.count(2000)
    with _cluster(surroundings) as cluster, txmq.connect(cluster.address) as client, client.producer() as producer:
        client.topics.create(TOPIC, partitions=BROKERS * PARTITIONS_OF_EACH)
        homes = [client.routes.link_for(TOPIC, number).home for number in range(BROKERS * PARTITIONS_OF_EACH)]
        together = next(number for number in range(1, len(homes)) if homes[number] == homes[0])
        apart = next(number for number in range(1, len(homes)) if homes[number] != homes[0])

        def work(other: int) -> None:
            with producer.transaction() as tx:
                tx.send(TOPIC, VALUE, b"key", partition=0)
                tx.send(TOPIC, VALUE, b"key", partition=other)

        def measure() -> dict[str, float]:
            one, two = (latencies(timed(partial(work, other), count)) for other in (together, apart))
            return {
                "one home": one["p50"],
                "two homes": two["p50"],
                "p99": two["p99"],
                "times": two["p50"] / one["p50"],
            }

        measure()  # sessions are open
        yield measure


def _row(name: str, title: str, requests_of: _Requests, outstanding: int, full: int, unit: str) -> Row:
    return Row(
        name, f"{title}: one broker, and three beside a ZooKeeper, {outstanding} outstanding in all",
        partial(_beside_one, requests_of=requests_of, outstanding=outstanding, full=full),
        {"one broker": unit, "three brokers": unit, "share": "%"}, (Bound("share", 75, "%"),), (SYNC,),
    )  # fmt: skip


ROWS = (
    _row("cluster-put", "pipelined put, 200 B", _puts, OUTSTANDING, 200_000, "msg/s"),
    _row("cluster-tx", "local transactions, raw generator", _commits, IN_FLIGHT * BROKERS, 60_000, "tx/s"),
    Row(
        "cluster-tx-two-homes", "transactions of two messages, one thread: of one home, and over two homes",
        _two_homes, {"one home": "ms", "two homes": "ms", "p99": "ms", "times": "x"},
        (Bound("times", 2.5, "x", at_least=False),), (SYNCED_ECHO,),
    ),
)  # fmt: skip
