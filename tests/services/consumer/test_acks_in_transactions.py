"""``tx.ack``: consume, process, produce as one step, against a real broker; whoever is killed, one output an input."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

import txmq
from tests.services.loop_client import Connect
from txmq.client.consumer.consumer import Consumer
from txmq.client.transport import reconnecting
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.mariadb import MariaDB
from txmq.xa import LastResource, MySQLResource

from .consuming import delivered

IN, OUT, GROUP = "orders", "invoices", "billing"
WAIT_S = 60.0
QUICK = txmq.ConsumerOptions(name="one", heartbeat_interval=0.1, offset_save_interval=0.1, retry_delay=0.05)


@pytest.fixture
def elsewhere(shared_broker: BrokerProcess) -> Iterator[txmq.Client]:
    """Another process."""
    with txmq.connect(shared_broker.address) as made:
        yield made


@pytest.fixture
def client(shared_broker: BrokerProcess, connect: Connect, elsewhere: txmq.Client) -> Iterator[txmq.Client]:
    """A client of a broker with the topics, both new, and no group."""
    with connect(shared_broker.address) as made:
        made.topics.create(IN)
        made.topics.create(OUT)
        yield made
        elsewhere.control.call("group", "leave", GROUP, timeout=WAIT_S, extensions={"member": QUICK.name}, body=[b""])
        eventually(lambda: made.groups.describe(GROUP)["members"] == [], "nobody is in the group")
        made.groups.delete(GROUP)
        made.topics.delete(IN)
        made.topics.delete(OUT)


@pytest.fixture
def consumer(client: txmq.Client) -> Iterator[Consumer]:
    """The one member of the group."""
    with client.consumer(GROUP, [IN], options=QUICK) as made:
        yield made


def fill(client: txmq.Client, count: int) -> list[bytes]:
    """So many inputs."""
    values = [b"%d" % number for number in range(count)]
    client.producer().send_many(IN, [(None, value) for value in values])
    return values


def saved(client: txmq.Client) -> int | None:
    """What the group has."""
    offset: int | None = client.groups.describe(GROUP)["partitions"][0]["offset"]
    return offset


def outputs(client: txmq.Client) -> list[bytes]:
    """What was produced."""
    return [message.value or b"" for message in client.browse(OUT)]


@pytest.fixture
def fence(elsewhere: txmq.Client) -> Callable[[], object]:
    """Another process takes the member's name, and everything with it."""
    words = {"member": QUICK.name, "topics": IN}
    return lambda: elsewhere.control.call("group", "join", GROUP, timeout=WAIT_S, extensions=words, body=[b"[]"])


def test_a_commit_saves_the_offset_and_a_rollback_leaves_it(client: txmq.Client, consumer: Consumer) -> None:
    fill(client, 3)
    first, second, third = delivered(consumer, 3)
    producer = client.producer()
    with producer.transaction() as tx:
        producer.send(OUT, b"a")
        tx.ack(first)
        tx.ack(second)
    assert (saved(client), outputs(client)) == (2, [b"a"])
    tx = producer.transaction()
    with pytest.raises(ZeroDivisionError), tx:  # noqa: PT012  the block is what is tested
        producer.send(OUT, b"b")
        tx.ack(third)
        raise ZeroDivisionError
    assert (saved(client), outputs(client)) == (2, [b"a"])
    third.reject("it comes again")
    (again,) = delivered(consumer, 1)
    assert again.offset == 2
    with producer.transaction() as tx:
        tx.ack(again)
    assert (saved(client), outputs(client)) == (3, [b"a"])


