"""Consumer groups: reading through a group against browsing, and how long it takes to share the partitions anew."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count

import txmq
from bench.model import Bound, Measure, Row, Surroundings
from bench.rows.client import PARTITIONS, TOPIC, VALUE
from txmq.testing.bench.limits import LOOPBACK_BYTES
from txmq.testing.bench.loads import PER_CALL, pairs_of
from txmq.testing.processes.broker import BrokerProcess

MANY_PARTITIONS, MEMBERS = 100, 10
PER_POLL = 1000
SHARED_S_MAX, POLL_S = 60.0, 0.005
GROUP_BOUNDS = (Bound("poll", 350_000, "msg/s"), Bound("run", 150_000, "msg/s"))


@contextmanager
def _consume(surroundings: Surroundings) -> Iterator[Measure]:
    wanted = surroundings.count(500_000)
    groups = count()
    with (
        BrokerProcess(surroundings.directory / "data") as broker,
        txmq.connect(broker.address, timeout=60) as client,
        client.producer(timeout=60) as producer,
    ):
        client.topics.create(TOPIC, partitions=PARTITIONS)
        for _ in range(-(-wanted // PER_CALL)):
            producer.send_many(TOPIC, pairs_of(min(wanted, PER_CALL), VALUE))

        def measure() -> dict[str, float]:
            return {
                "poll": wanted / _seconds(lambda: _poll(client, f"poll-{next(groups)}", wanted)),
                "run": wanted / _seconds(lambda: _run(client, f"run-{next(groups)}", wanted)),
                "browse": wanted / _seconds(lambda: _browse(client, wanted)),
            }

        yield measure


def _seconds(work: Callable[[], int]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _poll(client: txmq.Client, group: str, wanted: int) -> int:
    """Every message acknowledged, all offsets saved at the end."""
    seen = 0
    with client.consumer(group, [TOPIC]) as consumer:
        while seen < wanted:
            messages = consumer.poll(PER_POLL)
            for message in messages:
                message.ack()
            seen += len(messages)
    return seen


def _run(client: txmq.Client, group: str, wanted: int) -> int:
    """A listener that does nothing."""
    seen = 0
    with client.consumer(group, [TOPIC]) as consumer:

        def handle(_message: txmq.Message) -> None:
            nonlocal seen
            seen += 1
            if seen == wanted:
                consumer.close()

        consumer.run(handle)
    return seen


def _browse(client: txmq.Client, wanted: int) -> int:
    return sum(1 for _, _ in zip(client.browse(TOPIC), range(wanted), strict=False))


@contextmanager
def _rebalance(surroundings: Surroundings) -> Iterator[Measure]:
    groups = count()
    with BrokerProcess(surroundings.directory / "data") as broker, txmq.connect(broker.address) as client:
        client.topics.create(TOPIC, partitions=MANY_PARTITIONS)
        yield lambda: _shared_anew(client, f"group-{next(groups)}")


def _shared_anew(client: txmq.Client, group: str) -> dict[str, float]:
    """All join at the same time; one leaves; it comes back."""
    with ExitStack() as stack:

        def join() -> txmq.Consumer:
            return stack.enter_context(client.consumer(group, [TOPIC]))

        figures = {}
        started = time.perf_counter()
        members = [join() for _ in range(MEMBERS)]
        figures["all join"] = _until_shared(members, started)
        started = time.perf_counter()
        members.pop().close()
        figures["one leaves"] = _until_shared(members, started)
        started = time.perf_counter()
        members.append(join())
        figures["one joins"] = _until_shared(members, started)
        return figures


def _until_shared(members: list[txmq.Consumer], started: float) -> float:
    """Seconds until every member has its share, no two shares differing by more than one."""
    least, more = divmod(MANY_PARTITIONS, len(members))
    shares = sorted([least + 1] * more + [least] * (len(members) - more))
    while sorted(len(member.assignment) for member in members) != shares:
        if time.perf_counter() - started > SHARED_S_MAX:
            raise TimeoutError(f"not shared after {SHARED_S_MAX:.0f} s: {[len(one.assignment) for one in members]}")
        time.sleep(POLL_S)
    return time.perf_counter() - started


ROWS = (
    Row(
        "consume-group", "read 100 B messages through a group, each acknowledged; browse beside it", _consume,
        {"poll": "msg/s", "run": "msg/s", "browse": "msg/s"}, GROUP_BOUNDS, (LOOPBACK_BYTES,),
    ),
    Row(
        "rebalance", f"share {MANY_PARTITIONS} partitions among {MEMBERS} members", _rebalance,
        {"all join": "s", "one leaves": "s", "one joins": "s"},
    ),
)  # fmt: skip
