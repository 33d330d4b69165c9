"""Ordered mode without a broker: random histories with kills; the spool holds each event once, in order."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import txmq
from tests.services.binlog.scripted import (
    PART_ROWS,
    TABLES,
    Script,
    ScriptedSource,
    part,
    require_published,
    topic_name,
)
from txmq.binlog.config import BinlogSettings, PublishSettings
from txmq.binlog.decoded_changes import RowChange, XaEnd, XaPrepare
from txmq.binlog.errors import BinlogError
from txmq.binlog.position import Position
from txmq.binlog.publish import ownership
from txmq.binlog.publish.published import Published, read_published
from txmq.binlog.publish.publisher import OrderedPublisher
from txmq.binlog.reader import BinlogReader
from txmq.client.producer.core import TopicRef
from txmq.client.spooling.write_ahead import Note, SpoolBatch, WriteAheadProducer, WriteAheadSpool
from txmq.errors import SpoolFullError
from txmq.log import records
from txmq.model import Message
from txmq.runtime.threads import Future
from txmq.testing.eventually import eventually
from txmq.xid import Xid

NAME, PARTITIONS, TRANSACTIONS = "s", 3, 40
WAIT_S = 30.0
AWAY = "txmq://127.0.0.1:1"


class KilledError(Exception):
    """Stands for the end of the process."""


def begun_spool(path: Path, **fields: Any) -> None:
    """A spool whose topics are known, and that is the reader's since its beginning.

    Args:
        fields: others of the noted position.
    """
    with WriteAheadSpool(str(path)) as spool:
        for schema in TABLES:
            spool.remember_topic(topic_name(NAME, schema.table), TopicRef(0, PARTITIONS))
        first = Published("former-1", Position("mariadb", ""), **fields)
        spool.append_all([], 1, [Note(ownership.PUBLISHED, 0, first.to_json()), Note(ownership.RUNS, 0, b'["former"]')])


def settings(path: Path, **others: Any) -> BinlogSettings:
    """Of an ordered reader."""
    values = {"partitions": PARTITIONS, "linger_ms": 0, "transaction_rows_max": 2 * PART_ROWS, **others}
    return BinlogSettings(name=NAME, publish=PublishSettings(mode="ordered", spool=str(path), **values))


def read_on(client: txmq.Client, script: Script, whole: BinlogSettings, away_after: int) -> Published | None:
    """Go on with the script after what the spool has."""
    reader = BinlogReader(lambda: ScriptedSource(script, reader.stop, away_after), client.clock)
    return reader.run(OrderedPublisher(client, whole, lambda: reader.is_stopped))


class SpooledTopics:
    """Reads a spool as ``require_published`` reads topics."""

    def __init__(self, spool: WriteAheadSpool) -> None:
        self._messages: list[Message] = []
        for entry in spool.entries(1_000_000):
            self._messages += records.decode(bytearray(entry.content), entry.topic, entry.partition)
        self.topics = SimpleNamespace(describe=lambda _: SimpleNamespace(partitions=PARTITIONS))

    def browse(self, topic: str) -> Iterator[Message]:
        """See ``Client.browse``."""
        return (message for message in self._messages if message.topic == topic)


@pytest.mark.parametrize("seed", range(5))
def test_killed_at_any_step_spool_has_each_event_once(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "END_S", 0.0)
    choice, append_all, kills = random.Random(seed), WriteAheadSpool.append_all, 0

    def append(
        spool: WriteAheadSpool, batches: Sequence[SpoolBatch], now_ms: int, notes: Sequence[Note] = (),
        forgotten: Sequence[str] = (),
    ) -> None:  # fmt: skip
        nonlocal kills
        drawn = choice.random() if kills < 12 else 1.0
        kills += drawn < 0.5
        if drawn < 0.25:
            raise KilledError("before the commit")
        append_all(spool, batches, now_ms, notes, forgotten)
        if drawn < 0.5:
            raise KilledError("behind the commit")

    path, script = tmp_path / "spool", Script(seed, TRANSACTIONS)
    begun_spool(path)
    monkeypatch.setattr(WriteAheadSpool, "append_all", append)
    published = None
    with txmq.connect(AWAY, lazy=True) as client:
        while published is None or published.position.gtids != script.end:
            try:
                published = read_on(client, script, settings(path), choice.randrange(2, 20))
            except KilledError:
                published = None
    assert kills == 12
    with WriteAheadSpool(str(path), read_only=True) as spool:
        require_published(cast(txmq.Client, SpooledTopics(spool)), script, NAME)
        kept = [name for (name,) in spool._rows("SELECT DISTINCT name FROM notes WHERE name LIKE 'parked %'", ())]
        noted = read_published(next(spool.notes(ownership.PUBLISHED)), "the spool")
    assert noted is not None
    waiting = {f"parked {xid} {rows.gtid}" for xid, rows in noted.parked.items() if rows.rows}
    assert set(kept) == waiting


def test_parked_changes_are_published_by_a_run_without_topics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "END_S", 0.0)
    begun_spool(tmp_path)
    xid, changes = Xid(1, b"x", b"b"), [RowChange("c", TABLES[0], None, (number, "v")) for number in range(3)]
    with txmq.connect(AWAY, lazy=True) as client:
        for one in (part(1, changes, xa=XaPrepare(xid)), part(2, xa=XaEnd(xid, committed=True))):
            publisher = OrderedPublisher(client, settings(tmp_path), lambda: False)
            found = publisher.open()
            assert found is not None
            publisher.begin(found.position)
            publisher.publish(one)
            publisher.close()
    with WriteAheadSpool(str(tmp_path), read_only=True) as spool:
        messages = list(SpooledTopics(spool).browse(topic_name(NAME, TABLES[0].table)))
    assert sorted(message.key or b"" for message in messages) == [b"[0]", b"[1]", b"[2]"]


def test_epoch_is_sent_when_nothing_older_waits(tmp_path: Path) -> None:
    content = bytes(records.encode([(b"k", b"v", (), 1)]))
    with WriteAheadSpool(str(tmp_path)) as spool:
        sent = ownership.SentEpochs(cast(WriteAheadProducer, spool))
        assert sent.newest() == 0
        sent.appended(4)  # what the position says, of an empty spool
        assert sent.newest() == 4
        for epoch in (5, 6, 7):
            spool.append_all([SpoolBatch(("t", epoch % 2), content, 1, 0)], 1)
            sent.appended(epoch)
        first, second, third = spool.entries(10)
        spool.done([second])  # of another partition
        assert sent.newest() == 4
        spool.done([first])
        assert sent.newest() == 6
        spool.done([third])
        assert sent.newest() == 7
    with WriteAheadSpool(str(tmp_path)) as spool:
        spool.append_all([SpoolBatch(("t", 0), content, 1, 0)], 1)
        sent = ownership.SentEpochs(cast(WriteAheadProducer, spool))
        sent.appended(8)  # after a restart, with what is left in the spool
        assert sent.newest() == 0


def test_reader_waits_for_a_full_spool_until_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ownership, "END_S", 0.0)
    monkeypatch.setattr("txmq.binlog.publish.publisher.CLOSE_S", 0.05)
    path, script = tmp_path / "spool", Script(1, 400)
    begun_spool(path)
    whole = settings(path, spool_bytes_max=1 << 20, transaction_bytes_max=64 << 10)
    with txmq.connect(AWAY, lazy=True) as client:
        reader = BinlogReader(lambda: ScriptedSource(script, reader.stop), client.clock)
        ended = Future[Published | None]()
        publisher = OrderedPublisher(client, whole, lambda: reader.is_stopped)
        threading.Thread(target=lambda: ended.set_result(reader.run(publisher))).start()
        eventually(lambda: "the spool is full: waiting for the broker" in caplog.text, "it waits")
        reader.stop()
        published = ended.result(WAIT_S)
    assert published is not None
    assert published.position.gtids != script.end
    with WriteAheadSpool(str(path)) as spool:
        held = [entry.number for entry in spool.entries(1_000_000)]
        assert (1 << 20) - spool.size_bytes < 64 << 10
    with txmq.connect(AWAY, lazy=True) as client:
        read_on(client, script, settings(path), 0)
    with WriteAheadSpool(str(path), read_only=True) as spool:
        assert [entry.number for entry in spool.entries(len(held))] == held
        require_published(cast(txmq.Client, SpooledTopics(spool)), script, NAME)


@pytest.mark.parametrize(
    ("rows", "placing", "by", "is_said"),
    [(5, "", "key", True), (5, "key-2", "table", True), (5, "key-2", "key", False), (0, "", "key", False)],
    ids=["of an older version", "of another setting", "as before", "of nothing"],
)
def test_rows_that_may_move_to_another_partition_are_told_once(
    rows: int, placing: str, by: str, is_said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(ownership, "END_S", 0.0)
    begun_spool(tmp_path, rows=rows, placing=placing)
    script = Script(1, 5)
    with txmq.connect(AWAY, lazy=True) as client:
        for _ in range(2):
            read_on(client, script, settings(tmp_path, by=by), 0)
    assert caplog.text.count("may get another partition from here on") == is_said


def test_another_producers_spool_is_refused(tmp_path: Path) -> None:
    with WriteAheadSpool(str(tmp_path)) as spool:
        spool.append(("orders", 0), b"x", 1)
    with txmq.connect(AWAY, lazy=True) as client:
        publisher = OrderedPublisher(client, settings(tmp_path), lambda: False)
        with pytest.raises(BinlogError, match="messages of another producer"):
            publisher.open()
        publisher.close()


def test_a_message_aside_stops_the_reader(tmp_path: Path) -> None:
    begun_spool(tmp_path)
    with WriteAheadSpool(str(tmp_path)) as spool:
        spool.append(("orders", 2), b"x", 1)
        spool.park(spool.entries(1)[0], "damaged in the spool", renumber=False)
    with txmq.connect(AWAY, lazy=True) as client:
        publisher = OrderedPublisher(client, settings(tmp_path), lambda: False)
        with pytest.raises(BinlogError, match=r"a message aside.*topic orders, partition 2: damaged"):
            publisher.open()
        publisher.close()


def test_batches_and_notes_are_stored_together_or_not(tmp_path: Path) -> None:
    small = SpoolBatch(("orders", 0), b"x" * 600, 3, 0)
    with WriteAheadSpool(str(tmp_path), size_bytes_max=1024) as spool:
        spool.append_all([small], 1, [Note("a", 0, b"1"), Note("b", 2, b"c"), Note("b", 1, b"b")])
        with pytest.raises(SpoolFullError):
            spool.append_all([small], 1, [Note("a", 0, b"2")], ["b"])
        assert [list(spool.notes(name)) for name in "ab"] == [[b"1"], [b"b", b"c"]]
        assert spool.waiting == {("orders", 0): 3}
        spool.append_all([], 1, [Note("a", 0, b"2")], ["b"])
    with WriteAheadSpool(str(tmp_path), read_only=True) as spool:
        assert [list(spool.notes(name)) for name in "ab"] == [[b"2"], []]
        assert (spool.waiting, spool.size_bytes) == ({("orders", 0): 3}, 600)
