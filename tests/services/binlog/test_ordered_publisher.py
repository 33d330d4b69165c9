"""The ordered publisher against a real broker: which spool may send, what the broker refuses, change of the mode."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

import txmq
from tests.services.binlog.scripted import TABLES, part
from txmq.binlog.config import BinlogSettings, PublishSettings
from txmq.binlog.decoded_changes import RowChange, XaPrepare
from txmq.binlog.errors import BinlogError, ReaderFencedError
from txmq.binlog.position import Position
from txmq.binlog.publish import ownership
from txmq.binlog.publish.publisher import BatchingPublisher, OrderedPublisher, TransactionalPublisher
from txmq.client.spooling.ordered_producer import OrderedOptions
from txmq.errors import DirectoryInUseError
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.xid import Xid

START = Position("mariadb", "")
TOPIC = "s.shop.orders"
WAIT_S = 60.0


class KilledError(Exception):
    """Stands for the end of a process: nothing is done in order."""


class Readers:
    """Publishers of one name, each with a client of its own."""

    def __init__(self, address: str, directory: Path) -> None:
        self._address, self._directory = address, directory
        self._clients: list[txmq.Client] = []

    def client(self) -> txmq.Client:
        self._clients.append(txmq.connect(self._address))
        return self._clients[-1]

    def spool(self, name: str) -> Path:
        return self._directory / name

    def made(self, spool: str) -> BatchingPublisher:
        """One that is not open; in transactional mode if no spool is named."""
        mode = "ordered" if spool else "transactional"
        publish = PublishSettings(
            partitions=1, session_timeout_ms=4000, linger_ms=0, mode=mode, spool=str(self.spool(spool))
        )
        kind = OrderedPublisher if spool else TransactionalPublisher
        return kind(self.client(), BinlogSettings(name="s", publish=publish), threading.Event().is_set)

    def begun(self, spool: str) -> BatchingPublisher:
        """One that goes on from what is published."""
        made = self.made(spool)
        found = made.open()
        made.begin(START if found is None else found.position)
        return made

    def publish(self, publisher: BatchingPublisher, *sequences: int) -> None:
        """Transactions with one row each."""
        for sequence in sequences:
            publisher.publish(part(sequence, [RowChange("c", TABLES[0], None, (sequence, "v"))]))
        publisher.flush()

    def publish_until_stopped(
        self, publisher: BatchingPublisher, error: type[BinlogError], reason: str, *sequences: int
    ) -> None:
        """What stops the publisher is raised by the flush or after it, whichever its thread is in time for."""

        def stopped() -> bool:
            try:
                publisher.refuse_failed()
            except error as failure:
                return reason in str(failure)
            return False

        with contextlib.suppress(error):
            self.publish(publisher, *sequences)
        eventually(stopped, f"it stops: {reason}", WAIT_S)

    def require_rows(self, count: int) -> None:
        """So many events are there, each once and in order, soon."""
        client, wanted = self.client(), [f"[{number}]".encode() for number in range(1, count + 1)]
        eventually(lambda: [one.key for one in client.browse(TOPIC)][:count] == wanted, f"{count} events", WAIT_S)
        assert [one.key for one in client.browse(TOPIC)] == wanted

    def close(self) -> None:
        for client in self._clients:
            client.close()


@pytest.fixture
def readers(broker: BrokerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Readers]:
    monkeypatch.setattr(ownership, "RECORD_S", 0.02)
    made = Readers(broker.address, tmp_path)
    yield made
    made.close()


def kill(publisher: BatchingPublisher) -> None:
    """End a publisher as a kill does: what it has in memory is gone, and nothing is released."""
    publisher._fail(KilledError())
    publisher.close()


def refused(publisher: BatchingPublisher, act: Callable[[], object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        act()
    publisher.close()


def test_an_end_in_order_lets_any_reader_go_on(readers: Readers) -> None:
    for number, spool in enumerate(("one", "", "two", "one", ""), 1):
        reader = readers.begun(spool)
        readers.publish(reader, number)
        published = reader.close()
        assert published is not None
        assert published.rows == number
        readers.require_rows(number)


def test_what_a_spool_holds_is_published_from_there(readers: Readers) -> None:
    first = readers.begun("one")
    readers.publish(first, 1)
    readers.require_rows(1)
    for spool in ("two", ""):
        other = readers.made(spool)
        refused(other, other.open, BinlogError, r"may wait in the spool .*/one of ")
    readers.publish(first, 2)
    readers.require_rows(2)  # it was not taken for a former process of theirs
    kill(first)
    other = readers.made("two")
    refused(other, other.open, BinlogError, r"may wait in the spool .*/one of ")
    transactional = readers.made("")
    refused(transactional, transactional.open, BinlogError, r"may wait in the spool .*/one of ")
    again = readers.begun("one")
    assert again.position.gtids == "0-1-2"
    readers.publish(again, 3)
    again.close()
    readers.require_rows(3)


def test_an_outdated_copy_of_a_spool_sends_nothing(readers: Readers) -> None:
    first = readers.begun("one")
    readers.publish(first, 1)
    readers.require_rows(1)
    kill(first)
    shutil.copytree(readers.spool("one"), readers.spool("copy"))
    again = readers.begun("one")
    readers.publish(again, 2)
    readers.require_rows(2)
    kill(again)
    copy = readers.begun("copy")
    readers.publish_until_stopped(copy, ReaderFencedError, "out of date", 2, 3)
    copy.close()
    readers.require_rows(2)


def test_a_second_process_with_the_same_spool_is_refused(readers: Readers) -> None:
    first = readers.begun("one")
    second = readers.made("one")
    refused(second, second.open, DirectoryInUseError, "one")
    readers.publish(first, 1)
    first.close()
    readers.require_rows(1)


def test_a_refused_message_stops_the_reader_and_is_kept(readers: Readers, monkeypatch: pytest.MonkeyPatch) -> None:
    # A topic that is made anew knows no numbers: what was sent is looked for in its log, after this time.
    monkeypatch.setattr("txmq.binlog.publish.publisher.OrderedOptions", partial(OrderedOptions, visibility_wait_s=0.0))
    first = readers.begun("one")
    readers.publish(first, 1)
    readers.require_rows(1)
    readers.client().topics.delete(TOPIC)
    reason = "the broker refuses what is to be published: topic s.shop.orders, partition 0"
    readers.publish_until_stopped(first, BinlogError, reason, 2, 3)
    first.close()
    readers.client().topics.create(TOPIC)
    again = readers.begun("one")
    assert again.position.gtids == "0-1-3"
    readers.publish(again, 4)
    again.close()
    assert [one.key for one in readers.client().browse(TOPIC)] == [b"[2]", b"[3]", b"[4]"]


def test_prepared_changes_keep_the_positions_in_their_mode(readers: Readers) -> None:
    prepare = part(1, [RowChange("c", TABLES[0], None, (9, "v"))], xa=XaPrepare(Xid(1, b"x", b"b")))
    transactional = readers.begun("")
    transactional.publish(prepare)
    transactional.close()
    reader = readers.made("one")
    refused(reader, reader.open, BinlogError, r"s\.parked holds changes of prepared XA transactions.*: X'78'")
