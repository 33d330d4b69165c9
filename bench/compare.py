"""What a change costs synchronous callers: the same work in two checkouts, in turns.

    python -m bench.compare /path/to/before . --rounds 9 --works put transaction

Theory of operation. A worker runs in a process of its own with one checkout in ``PYTHONPATH``, starts that checkout's
broker, warms up, and tells the processor time of client and broker for each operation. Rounds alternate A B, B A, so
that what a shared machine does befalls both alike. Processor time stays comparable where rates do not: the verdict is
the median of the ratios of pairs. The worker uses names that are public in both checkouts only.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import txmq

TOPIC, VALUE = "compare", b"x" * 100
_COUNTS = {"put": 3000, "transaction": 2500, "send_many": 300_000, "browse": 300_000, "poll": 300_000, "run": 300_000}
_READING = ("browse", "poll", "run")
_PAIR = 10_000  # messages of one ``send_many``
_TIMEOUT_S = 240

Times = Mapping[str, Mapping[str, float]]  # microseconds of processor time for an operation, by work: client, broker


def measured(works: Sequence[str], directory: Path) -> Times:
    """In a worker: all works with the ``txmq`` that is imported."""
    import txmq
    from txmq.testing.bench.limits import cpu_seconds
    from txmq.testing.processes.broker import BrokerProcess

    with BrokerProcess(directory / "data") as broker, txmq.connect(broker.address, timeout=60) as client:
        pid = broker.pid
        assert pid is not None
        client.topics.create(TOPIC, partitions=4)
        _fill(client, max([_COUNTS[work] for work in works if work in _READING], default=0))
        found = {}
        for number, work in enumerate(works):
            count = _COUNTS[work]
            _WORKS[work](client, max(count // 10, 1), f"warm-{number}")
            own, brokers = _own_seconds(), cpu_seconds(pid)
            _WORKS[work](client, count, f"group-{number}")
            found[work] = {
                "client": 1e6 * (_own_seconds() - own) / count, "broker": 1e6 * (cpu_seconds(pid) - brokers) / count,
            }  # fmt: skip
        return found


def _own_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _fill(client: txmq.Client, count: int) -> None:
    _send_many(client, count, "")


def _put(client: txmq.Client, count: int, _: str) -> None:
    producer = client.producer()
    for _number in range(count):
        producer.send(TOPIC, VALUE, key=b"key")


def _transaction(client: txmq.Client, count: int, _: str) -> None:
    producer = client.producer()
    for _number in range(count):
        with producer.transaction():
            producer.send(TOPIC, VALUE, key=b"key")


def _send_many(client: txmq.Client, count: int, _: str) -> None:
    producer = client.producer()
    for first in range(0, count, _PAIR):
        producer.send_many(TOPIC, [(b"%d" % number, VALUE) for number in range(min(_PAIR, count - first))])


def _browse(client: txmq.Client, count: int, _: str) -> None:
    seen = 0
    for message in client.browse(TOPIC):
        seen += len(message.value or b"") > 0
        if seen == count:
            return


def _poll(client: txmq.Client, count: int, group: str) -> None:
    with client.consumer(group, [TOPIC], start="earliest") as consumer:
        seen = 0
        while seen < count:
            for message in consumer.poll(1000):
                message.ack()
                seen += 1


def _run(client: txmq.Client, count: int, group: str) -> None:
    seen = 0
    with client.consumer(group, [TOPIC], start="earliest") as consumer:

        def handle(_: txmq.Message) -> None:
            nonlocal seen
            seen += 1
            if seen == count:
                consumer.close()

        consumer.run(handle)


_WORKS: Mapping[str, Callable[[txmq.Client, int, str], None]] = {
    "put": _put, "transaction": _transaction, "send_many": _send_many, "browse": _browse, "poll": _poll, "run": _run,
}  # fmt: skip


def _of(checkout: Path, works: Sequence[str], directory: Path) -> Times:
    """The figures of one checkout, by a worker of its own."""
    with tempfile.TemporaryDirectory(dir=directory) as own:
        command = [sys.executable, str(Path(__file__).absolute()), "--worker", own, "--works", *works]
        environment = os.environ | {"PYTHONPATH": str(checkout.absolute()), "PYTHONSAFEPATH": "1"}
        done = subprocess.run(
            command, env=environment, cwd=checkout, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    if done.returncode:
        raise SystemExit(f"{checkout}: {done.stderr[-2000:]}")
    told: Times = json.loads(done.stdout.splitlines()[-1])
    return told


def _table(before: Sequence[Times], after: Sequence[Times], works: Sequence[str]) -> str:
    lines = [
        "| processor time of | before, us | after, us | after / before | [lowest, highest] |",
        "|---|---|---|---|---|",
    ]
    for work in works:
        for side in ("client", "broker", "both"):
            pairs = [
                (_figure(one[work], side), _figure(two[work], side)) for one, two in zip(before, after, strict=True)
            ]
            ratios = [two / one for one, two in pairs if one]
            if ratios:
                one, two = (statistics.median(column) for column in zip(*pairs, strict=True))
                spread = f"[{min(ratios):.3f}, {max(ratios):.3f}]"
                lines.append(f"| {work}, {side} | {one:.3g} | {two:.3g} | {statistics.median(ratios):.3f} | {spread} |")
    return "\n".join(lines)


def _figure(times: Mapping[str, float], side: str) -> float:
    return sum(times.values()) if side == "both" else times[side]


def main(words: Sequence[str] | None = None) -> int:
    """Compare two checkouts, or be a worker."""
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkouts", nargs="*", type=Path, metavar="CHECKOUT", help="before and after")
    parser.add_argument("--works", nargs="+", choices=list(_WORKS), default=list(_WORKS), help="default: all")
    parser.add_argument("--rounds", type=int, default=9, help="pairs of measures (9)")
    parser.add_argument("--directory", type=Path, default=Path("/var/tmp"), help="on the disk that matters (/var/tmp)")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.worker is not None:
        print(json.dumps(measured(given.works, given.worker)))
        return 0
    if len(given.checkouts) != 2:
        parser.error("two checkouts are compared: before and after")
    found: tuple[list[Times], list[Times]] = ([], [])
    for number in range(given.rounds):
        started = time.perf_counter()
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            found[side].append(_of(given.checkouts[side], given.works, given.directory))
        print(f"round {number + 1}/{given.rounds}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
    print(_table(*found, given.works))
    return 0


if __name__ == "__main__":
    sys.exit(main())