@pytest.mark.threads
def test_messages_of_partition_are_acknowledged_in_order_by_one_transaction(
    client: txmq.Client, consumer: Consumer
) -> None:
    fill(client, 3)
    first, second, third = delivered(consumer, 3)
    with client.producer() as producer:
        with (
            pytest.raises(txmq.errors.TransactionStateError, match="message 0 before it"),
            producer.transaction() as tx,
        ):
            tx.ack(second)
        first.ack()
        tx = producer.transaction()
        with tx:
            tx.ack(second)
            tx.ack(second)
            second.ack()  # is the transaction's to say
            assert consumer._assignment.partitions[IN, 0].position == 1
            third.ack()
        assert saved(client) == 3  # it looked when it was sent
        with (
            pytest.raises(txmq.errors.TransactionStateError, match="acknowledged already"),
            producer.transaction() as tx,
        ):
            tx.ack(second)
        with pytest.raises(txmq.errors.TransactionStateError, match="consumer delivered"), producer.transaction() as tx:
            tx.ack(client.fetch(IN, 0, 0)[0])


def test_key_order_gives_each_input_one_output_without_others_failing(client: txmq.Client, tmp_path: Path) -> None:
    producer, tries = client.producer(), Counter[bytes]()
    inputs = [(b"k", b"bad"), (b"k", b"2"), (b"x", b"3"), (b"k", b"4"), (b"x", b"5"), (None, b"6")]
    for key, value in inputs:
        producer.send(IN, value, key=key)

    def handle(message: txmq.Message) -> None:
        value = message.value or b""
        tries[value] += 1
        with producer.transaction() as tx:
            producer.send(OUT, value, key=message.key)
            tx.ack(message)
            if value == b"bad" and tries[value] < 3:
                raise ValueError("cannot")

    options = replace(QUICK, keep_key_order=True, retry_delay=0.0, deferred_delay=0.2)
    with client.consumer(
        GROUP, [IN], max_retries=0, retry_store=str(tmp_path / "deferred"), options=options
    ) as consumer:
        thread = threading.Thread(target=lambda: consumer.run(handle, threads=2))
        thread.start()
        eventually(lambda: len(outputs(client)) >= len(inputs), "each has its output")
        eventually(lambda: client.groups.describe(GROUP)["partitions"][0]["deferred"] is None, "nothing is deferred")
        consumer.close()
        thread.join(WAIT_S)
    assert tries == {b"bad": 3, **{value: 1 for _, value in inputs[1:]}}
    found = list(client.browse(OUT))
    for key in (b"k", b"x", None):
        assert [m.value for m in found if m.key == key] == [value for other, value in inputs if other == key]
    assert saved(client) == len(inputs)


def test_a_fenced_members_transaction_is_refused_and_nothing_is_visible(
    client: txmq.Client, consumer: Consumer, fence: Callable[[], object]
) -> None:
    fill(client, 1)
    (message,) = delivered(consumer, 1)
    with client.producer() as producer:
        with pytest.raises(txmq.RolledBackError), producer.transaction() as tx:  # noqa: PT012  the end of the block
            producer.send(OUT, b"a")
            tx.ack(message)
            fence()
        assert (saved(client), outputs(client)) == (None, [])


@pytest.mark.threads
def test_synchronous_ack_is_refused_after_partition_was_handed_over_again(
    client: txmq.Client, consumer: Consumer, fence: Callable[[], object]
) -> None:
    fill(client, 2)
    first, second = delivered(consumer, 2)
    first.ack(sync=True)
    before = consumer._assignment.partitions[IN, 0]
    fence()
    held = consumer._assignment.partitions
    eventually(lambda: held.get((IN, 0), before) is not before, "the partition is handed over under a new generation")
    with pytest.raises(txmq.errors.FencedError, match="not saved"):
        second.ack(sync=True)
    assert saved(client) == 1
    (again,) = delivered(consumer, 1)
    again.ack(sync=True)
    assert saved(client) == 2


def test_ack_that_waits_says_that_it_was_refused(
    client: txmq.Client, consumer: Consumer, fence: Callable[[], object]
) -> None:
    fill(client, 2)
    first, second = delivered(consumer, 2)
    first.ack(sync=True)
    assert saved(client) == 1
    fence()
    with pytest.raises(txmq.errors.FencedError, match="not saved"):
        second.ack(sync=True)
    assert saved(client) == 1


