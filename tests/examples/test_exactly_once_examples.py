"""The examples of exactly-once run as their texts say: killed, paused, started again, two at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM

import pytest

import txmq
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.mariadb import MariaDB

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WAIT_S = 60.0


@pytest.fixture
def client(shared_broker: BrokerProcess) -> Iterator[txmq.Client]:
    """A client of the broker."""
    with txmq.connect(shared_broker.address) as made:
        yield made


def torment(
    command: list[str],
    progress: Callable[[], int],
    count: int,
    shared_broker: BrokerProcess,
    has_members: Callable[[], bool],
) -> None:
    """Two of the program at a time: killed, paused, replaced, and the broker killed once, until all is done."""
    with ExitStack() as stack:

        def start() -> subprocess.Popen[bytes]:
            child = stack.enter_context(subprocess.Popen(command))
            stack.callback(child.kill)
            return child

        def until_it_moved(child: subprocess.Popen[bytes]) -> None:
            at = progress()
            eventually(lambda: progress() > at or progress() >= count or child.poll() is not None, "it works")
            assert child.poll() is None

        one = start()
        until_it_moved(one)
        one.send_signal(SIGKILL)
        paused = start()
        until_it_moved(paused)
        paused.send_signal(SIGSTOP)
        shared_broker.kill()
        shared_broker.start()
        last = start()
        # Whether it gets anywhere depends on the rows that the paused one has locked.
        eventually(has_members, "the last one has joined")
        paused.send_signal(SIGCONT)
        eventually(lambda: progress() >= count, "everything is done")
        for child in (paused, last):
            child.send_signal(SIGTERM)
            # It may have joined and not yet listen to signals: then it ends of it.
            assert child.wait(WAIT_S) in (0, -SIGTERM)


def has_members(client: txmq.Client, group: str) -> bool:
    """Whether somebody has joined since the broker's start."""
    return any(row["group"] == group and row["members"] for row in client.groups.list())


def test_amounts_are_booked_once(shared_broker: BrokerProcess, client: txmq.Client, mariadb: MariaDB) -> None:
    mariadb.execute("CREATE DATABASE books")
    database = mariadb.connect_arguments() | {"db": "books"}
    client.topics.create("amounts", partitions=4)
    expected: Counter[str] = Counter()
    for number in range(200):
        expected[f"c{number % 7}"] += number
    payments = [(f"c{number % 7}".encode(), b"%d" % number) for number in range(200)]
    client.producer().send_many("amounts", payments)
    mariadb.execute("CREATE TABLE books.totals (customer VARCHAR(40) PRIMARY KEY, amount BIGINT NOT NULL)")

    def booked() -> int:
        return int(mariadb.execute("SELECT COALESCE(SUM(amount), 0) FROM books.totals")[0][0])

    command = [
        sys.executable,
        str(EXAMPLES / "exactly_once_into_mysql.py"),
        json.dumps(database),
        shared_broker.address,
    ]
    torment(command, booked, expected.total(), shared_broker, lambda: has_members(client, "totals"))
    assert {name: int(amount) for name, amount in mariadb.execute("SELECT * FROM books.totals")} == expected
    rows = mariadb.execute("SELECT SUM(next_offset) FROM books.txmq_offset WHERE topic = 'amounts'")
    assert int(rows[0][0]) == 200


def test_each_text_has_one_summary(shared_broker: BrokerProcess, client: txmq.Client) -> None:
    for topic in ("texts", "summaries"):
        client.topics.create(topic, partitions=4)
    texts = [(b"%d" % number, " ".join(["word"] * (number + 1)).encode()) for number in range(200)]
    client.producer().send_many("texts", texts)

    def done() -> int:
        return sum(client.offsets("summaries", partition).end for partition in range(4))

    command = [
        sys.executable,
        str(EXAMPLES / "consume_process_produce.py"),
        "texts",
        "summaries",
        shared_broker.address,
    ]
    torment(command, done, 200, shared_broker, lambda: has_members(client, "summaries"))
    found = Counter(json.loads(message.value or b"")["words"] for message in client.browse("summaries"))
    assert found == Counter(range(1, 201))
