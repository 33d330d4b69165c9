"""Local transactions: one thread, many threads, and a raw generator."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from bench.model import Bound, Measure, Row, Surroundings
from bench.rows.client import PARTITIONS, TOPIC
from txmq.protocol.transaction_bodies import encode_branch
from txmq.testing.bench import loads
from txmq.testing.bench.limits import SYNC, SYNCED_ECHO, cpu_seconds
from txmq.testing.bench.model import LATENCY_UNITS, Target
from txmq.testing.bench.raw import RawConnection, chunked, message_of
from txmq.testing.bench.timing import one_processor
from txmq.testing.processes.broker import BrokerProcess
from txmq.xid import TxId

IN_FLIGHT, THREADS = 64, 64
_UUID = b"00112233445566778899aabbccddeeff"
_BRANCH = encode_branch(
    "bench", _UUID.decode(), {"bqual": "b", "connection": None, "wrote": True, "marker": True, "table": "txmq_marker"}
)


@contextmanager
def _one_thread(surroundings: Surroundings) -> Iterator[Measure]:
    count = surroundings.count(5000)
    with BrokerProcess(surroundings.directory / "data") as broker, loads.tx_local(Target(broker.address)) as run:
        run(count // 10)
        yield lambda: run(count)


@contextmanager
def _many_threads(surroundings: Surroundings) -> Iterator[Measure]:
    """As the system spreads the threads, then all on one processor: they take turns at the interpreter anyway."""
    count = surroundings.count(40_000)
    with (
        BrokerProcess(surroundings.directory / "data") as broker,
        loads.tx_threads(Target(broker.address, threads=THREADS)) as run,
    ):

        def measure() -> dict[str, float]:
            spread = run(count)["rate"]
            with one_processor():
                figures = run(count)
            return {**figures, "rate, spread": spread}

        yield measure


@contextmanager
def _raw(surroundings: Surroundings, requests_of: Callable[[TxId, int, bytes], Iterable[bytes]]) -> Iterator[Measure]:
    """Transactions of a session of the generator's own, computed before the clock starts."""
    count = surroundings.count(100_000)
    batch = message_of(200)
    with BrokerProcess(surroundings.directory / "data") as broker:

        def measure() -> dict[str, float]:
            with RawConnection(broker.host, broker.port) as connection:
                if not measured:
                    connection.create_topic(TOPIC, PARTITIONS)
                measured.append(True)
                # An eighth a write: the generator never waits for a full window.
                chunks = chunked(requests_of(open_session(connection), count, batch), IN_FLIGHT // 8)
                used_s = cpu_seconds(broker.pid)
                took_s = connection.pipeline(chunks, IN_FLIGHT)
                return {"rate": count / took_s, "broker CPU": (cpu_seconds(broker.pid) - used_s) / count * 1e6}

        measured: list[bool] = []
        yield measure


def open_session(connection: RawConnection) -> TxId:
    """Open a session; the transaction id before its first one."""
    answered = json.loads(connection.ask(b"hello 1 bench session=new 1\r\n").partition(b"\r\n")[2])
    return TxId(int(answered["cluster"], 16), int(answered["home"], 16), int(answered["session"], 16), 0)


def commits(session: TxId, count: int, batch: bytes, partitions: Sequence[int] = range(PARTITIONS)) -> Iterator[bytes]:
    """Local transactions of one message, over the partitions in turn."""
    for number in range(1, count + 1):
        part, floor = _part(number, batch, partitions), max(0, number - IN_FLIGHT - 1)
        words = str(session._replace(counter=number)).encode(), floor, len(part), number, part
        yield b"commit %b floor=%d %d %x\r\n%b" % words


def _decides(session: TxId, count: int, batch: bytes) -> Iterator[bytes]:
    """Decisions of XA transactions with one branch, each followed by ``complete`` of one whose decision is answered."""
    for number in range(1, count + IN_FLIGHT + 1):
        if number <= count:
            body, floor = _BRANCH + _part(number, batch, range(PARTITIONS)), max(0, number - 2 * IN_FLIGHT)
            words = str(session._replace(counter=number)).encode(), floor, len(body), number, body
            yield b"decide %b branches=1 floor=%d %d %x\r\n%b" % words
        decided = number - IN_FLIGHT
        if decided > 0:
            yield b"complete %b uuid=%b c%x\r\n" % (str(session._replace(counter=decided)).encode(), _UUID, decided)


def _part(number: int, batch: bytes, partitions: Sequence[int]) -> bytes:
    return b"%b %d %d\r\n%b" % (TOPIC.encode(), partitions[number % len(partitions)], len(batch), batch)


ROWS = (
    Row(
        "tx-local", "local transactions of one message, one thread", _one_thread,
        {"rate": "tx/s"} | LATENCY_UNITS,
        (
            Bound("rate", 5000, "tx/s", best=lambda bare, _: 1000 / bare[SYNCED_ECHO]),
            Bound("p50", 0.2, "ms", at_least=False, best=lambda bare, _: bare[SYNCED_ECHO]),
        ),
        (SYNCED_ECHO,),
    ),
    Row(
        "tx-raw", f"local transactions, {IN_FLIGHT} in flight, raw generator",
        partial(_raw, requests_of=commits), {"rate": "tx/s", "broker CPU": "us/tx"},
        (Bound("rate", 60_000, "tx/s"),), (SYNC,),
    ),
    Row(
        "tx-decide", f"XA: decide and complete of one branch, {IN_FLIGHT} in flight, raw generator",
        partial(_raw, requests_of=_decides), {"rate": "tx/s", "broker CPU": "us/tx"}, (), (SYNC,),
    ),
    Row(
        "tx-threads", f"local transactions, {THREADS} threads of one process: on one processor (taskset), and spread",
        _many_threads,
        {"rate": "tx/s"} | LATENCY_UNITS | {"rate, spread": "tx/s"},
        (Bound("rate", 20_000, "tx/s"),), (SYNC,),
    ),
)  # fmt: skip
