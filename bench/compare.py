"""What a change costs synchronous callers: the same work in two checkouts, in turns.

    python -m bench.compare /path/to/before . --rounds 9 --works put transaction

Theory of operation. A worker for each checkout runs in a process of its own with that checkout in ``PYTHONPATH`` and
that checkout's broker, and does slices of work as it is told. Slices of a fraction of a second alternate A B, B A, so
that what a shared machine does befalls both alike. Processor time stays comparable where rates do not: the verdict is
the median of the ratios of rounds, each of which sums its slices. Workers use names that are public in both checkouts.
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import txmq

TOPIC, READ_TOPIC, VALUE = "compare", "compare-read", b"x" * 100
_COUNTS = {"put": 400, "transaction": 300, "send_many": 40_000, "browse": 60_000, "poll": 60_000, "run": 60_000}
_PAIRS = 10_000  # of one ``send_many``
_SLICES = 6  # a round
_TIMEOUT_S = 240.0

Times = Mapping[str, float]  # processor time: client, broker
Found = dict[str, list[tuple[Times, Times]]]  # by work


def work_as_told(directory: Path) -> None:
    """In a worker: a slice of the work that each line names, with the ``txmq`` that is imported."""
    import txmq
    from txmq.testing.processes.broker import BrokerProcess

    with BrokerProcess(directory / "data") as broker, txmq.connect(broker.address, timeout=60) as client:
        pid = broker.pid
        assert pid is not None
        for topic in (TOPIC, READ_TOPIC):
            client.topics.create(topic, partitions=4)
        for number, line in enumerate(sys.stdin):
            name = line.strip()
            if number == 0:
                _fill(client)
            own, brokers = _own_seconds(), broker_seconds(pid)
            _WORKS[name](client, _COUNTS[name], f"group-{number}")
            times = {"client": _own_seconds() - own, "broker": broker_seconds(pid) - brokers}
            print(json.dumps(times), flush=True)


def _own_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)  # threads that ended included
    return used.ru_utime + used.ru_stime


def broker_seconds(pid: int) -> float:
    """Processor time of the threads of a process that live, to the nanosecond."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def _fill(client: txmq.Client) -> None:
    with client.producer() as producer:
        for _ in range(-(-_COUNTS["browse"] // _PAIRS)):
            producer.send_many(READ_TOPIC, _pairs(_PAIRS))


def _pairs(count: int) -> list[tuple[bytes, bytes]]:
    return [(b"%d" % number, VALUE) for number in range(count)]


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
    for first in range(0, count, _PAIRS):
        producer.send_many(TOPIC, _pairs(min(_PAIRS, count - first)))


def _browse(client: txmq.Client, count: int, _: str) -> None:
    seen = 0
    for message in client.browse(READ_TOPIC):
        seen += len(message.value or b"") > 0
        if seen == count:
            return


def _poll(client: txmq.Client, count: int, group: str) -> None:
    with client.consumer(group, [READ_TOPIC], start="earliest") as consumer:
        seen = 0
        while seen < count:
            for message in consumer.poll(1000):
                message.ack()
                seen += 1


def _run(client: txmq.Client, count: int, group: str) -> None:
    seen = 0
    with client.consumer(group, [READ_TOPIC], start="earliest") as consumer:

        def handle(_: txmq.Message) -> None:
            nonlocal seen
            seen += 1
            if seen == count:
                consumer.close()

        consumer.run(handle)


_WORKS: Mapping[str, Callable[[txmq.Client, int, str], None]] = {
    "put": _put, "transaction": _transaction, "send_many": _send_many, "browse": _browse, "poll": _poll, "run": _run,
}  # fmt: skip


class Worker:
    """A process that works with one checkout."""

    def __init__(self, checkout: Path, directory: Path) -> None:
        environment = os.environ | {"PYTHONPATH": str(checkout.absolute()), "PYTHONSAFEPATH": "1"}
        self._checkout = checkout
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).absolute()), "--worker", str(directory)],
            env=environment, cwd=checkout, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def work(self, name: str) -> Times:
        """Do one slice.

        Raises:
            SystemExit: the worker has ended; it said why.
        """
        told, heard = self._process.stdin, self._process.stdout
        assert told is not None
        assert heard is not None
        with suppress(BrokenPipeError):
            told.write(f"{name}\n")
            told.flush()
        line = heard.readline()
        if not line:
            raise SystemExit(f"the worker of {self._checkout} has ended")
        times: Times = json.loads(line)
        return times

    def close(self) -> None:
        """Let it and its broker end."""
        with suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._process.communicate(timeout=_TIMEOUT_S)
        self._process.kill()
        self._process.wait()


def compared(workers: Sequence[Worker], works: Sequence[str], rounds: int, found: Found) -> None:
    """Add to ``found`` microseconds for an operation, by work: of each round, before and after."""
    for work in works:
        for worker in workers:
            worker.work(work)  # warms up
    for _ in range(rounds):
        for work in works:
            sums = [{"client": 0.0, "broker": 0.0}, {"client": 0.0, "broker": 0.0}]
            for number in range(_SLICES):
                for side in (0, 1) if number % 2 == 0 else (1, 0):
                    for name, seconds in workers[side].work(work).items():
                        sums[side][name] += 1e6 * seconds / (_COUNTS[work] * _SLICES)
            found[work].append((sums[0], sums[1]))


def table(found: Found) -> str:
    """A line for each work and side."""
    lines = [
        "| processor time of | before, us | after, us | after / before | [lowest, highest] |",
        "|---|---|---|---|---|",
    ]
    for work, pairs in found.items():
        for side in ("client", "broker", "both"):
            figures = [(_figure(one, side), _figure(two, side)) for one, two in pairs]
            ratios = [two / one for one, two in figures if one]
            if ratios:
                before, after = (statistics.median(column) for column in zip(*figures, strict=True))
                spread = f"[{min(ratios):.3f}, {max(ratios):.3f}]"
                middle = statistics.median(ratios)
                lines.append(f"| {work}, {side} | {before:.3g} | {after:.3g} | {middle:.3f} | {spread} |")
    return "\n".join(lines)


def _figure(times: Mapping[str, float], side: str) -> float:
    return sum(times.values()) if side == "both" else times[side]


def main(words: Sequence[str] | None = None) -> int:
    """Compare two checkouts, or be a worker."""
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkouts", nargs="*", type=Path, metavar="CHECKOUT", help="before and after")
    parser.add_argument("--works", nargs="+", choices=list(_WORKS), default=list(_WORKS), help="default: all")
    parser.add_argument("--rounds", type=int, default=9, help="about 10 s each for all works (9)")
    parser.add_argument("--directory", type=Path, default=Path("/var/tmp"), help="on the disk that matters (/var/tmp)")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.worker is not None:
        work_as_told(given.worker)
        return 0
    if len(given.checkouts) != 2:
        parser.error("two checkouts are compared: before and after")
    found: Found = {work: [] for work in given.works}
    with ExitStack() as stack:
        workers = []
        for checkout in given.checkouts:
            own = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=given.directory)))
            workers.append(Worker(checkout, own))
            stack.callback(workers[-1].close)
        try:
            compared(workers, given.works, given.rounds, found)
        except KeyboardInterrupt:
            print("interrupted: what was measured until then", file=sys.stderr)
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
