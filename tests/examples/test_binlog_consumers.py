"""Cache and search index of one topic of a binlog sync: right through kills, restarts, and messages that come again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import txmq
from examples.binlog_sync.search import SearchIndex
from tests.examples.test_messaging_examples import EXAMPLES, WAIT_S, Running, running
from tests.services.binlog.replica import Replica
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.mariadb import MariaDB

TABLE = "CREATE TABLE items (id INT PRIMARY KEY, name VARCHAR(40), price DECIMAL(10,2))"


@pytest.fixture(scope="module")
def replica(shared_broker: BrokerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    """A database, and its reader's settings."""
    directory = tmp_path_factory.mktemp("binlog")
    with (
        MariaDB(directory / "db", binary_log=True) as server,
        txmq.connect(shared_broker.address, timeout=WAIT_S) as client,
    ):
        server.execute("CREATE OR REPLACE DATABASE shop")
        yield Replica("b", server, shared_broker, client, directory)


@contextmanager
def following(index: Path, broker: BrokerProcess) -> Iterator[subprocess.Popen[bytes]]:
    """The process that keeps the search index."""
    command = [sys.executable, str(EXAMPLES / "binlog_sync" / "search.py"), "follow", "b.shop.items", str(index)]
    with subprocess.Popen([*command, broker.address]) as child:
        try:
            yield child
        finally:
            child.kill()


def found(index: Path, *words: str) -> list[int]:
    """The ids of the items that it finds."""
    reading = SearchIndex(index)
    try:
        return sorted(json.loads(row)["id"] for row in reading.find(words))
    finally:
        reading.close()


def end_of(index: Path) -> int:
    """How many messages are in it."""
    reading = SearchIndex(index)
    try:
        return int(reading._run("SELECT COALESCE(SUM(next), 0) FROM places")[0][0])
    finally:
        reading.close()


def answer(cache: Running, id_: int) -> str:
    """What the cache says of an item."""
    cache.say(str(id_))
    cache.read(1)
    return cache.lines[-1]


def test_cache_and_index_of_one_topic_follow_the_table(
    replica: Replica, shared_broker: BrokerProcess, tmp_path: Path
) -> None:
    index, topic = tmp_path / "items.db", "b.shop.items"
    database = replica.server.connect_arguments() | {"db": "shop"}

    def messages() -> int:
        return sum(replica.client.offsets(topic, partition).end for partition in range(3))

    with replica.reader():
        replica.execute(TABLE, *(f"INSERT INTO items VALUES ({n}, 'lamp of brass {n}', 9.90)" for n in range(50)))
    with following(index, shared_broker) as child:
        eventually(lambda: end_of(index) > 0, "it has begun", WAIT_S)
        child.send_signal(signal.SIGKILL)
    with running("binlog_sync/cache.py", topic, json.dumps(database), shared_broker.address, reads=False) as cache:
        assert answer(cache, 1) == "lamp of brass 1 9.90 (read)"
        eventually(lambda: "(cached)" in answer(cache, 1), "all partitions are listened to", WAIT_S)
        with replica.reader():
            replica.execute(
                "UPDATE items SET name = 'lamp of steel', price = 8 WHERE id = 1", "DELETE FROM items WHERE id = 2",
                "UPDATE items SET id = 103 WHERE id = 3",
            )  # fmt: skip
        eventually(lambda: answer(cache, 1) == "lamp of steel 8.00 (cached)", lambda: str(cache.lines[-1]), WAIT_S)
        eventually(lambda: answer(cache, 2) == "no such item (cached)", lambda: str(cache.lines[-1]), WAIT_S)
        eventually(lambda: answer(cache, 103) == "lamp of brass 3 9.90 (cached)", lambda: cache.lines[-1], WAIT_S)
        assert cache.wait() == 0
    with following(index, shared_broker) as child:
        eventually(lambda: end_of(index) == messages(), "all is in the index", WAIT_S)
        assert (found(index, "steel"), len(found(index, "lamp", "brass"))) == ([1], 48)
        child.send_signal(signal.SIGTERM)
        assert child.wait(WAIT_S) == 0
    # Everything comes once more, to an index that has it: nothing goes back to what it was.
    replica.client.groups.reset(f"search-{topic}", [(topic, partition, 0) for partition in range(3)])
    with replica.reader():
        replica.execute("INSERT INTO items VALUES (7000, 'new', 1)")
    with following(index, shared_broker):
        eventually(lambda: found(index, "new") == [7000], "the new one is there", WAIT_S)
        assert (found(index, "steel"), len(found(index, "lamp", "brass"))) == ([1], 48)
        with replica.reader():
            replica.execute("TRUNCATE items")
        eventually(lambda: found(index, "lamp") == found(index, "new") == [], "it is empty", WAIT_S)
