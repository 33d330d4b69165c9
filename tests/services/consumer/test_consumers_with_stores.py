"""Consumers whose offsets are not in the broker: in the application's MySQL, in a file, in a store that is away."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import MySQLdb
import pytest

import txmq
from tests.services.loop_client import Connect, inside
from tools.shown import Shown
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.mariadb import MariaDB
from txmq.xa import LastResource

from .consuming import delivered, take, values

TOPIC, GROUP = "orders", "billing"
QUICK = txmq.ConsumerOptions(heartbeat_interval=0.1, offset_save_interval=0.1, retry_delay=0.05, name="one")
OTHER = txmq.ConsumerOptions(session_timeout=3.0, heartbeat_interval=0.1, offset_save_interval=0.1, name="two")


@pytest.fixture
def client(shared_broker: BrokerProcess, connect: Connect) -> Iterator[txmq.Client]:
    """A client, and five messages in a new topic."""
    with connect(shared_broker.address) as made:
        made.topics.create(TOPIC)
        made.producer().send_many(TOPIC, [(None, b"%d" % number) for number in range(5)])
        yield made
        made.topics.delete(TOPIC)


@pytest.fixture
def store(mariadb: MariaDB) -> Iterator[txmq.DatabaseOffsetStore]:
    """A new table for rows, one for offsets."""
    mariadb.execute("DROP TABLE IF EXISTS rows_made")
    mariadb.execute("CREATE TABLE rows_made (value INT) ENGINE=InnoDB")
    made = txmq.DatabaseOffsetStore(mariadb.connect)
    made.install()
    yield made
    mariadb.execute("DROP TABLE txmq_offset")


def write(connection: Any, message: txmq.Message) -> None:
    """A row."""
    connection.cursor().execute("INSERT INTO rows_made VALUES (%s)", (int(message.value or b""),))


def saved(store: txmq.DatabaseOffsetStore) -> int | None:
    """The offset."""
    found = store.saved(GROUP, (TOPIC, 0))
    return None if found is None else found.offset


def consumed(consumer: Any) -> Any:
    """What a consumer has of the partition."""
    inner = consumer.original.inner if isinstance(consumer, Shown) else consumer
    return inner._assignment.partitions[TOPIC, 0]


def rows(mariadb: MariaDB) -> list[int]:
    """All of them."""
    return sorted(value for (value,) in mariadb.execute("SELECT value FROM rows_made"))


def test_row_and_offset_commit_together_and_a_rollback_is_redelivered(
    client: txmq.Client, mariadb: MariaDB, store: txmq.DatabaseOffsetStore
) -> None:
    connection = mariadb.connect()
    with client.consumer(GROUP, [TOPIC], offset_store=store, options=QUICK) as consumer:
        first, second, third = delivered(consumer, 5)[:3]
        for message in (first, second):
            write(connection, message)
            message.ack(connection)
        assert store.saved(GROUP, (TOPIC, 0)) is None
        connection.commit()
        assert saved(store) == 2
        eventually(lambda: consumed(consumer).position == 2, "both count")
        write(connection, third)
        third.ack(connection)
        connection.rollback()
        third.reject("rolled back")
        (again,) = delivered(consumer, 1)
        assert again.offset == 2
        again.ack()
    assert saved(store) == 3
    assert rows(mariadb) == [0, 1]
    with client.consumer(GROUP, [TOPIC], offset_store=store, options=QUICK) as consumer:
        assert values(take(consumer, 2)) == [b"3", b"4"]
    connection.close()


def test_rejected_message_of_a_committed_transaction_is_done(
    client: txmq.Client, mariadb: MariaDB, store: txmq.DatabaseOffsetStore
) -> None:
    """The answer to COMMIT was lost: the listener raised, the row is there."""
    connection = mariadb.connect()
    with client.consumer(GROUP, [TOPIC], offset_store=store, options=QUICK) as consumer:
        first = delivered(consumer, 5)[0]
        first.ack(connection)
        connection.commit()
        first.reject("no answer")
        assert consumed(consumer).position == 1
        assert consumer.poll(timeout=0.3) == []
    connection.close()


def test_message_with_commit_under_way_is_kept_and_written_once(
    client: txmq.Client, mariadb: MariaDB, store: txmq.DatabaseOffsetStore
) -> None:
    """COMMIT was sent and not answered: the listener raised, at the message's last retry, and the row comes later."""
    connection = mariadb.connect()
    with client.consumer(GROUP, [TOPIC], offset_store=store, max_retries=0, options=QUICK) as consumer:
        first, second = delivered(consumer, 5)[:2]
        write(connection, first)
        first.ack(connection)
        first.ack(connection)  # again: it is acknowledged
        first.reject("no answer")
        connection.commit()
        eventually(lambda: consumed(consumer).position == 1, "it counts")
        second.reject("bad")
        eventually(lambda: saved(store) == 2, "the second is given up")
    connection.close()
    assert rows(mariadb) == [0]
    assert [dead_letter.value for dead_letter in client.browse(f"{GROUP}.dead-letter")] == [b"1"]
    client.topics.delete(f"{GROUP}.dead-letter")


