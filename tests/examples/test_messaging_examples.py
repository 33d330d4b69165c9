"""The examples of consumers and producers run as their texts say, through kills and restarts."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import txmq
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WAIT_S = 60.0
BACKLOG = 20_000


@pytest.fixture
def client(shared_broker: BrokerProcess) -> Iterator[txmq.Client]:
    """A client of the broker."""
    with txmq.connect(shared_broker.address) as made:
        yield made


class Running:
    """An example in a process of its own; its lines are read as they come, once ``read`` is called."""

    def __init__(self, name: str, *arguments: object) -> None:
        command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)

    def read(self, count: int | None = None) -> None:
        """Read so many lines, and wait for them; or all there will be, from now on."""
        if count is None:
            self._reader.start()
        else:
            assert self.process.stdout is not None
            self.lines.extend(self.process.stdout.readline().rstrip("\n") for _ in range(count))

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(line.rstrip("\n") for line in self.process.stdout)

    def say(self, line: str) -> None:
        """Type a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def end(self, number: signal.Signals = signal.SIGINT) -> int:
        """Have it end; its exit status."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Until it has ended by itself; its exit status."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        status = self.process.wait(WAIT_S)
        if self._reader.is_alive():
            self._reader.join(WAIT_S)
        self.process.stdout.close()
        return status


@contextmanager
def running(name: str, *arguments: object, reads: bool = True) -> Iterator[Running]:
    """The example runs while the block does."""
    program = Running(name, *arguments)
    try:
        if reads:
            program.read()
        yield program
    finally:
        if program.process.poll() is None:
            program.end(signal.SIGKILL)


def test_a_changed_price_is_forgotten_by_every_cache(shared_broker: BrokerProcess, tmp_path: Path) -> None:
    database = tmp_path / "prices.db"
    with (
        running("broadcast_cache.py", database, shared_broker.address) as one,
        running("broadcast_cache.py", database, shared_broker.address) as two,
    ):

        def asked(program: Running, name: str) -> str:
            answers = [line for line in program.lines if line.startswith(f"{name}:")]
            program.say(name)
            eventually(lambda: _answers(program, name) > len(answers), lambda: program.lines)
            return [line for line in program.lines if line.startswith(f"{name}:")][-1]

        assert (asked(one, "tea"), asked(two, "tea")) == ("tea: None", "tea: None")
        for price in (450, 460, 470):
            one.say(f"tea {price}")
            eventually(lambda: asked(two, "tea") == f"tea: {price}", lambda: two.lines)  # noqa: B023  called here
            eventually(lambda: asked(one, "tea") == f"tea: {price}", lambda: one.lines)  # noqa: B023
        eventually(lambda: "changed: tea" in two.lines, lambda: two.lines)
        assert (one.wait(), two.wait()) == (0, 0)


def _answers(program: Running, name: str) -> int:
    return sum(line.startswith(f"{name}:") for line in program.lines)


def test_the_browser_shows_what_is_there_and_ends(shared_broker: BrokerProcess, client: txmq.Client) -> None:
    client.topics.create("browsed", partitions=2)
    producer = client.producer()
    for number in range(100):
        producer.send("browsed", b"%d" % number, key=b"ada" if number % 10 == 0 else b"ben")
    with producer.transaction() as tx:
        producer.send("browsed", b"last", key=b"ada")
    with running("topic_browser.py", "browsed", "", shared_broker.address) as program:
        assert program.wait() == 0
        assert program.lines[-1] == "101 messages shown"
        assert len(program.lines) == 104
    with running("topic_browser.py", "browsed", "ada", shared_broker.address) as program:
        assert program.wait() == 0
        shown = program.lines[2:-1]
        assert [line.split("b'ada' b'")[1].split("'")[0] for line in shown] == [
            *(str(number) for number in range(0, 100, 10)), "last"
        ]  # fmt: skip
        assert shown[-1].endswith(f"in transaction {tx.txid}")
    with running("topic_browser.py", "absent", "", shared_broker.address) as program:
        assert (program.wait(), program.lines) == (1, [])
    assert client.groups.list() == []


def test_what_is_urgent_overtakes_a_backlog(shared_broker: BrokerProcess, client: txmq.Client) -> None:
    for topic in ("urgent", "normal"):
        client.topics.create(topic, partitions=2)
    producer = client.producer()
    producer.send_many("normal", [(b"%d" % number, b"n%d" % number) for number in range(BACKLOG)])
    with running("priority_by_two_topics.py", shared_broker.address, reads=False) as program:
        program.read(1)  # its output is not taken meanwhile, so that it stops in the middle of its backlog
        producer.send_many("urgent", [(b"k", b"u%d" % number) for number in range(50)])
        program.read()
        eventually(lambda: len(program.lines) == BACKLOG + 50, lambda: len(program.lines))
        assert program.end() == 0
    assert len(set(program.lines)) == BACKLOG + 51
    urgent = [number for number, line in enumerate(program.lines) if line.startswith("urgent")]
    assert [program.lines[number] for number in urgent] == [f"urgent: u{number}" for number in range(50)]
    assert urgent[-1] - urgent[0] == 49, "something came between"
    assert urgent[-1] < BACKLOG, "behind the whole backlog"


def test_log_is_shipped_once_in_order_through_kills_and_outages(
    shared_broker: BrokerProcess, client: txmq.Client, tmp_path: Path
) -> None:
    log, spool = tmp_path / "app.log", tmp_path / "spool"
    written: list[bytes] = []

    def write(count: int) -> None:
        with log.open("ab") as file:
            for _ in range(count):
                line = b"line %d" % len(written)
                written.append(line)
                file.write(line + b"\n")

    def rotate() -> None:
        for number in (2, 1, 0):
            source = log.with_name(f"{log.name}.{number}") if number else log
            if source.exists():
                source.rename(log.with_name(f"{log.name}.{number + 1}"))

    def arrived() -> list[bytes | None]:
        return [message.value for message in client.browse("logs")]

    client.topics.create("logs", partitions=4)
    for so_far in (1, 1000):
        write(1000)
        with running("log_shipping.py", log, spool, shared_broker.address) as program:
            eventually(lambda: len(arrived()) > so_far, lambda: program.lines)  # noqa: B023  called here
            program.end(signal.SIGKILL)  # in the middle of it
    with running("log_shipping.py", log, spool, shared_broker.address) as program:
        eventually(lambda: len(arrived()) == 2000, lambda: program.lines)
        write(20)
        rotate()
        write(20)
        eventually(lambda: len(arrived()) == 2040, lambda: program.lines)
        shared_broker.kill()
        write(20)
        rotate()
        write(20)
        eventually(lambda: _spooled(spool) > 0, lambda: "nothing is spooled")
        program.end(signal.SIGKILL)
    write(20)
    rotate()
    write(20)
    shared_broker.start()
    with log.open("ab") as file:
        file.write(b"half a li")
    with running("log_shipping.py", log, spool, shared_broker.address) as program:
        eventually(lambda: len(arrived()) == 2120, lambda: program.lines)
        with log.open("ab") as file:
            file.write(b"ne\n")
        eventually(lambda: len(arrived()) == 2121, lambda: program.lines)
        assert program.end() == 0
        assert program.lines[-1].startswith("stopped; 0 lines")
    assert arrived() == [*written, b"half a line"]


def _spooled(spool: Path) -> int:
    from txmq.client.spooling.spool import Spool

    with Spool(spool, read_only=True) as opened:
        return sum(opened.waiting.values())