@pytest.mark.threads
def test_waiting_ack_reports_that_a_transaction_must_save_first(client: txmq.Client, consumer: Consumer) -> None:
    fill(client, 2)
    first, second = delivered(consumer, 2)
    consumed = consumer._assignment.partitions[IN, 0]
    first.ack()
    consumed.saving = owner = object()  # as between a transaction's request and its answer
    with pytest.raises(txmq.errors.StorageError, match="saved later"):
        second.ack(sync=True)
    assert consumed.saving is owner
    consumed.saving = None
    second.ack(sync=True)
    assert saved(client) == 2


@pytest.mark.threads
def test_released_partition_is_loaded_anew_at_the_groups_offset(client: txmq.Client, consumer: Consumer) -> None:
    """What a doubt ends in, whose outcome the broker does not keep any more."""
    fill(client, 2)
    first, second = delivered(consumer, 2)
    first.ack(sync=True)
    consumer._assignment.lost((IN, 0))
    with client.producer() as producer:
        with pytest.raises(txmq.RolledBackError), producer.transaction() as tx:
            tx.ack(second)
        (again,) = delivered(consumer, 1)
        assert again.offset == 1
        with producer.transaction() as tx:
            tx.ack(again)
    assert saved(client) == 2


def test_with_a_last_resource_row_message_and_offset_are_one(
    client: txmq.Client, consumer: Consumer, fence: Callable[[], object], tmp_path: Path
) -> None:
    database = tmp_path / "shop.db"
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE invoices (value BLOB)")
    resource = LastResource("shop", connect=lambda: sqlite3.connect(database, timeout=WAIT_S))
    resource.install()
    fill(client, 2)
    first, second = delivered(consumer, 2)
    with client.producer() as producer:
        with producer.transaction(resource) as tx:
            tx.connection(resource).execute("INSERT INTO invoices VALUES (?)", (first.value,))
            producer.send(OUT, b"a")
            tx.ack(first)
        assert (saved(client), outputs(client)) == (1, [b"a"])
        with pytest.raises(txmq.RolledBackError), producer.transaction(resource) as tx:  # noqa: PT012  the end of the block
            tx.connection(resource).execute("INSERT INTO invoices VALUES (?)", (second.value,))
            tx.ack(second)
            fence()
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("SELECT COUNT(*) FROM invoices").fetchone() == (1,)
    assert (saved(client), outputs(client)) == (1, [b"a"])


def test_acks_commit_with_an_xa_transaction(
    client: txmq.Client, consumer: Consumer, fence: Callable[[], object], mariadb: MariaDB
) -> None:
    mariadb.execute("DROP TABLE IF EXISTS invoices")
    mariadb.execute("CREATE TABLE invoices (value INT) ENGINE=InnoDB")
    resource = MySQLResource("shop", connect=mariadb.connect)
    resource.install()
    fill(client, 2)
    first, second = delivered(consumer, 2)
    with client.producer() as producer:
        with producer.transaction(resource) as tx:
            tx.connection(resource).cursor().execute("INSERT INTO invoices VALUES (1)")
            producer.send(OUT, b"a")
            tx.ack(first)
        assert saved(client) == 1
        with pytest.raises(txmq.RolledBackError), producer.transaction(resource) as tx:  # noqa: PT012  the end of the block
            tx.connection(resource).cursor().execute("INSERT INTO invoices VALUES (2)")
            tx.ack(second)
            fence()
    assert mariadb.execute("SELECT value FROM invoices") == [(1,)]
    assert (saved(client), outputs(client)) == (1, [b"a"])