def test_a_fenced_owners_rows_cannot_be_committed(
    client: txmq.Client,
    shared_broker: BrokerProcess,
    connect: Connect,
    mariadb: MariaDB,
    store: txmq.DatabaseOffsetStore,
) -> None:
    connection = mariadb.connect()
    with client.consumer(GROUP, [TOPIC], offset_store=store, options=QUICK) as consumer:
        first, second = delivered(consumer, 5)[:2]
        write(connection, first)
        first.ack(connection)
        connection.commit()
        with connect(shared_broker.address) as elsewhere:
            newer = txmq.DatabaseOffsetStore(mariadb.connect)
            with elsewhere.consumer(GROUP, [TOPIC], offset_store=newer, options=OTHER) as other:
                eventually(lambda: len(client.groups.describe(GROUP)["members"]) == 2, "the other one stands by")
                words = {"member": QUICK.name}  # as if it had been taken for gone
                leave = ("group", "leave", GROUP)
                inside(client, lambda it: it.control.call(*leave, timeout=30.0, extensions=words, body=[b""]))
                assert [message.offset for message in delivered(other, 4)] == [1, 2, 3, 4]
                write(connection, second)
                with pytest.raises(txmq.errors.FencedError):
                    second.ack(connection)
                assert not connection.open
    assert rows(mariadb) == [0]


def test_row_message_and_offset_are_of_one_block(
    client: txmq.Client, mariadb: MariaDB, store: txmq.DatabaseOffsetStore
) -> None:
    """Found: over a loop the block's connection was refused by an AttributeError, and the block could commit."""
    shop = LastResource("shop", connect=mariadb.connect)
    inside(client, shop.install)
    with client.consumer(GROUP, [TOPIC], offset_store=store, options=QUICK) as consumer, client.producer() as producer:
        first, second, third = delivered(consumer, 5)[:3]
        with producer.transaction(shop) as tx:
            write(tx.connection(shop), first)
            tx.send(TOPIC, b"made of 0")
            first.ack(tx.connection(shop))
        assert saved(store) == 1

        def doom() -> None:
            with producer.transaction(shop) as doomed:
                write(doomed.connection(shop), third)
                with pytest.raises(txmq.errors.TransactionStateError):
                    third.ack(doomed.connection(shop))

        with pytest.raises(txmq.RolledBackError):
            doom()
        with producer.transaction(shop) as tx:
            write(tx.connection(shop), second)
            second.ack(tx.connection(shop))
    assert saved(store) == 2
    assert rows(mariadb) == [0, 1]
    shop.close()


def test_acks_in_a_database_want_a_store_there(client: txmq.Client, mariadb: MariaDB) -> None:
    connection = mariadb.connect()
    with client.consumer(GROUP, [TOPIC], options=QUICK) as consumer:
        first = delivered(consumer, 1)[0]
        with pytest.raises(txmq.errors.ConfigError, match="offset_store"):
            first.ack(connection)
    connection.close()


def test_and_acks_in_brokers_transaction_want_offsets_in_broker(
    client: txmq.Client, store: txmq.DatabaseOffsetStore
) -> None:
    with client.consumer(GROUP, [TOPIC], offset_store=store, options=QUICK) as consumer, client.producer() as producer:
        first = delivered(consumer, 1)[0]
        with pytest.raises(txmq.errors.ConfigError, match="in the broker"), producer.transaction() as tx:
            tx.ack(first)


