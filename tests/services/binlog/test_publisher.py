"""The publisher against a real broker: which one is the reader, what a lost position means, what waits."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import txmq
from tests.services.binlog.scripted import TABLES, Script, ScriptedSource, part
from txmq.binlog.config import BinlogSettings, PublishSettings
from txmq.binlog.decoded_changes import RowChange, TransactionPart, XaEnd, XaPrepare
from txmq.binlog.errors import BinlogError, ReaderFencedError
from txmq.binlog.position import Position
from txmq.binlog.publish import position_log
from txmq.binlog.publish.position_log import BrokerWait
from txmq.binlog.publish.publisher import TransactionalPublisher
from txmq.binlog.reader import BinlogReader
from txmq.errors import TxmqError
from txmq.runtime.crashpoints import VARIABLE
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.xid import Xid

START = Position("mariadb", "")
TOPIC = "s.shop.orders"
WAIT_S = 60.0


def inserted(sequence: int) -> TransactionPart:
    """A transaction with one row."""
    return part(sequence, [RowChange("c", TABLES[0], None, (sequence, "v"))])


@pytest.fixture
def connect(broker: BrokerProcess) -> Iterator[Callable[[], txmq.Client]]:
    """Makes clients, which are closed at the end."""
    made: list[txmq.Client] = []

    def make() -> txmq.Client:
        made.append(txmq.connect(broker.address))
        return made[-1]

    yield make
    for client in made:
        client.close()


def publisher(
    client: txmq.Client, stop: threading.Event | None = None, **settings: Any
) -> TransactionalPublisher:  # fmt: skip
    """A publisher, not open."""
    publish = PublishSettings(partitions=1, session_timeout_ms=4000, **settings)
    is_stopped = (stop or threading.Event()).is_set
    return TransactionalPublisher(client, BinlogSettings(name="s", publish=publish), is_stopped)


def begun(client: txmq.Client, **settings: Any) -> TransactionalPublisher:
    """A publisher that goes on from what is published."""
    made = publisher(client, **settings)
    found = made.open()
    made.begin(START if found is None else found.position)
    return made


def rows(client: txmq.Client) -> int:
    """How many events are there."""
    return len(list(client.browse(TOPIC)))


def test_a_first_start_saves_its_position_at_once(connect: Callable[[], txmq.Client]) -> None:
    first = publisher(connect())
    assert first.open() is None
    first.begin(Position("mariadb", "0-1-7"))
    first.close()
    again = publisher(connect())
    found = again.open()
    again.close()
    assert found is not None
    assert (found.position.gtids, found.rows) == ("0-1-7", 0)


def test_parked_changes_are_kept_for_ever(connect: Callable[[], txmq.Client], broker: BrokerProcess) -> None:
    broker.stop()
    broker.start(env={"TXMQ_DEFAULT_RETENTION_MS": "1"})
    begun(connect()).close()
    config = connect().topics.known("s.parked").config
    assert (config.retention_ms, config.retention_size_bytes) == (None, None)


def test_the_parked_topic_may_be_deleted_while_nothing_is_prepared(connect: Callable[[], txmq.Client]) -> None:
    xid = Xid(1, b"x", b"b")
    for first in (1, 3):
        made = begun(connect())
        made.publish(part(first, inserted(first).changes, xa=XaPrepare(xid)))
        made.flush()
        made._open_gathering._fresh.clear()  # as if it were too much for memory: it is read back
        made.publish(part(first + 1, xa=XaEnd(xid, committed=True)))
        made.close()
        connect().topics.delete("s.parked")
    assert rows(connect()) == 2


def test_second_reader_of_another_machine_stands_by_until_first_ends(
    connect: Callable[[], txmq.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = begun(connect())
    first.publish(inserted(1))
    first.flush()
    monkeypatch.setattr(position_log, "host_name", lambda: "another")
    second, opened = publisher(connect()), threading.Event()
    found: list[Any] = []

    def wait() -> None:
        found.append(second.open())
        opened.set()

    threading.Thread(target=wait, daemon=True).start()
    client = connect()
    eventually(lambda: len(client.groups.describe("binlog-s")["members"]) == 2, "it stands by", WAIT_S)
    assert not opened.is_set()
    first.publish(inserted(2))
    first.close()
    assert opened.wait(WAIT_S)
    assert found[0].position.gtids == "0-1-2"
    second.begin(found[0].position)
    second.publish(inserted(3))
    second.close()
    assert rows(client) == 3


def test_second_reader_of_the_same_machine_fences_the_first(connect: Callable[[], txmq.Client]) -> None:
    first = begun(connect())
    first.publish(inserted(1))
    first.flush()
    second = begun(connect())
    second.publish(inserted(2))
    second.flush()
    first.publish(inserted(2))
    with pytest.raises(ReaderFencedError, match="took over"):
        first.flush()
    first.close()
    second.close()
    assert rows(connect()) == 2


def test_a_reader_that_waits_for_its_turn_can_be_stopped(
    connect: Callable[[], txmq.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = begun(connect())
    monkeypatch.setattr(position_log, "host_name", lambda: "another")
    stop = threading.Event()
    second = publisher(connect(), stop)
    stop.set()
    assert second.open() is None
    second.close()
    first.close()


@pytest.mark.parametrize("made_anew", [False, True])
def test_deleted_positions_are_an_error_and_no_first_start(connect: Callable[[], txmq.Client], made_anew: bool) -> None:
    begun(connect()).close()
    client = connect()
    client.topics.delete("s.positions")
    if made_anew:
        client.topics.create("s.positions")
    again = publisher(client)
    with pytest.raises(BinlogError, match=r"s\.positions was deleted"):
        again.open()
    again.close()


def test_another_programs_message_among_the_positions_stops_the_reader(connect: Callable[[], txmq.Client]) -> None:
    begun(connect()).close()
    client = connect()
    client.producer().send("s.positions", b"hello")
    again = publisher(client)
    with pytest.raises(BinlogError, match=r"is no position"):
        again.open()
    again.close()


def test_messages_the_broker_refuses_for_good_stop_the_reader(connect: Callable[[], txmq.Client]) -> None:
    client = connect()
    first = begun(client)
    first.publish(inserted(1))
    first.flush()
    connect().topics.delete(TOPIC)
    first.publish(inserted(2))
    with pytest.raises(BinlogError, match=r"the broker refuses what is to be published.*s\.shop\.orders"):
        first.flush()
    first.close()


def test_what_cannot_be_published_at_the_end_is_read_again(
    connect: Callable[[], txmq.Client], broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txmq.binlog.publish.publisher.CLOSE_S", 0.5)
    first = begun(connect())
    first.publish(inserted(1))
    first.flush()
    broker.kill()
    first.publish(inserted(2))
    published = first.close()
    assert published is not None
    assert published.position.gtids == "0-1-1"
    broker.start()
    again = begun(connect())
    assert again.position.gtids == "0-1-1"
    again.publish(inserted(2))
    again.close()
    assert rows(connect()) == 2


def test_an_idle_reader_outlives_an_outage_of_the_broker(
    connect: Callable[[], txmq.Client], broker: BrokerProcess
) -> None:
    first = begun(connect())
    first.publish(inserted(1))
    first.flush()
    log = first._log
    assert log is not None
    broker.kill()
    eventually(lambda: not log._is_ours, "the partition of the positions is given up", WAIT_S)
    broker.start()
    eventually(lambda: log._is_ours, "it is assigned again", WAIT_S)
    first.publish(inserted(2))
    first.flush()
    first.close()
    assert rows(connect()) == 2


def test_an_outcome_that_was_not_seen_is_read_not_guessed(
    connect: Callable[[], txmq.Client], broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.stop()
    broker.start(env={VARIABLE: "journal.sync.done:25:stop"})  # a commit is on disk, and is not answered
    unseen: list[Exception] = []

    def resume(_wait: BrokerWait, error: Exception) -> None:
        unseen.append(error)
        broker.resume()

    monkeypatch.setattr(BrokerWait, "say", resume)
    first = begun(connect(), transaction_timeout_ms=400)
    for sequence in range(1, 31):
        first.publish(inserted(sequence))
        first.flush()
    first.close()
    assert isinstance(unseen[0], txmq.errors.OutcomeUnknownError)
    assert rows(connect()) == 30


@pytest.mark.parametrize("has_published", [False, True])
def test_stop_ends_the_wait_for_a_broker(
    connect: Callable[[], txmq.Client], broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch, has_published: bool
) -> None:
    monkeypatch.setattr("txmq.binlog.publish.publisher.CLOSE_S", 0.1)
    stop, refused = threading.Event(), list[TxmqError]()
    first = publisher(connect(), stop, transaction_rows_max=1)
    first.open()
    first.begin(START)
    if has_published:  # it waits for room then, else for its topic
        first.publish(inserted(1))
        first.flush()
    broker.kill()

    def publish() -> None:
        try:
            for sequence in itertools.count(2):
                first.publish(inserted(sequence))
        except TxmqError as error:
            refused.append(error)

    thread = threading.Thread(target=publish, daemon=True)
    thread.start()
    stop.set()
    thread.join(WAIT_S)
    assert [error.retriable for error in refused] == [True]
    published = first.close()
    assert published is not None
    assert published.position.gtids == ("0-1-1" if has_published else "")


def test_a_reader_that_finds_no_broker_ends_in_order(broker: BrokerProcess) -> None:
    broker.kill()
    with txmq.connect(broker.address, lazy=True) as client:
        reader = BinlogReader(lambda: ScriptedSource(Script(1, 1), lambda: None), client.clock)
        ended: list[Any] = []
        made = TransactionalPublisher(client, BinlogSettings(name="s"), lambda: reader.is_stopped)
        thread = threading.Thread(target=lambda: ended.append(reader.run(made)), daemon=True)
        thread.start()
        reader.stop()
        thread.join(WAIT_S)
    assert ended == [None]