@pytest.mark.threads
@pytest.mark.parametrize("is_committed", [True, False], ids=["committed", "rolled back"])
def test_message_of_unknown_outcome_is_neither_saved_nor_delivered_meanwhile(
    shared_broker: BrokerProcess, client: txmq.Client, consumer: Consumer, monkeypatch: pytest.MonkeyPatch, *,
    is_committed: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(reconnecting, "SILENT_S", WAIT_S)  # it is not asked first, however long it takes to freeze it
    fill(client, 2)
    first, second = delivered(consumer, 2)
    with client.producer() as producer:
        tx = producer.transaction(timeout=3.0)  # for the body, too: the machine may be busy
        with pytest.raises(txmq.OutcomeUnknownError), tx:  # noqa: PT012  the end of the block
            producer.send(OUT, b"a")
            tx.ack(first)
            shared_broker.pause()
        consumed = consumer._assignment.partitions[IN, 0]
        second.ack()
        first.reject("unknown")  # not ours to say
        assert (consumed.is_in_doubt, consumed.position, consumer.poll(timeout=0.0)) == (True, 0, [])
        if is_committed:
            shared_broker.resume()
            eventually(lambda: saved(client) == 2, "both are saved")
            assert client.outcome(tx.txid) is txmq.Outcome.COMMITTED
            assert (consumer.poll(timeout=0.2), outputs(client)) == ([], [b"a"])
            return
        shared_broker.kill()
        shared_broker.start()
        (again,) = delivered(consumer, 1)
        assert (again.offset, client.outcome(tx.txid)) == (0, txmq.Outcome.ROLLED_BACK)
        with producer.transaction() as tx:
            tx.ack(again)
        assert (saved(client), outputs(client)) == (2, [])


CHILD = """
import sqlite3, sys
import txmq
from txmq.xa import LastResource
address, database, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
client = txmq.connect(address, timeout=30.0)
resource = LastResource("shop", connect=lambda: sqlite3.connect(database, timeout=30.0))
resource.install(client)
client.settle(resource)
producer = client.producer(timeout=30.0)
options = txmq.ConsumerOptions(session_timeout=3.0, heartbeat_interval=0.1, offset_save_interval=0.1)
with client.consumer("billing", ["orders"], options=options) as consumer:
    for message in consumer:
        kinds = [resource] if message.offset % 2 else []
        while True:
            try:
                with producer.transaction(*kinds, timeout=20.0) as tx:
                    if kinds:
                        tx.connection(resource).execute("INSERT INTO invoices VALUES (?)", (message.value,))
                    producer.send("invoices", b"%d:%b" % (message.partition, message.value))
                    tx.ack(message)
                break
            except txmq.RolledBackError as error:
                if (message.topic, message.partition) not in consumer.assignment:
                    break
            except txmq.OutcomeUnknownError:
                break
            except txmq.errors.TransactionStateError:
                break  # it was delivered again meanwhile, and done
        if client.offsets("invoices", 0).end >= count:
            break
client.close()
"""
LIVES = (
    "client.tx.prepared:3", "client.tx.db_committed:2", "client.tx.marker_inserted:3",
    "client.tx.commit_sent:2", "client.tx.prepare_sent:2",
)  # fmt: skip


@pytest.mark.threads
def test_each_input_has_one_output_despite_deaths_after_prepare(
    shared_broker: BrokerProcess, client: txmq.Client, tmp_path: Path
) -> None:
    database, count = tmp_path / "shop.db", 60
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE invoices (value BLOB)")
    values = fill(client, count)
    command = [sys.executable, "-c", CHILD, shared_broker.address, str(database), str(count)]
    for number, point in enumerate((*LIVES, "")):
        environment = {**os.environ, "TXMQ_CRASH": point} if point else dict(os.environ)
        with subprocess.Popen(command, env=environment) as child:
            if number % 2:  # the broker dies, too, while it has work
                at = client.offsets(OUT, 0).end
                eventually(lambda: child.poll() is not None or client.offsets(OUT, 0).end > at, "it works")  # noqa: B023
                shared_broker.kill()
                shared_broker.start()
            assert child.wait(WAIT_S) == (0 if not point else -9), point
    found = Counter(value.partition(b":")[2] for value in outputs(client))
    assert found == Counter(values)
    with closing(sqlite3.connect(database)) as connection:
        rows = [value for (value,) in connection.execute("SELECT value FROM invoices")]
    assert sorted(rows) == sorted(value for number, value in enumerate(values) if number % 2)
    eventually(lambda: saved(client) == count, "everything is saved")
    eventually(lambda: not client.transactions.list(), "nothing is in doubt")