def test_group_with_a_file_has_one_member_and_continues(client: txmq.Client, tmp_path: Path) -> None:
    path = str(tmp_path / "billing.offsets")
    with client.consumer(GROUP, [TOPIC], offset_store=txmq.FileOffsetStore(path), options=QUICK) as consumer:
        for message in delivered(consumer, 5)[:3]:
            message.ack(sync=True)
        with pytest.raises(txmq.errors.DirectoryInUseError):
            client.consumer(GROUP, [TOPIC], offset_store=txmq.FileOffsetStore(path), options=OTHER)
        elsewhere = txmq.FileOffsetStore(str(tmp_path / "on-another-host.offsets"))
        for offset_store in (elsewhere, None):
            with client.consumer(GROUP, [TOPIC], offset_store=offset_store, options=OTHER) as second:
                with pytest.raises(txmq.errors.GroupActiveError, match="alone"):
                    eventually(lambda: bool(second.poll(timeout=0.2)), "it is refused")
                with pytest.raises(txmq.errors.GroupActiveError, match="alone"):
                    second.run(lambda _message: None)
        assert consumer.assignment == [(TOPIC, 0)]
    with client.consumer(GROUP, [TOPIC], offset_store=txmq.FileOffsetStore(path), options=QUICK) as consumer:
        assert values(take(consumer, 2)) == [b"3", b"4"]


class Away:
    """A store of one's own, away now and then."""

    is_shared = True

    def __init__(self) -> None:
        self.failures, self.saved, self.fenced = 3, 0, 0
        self.is_away = True

    def enter(self, group: str) -> None:
        """Nothing."""

    def load(self, group: str, slot: tuple[str, int], generation: int) -> txmq.StoredOffset | None:
        """Not at first."""
        if self.failures:
            self.failures -= 1
            raise (txmq.errors.StorageError("away") if self.failures else ZeroDivisionError)
        self.fenced = generation
        return txmq.StoredOffset(1)

    def save(self, group: str, positions: Sequence[txmq.OffsetPosition]) -> Collection[tuple[str, int]]:
        """Not while it is away."""
        if self.is_away:
            raise txmq.errors.StorageError("away")
        (position,) = positions
        self.saved = position.offset
        return ()

    def leave(self, group: str) -> None:
        """Nothing."""


def test_store_that_is_away_costs_neither_membership_nor_message(client: txmq.Client) -> None:
    store, options = Away(), replace(QUICK, session_timeout=4.0)  # a busy machine may hold a heartbeat back
    with client.consumer(GROUP, [TOPIC], offset_store=store, options=options) as consumer:
        assert values(take(consumer, 4)) == [b"1", b"2", b"3", b"4"]
        member = client.groups.describe(GROUP)["members"]
        with pytest.raises(txmq.errors.StorageError):
            consumer.ack(client.fetch(TOPIC, 0, 4)[0], sync=True)
        partition = consumed(consumer)
        began = time.monotonic()
        eventually(lambda: time.monotonic() > began + 1.25 * options.session_timeout, "some time passes")
        assert consumed(consumer) is partition  # nobody took it for gone
        assert [row["member"] for row in client.groups.describe(GROUP)["members"]] == [row["member"] for row in member]
        store.is_away = False
        eventually(lambda: store.saved == 5, "it is saved in the end")


def test_consumer_waits_for_database_away_at_its_start(
    client: txmq.Client, mariadb: MariaDB, store: txmq.DatabaseOffsetStore, tmp_path: Path
) -> None:
    """Found: the process ended, and whatever had started it had to start it again."""
    where, door = mariadb.connect_arguments(), tmp_path / "door"
    waiting = txmq.DatabaseOffsetStore(lambda: MySQLdb.connect(**where | {"unix_socket": str(door)}))
    with client.consumer(GROUP, [TOPIC], offset_store=waiting, options=QUICK) as consumer:
        assert consumer.poll(timeout=0.2) == []
        assert consumer.assignment == []
        door.symlink_to(where["unix_socket"])
        for message in delivered(consumer, 5):
            message.ack()
    assert saved(store) == 5


def test_consumer_whose_database_refuses_at_last_ends(
    client: txmq.Client, mariadb: MariaDB, store: txmq.DatabaseOffsetStore, tmp_path: Path
) -> None:
    where, door = mariadb.connect_arguments(), tmp_path / "door"
    wrong = where | {"unix_socket": str(door), "user": "nobody", "passwd": "geheim"}
    waiting = txmq.DatabaseOffsetStore(lambda: MySQLdb.connect(**wrong))
    with client.consumer(GROUP, [TOPIC], offset_store=waiting, options=QUICK) as consumer:
        door.symlink_to(where["unix_socket"])
        with pytest.raises(txmq.errors.StorageError, match=r"user or password are refused.*nobody") as caught:
            consumer.run(lambda _message: None)
        assert "geheim" not in str(caught.value)
    with pytest.raises(txmq.errors.StorageError, match=r"user or password are refused.*nobody"):
        client.consumer(GROUP, [TOPIC], offset_store=waiting, options=QUICK)
