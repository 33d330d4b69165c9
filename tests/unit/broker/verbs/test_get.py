"""Reads that fail or are overtaken, and polls of connections and brokers that end."""

from __future__ import annotations

import pytest

from txmq.errors import UnknownTopicError

from ..support import node, put


def test_damaged_segment_is_an_internal_error_and_affects_no_other() -> None:
    broker = node()
    client = broker.connect()
    put(client, b"1")
    put(client, b"1", partition=1)
    broker.disk.unlink(broker.partition("a").segment_path(0))
    broker.store.files.close()
    opaque = client.send("get", "a", 0, 0, 1000)
    (read,) = broker.core.take_reads()
    with pytest.raises(Exception, match="missing") as damage:
        read.partition.read(broker.store.files, 0, 1000)
    broker.core.could_not(client.client, opaque, damage.value)
    broker.flush()
    assert (client.received[opaque].code, client.received[opaque].error) == (500, "internal-error")
    assert client.ask("get", "a", 1, 0, 1000).code == 200


def test_polls_of_a_lost_connection_are_forgotten() -> None:
    broker = node()
    client = broker.connect()
    client.send("get", "a", 0, 0, 1000, extensions={"wait": 500})
    client.disconnect()
    broker.clock.advance(0.5)
    broker.core.tick(broker.clock.now_ms())
    assert (len(broker.context.waiting_polls), broker.partition("a").waiters) == (0, None)
    assert not broker.partition("a").waiters  # nor where it waited: nothing may ever come there
    put(broker.connect())
    assert broker.core.take_reads() == []


def test_read_overtaken_by_its_topics_deletion_finds_no_topic() -> None:
    broker = node()
    client = broker.connect()
    put(client)
    client.send("get", "a", 0, 0, 1000)
    (read,) = broker.core.take_reads()
    assert broker.connect().ask("topic", "delete", "a").code == 200
    with pytest.raises(UnknownTopicError, match="'a' was deleted"):
        read.partition.read(broker.store.files, 0, 1000)
    with pytest.raises(UnknownTopicError, match="'a' was deleted"):
        read.partition.offset_for(broker.store.files, 0)


def test_a_stopping_broker_lets_polls_go() -> None:
    broker = node()
    client = broker.connect()
    waiting = client.send("get", "a", 0, 0, 1000, extensions={"wait": 5000})
    broker.context.stopping = True
    broker.core.tick(broker.clock.now_ms())
    broker.flush()
    assert client.received[waiting] == (200, b"")


def test_reader_that_is_gone_before_files_are_written_is_forgotten() -> None:
    broker = node()
    reader = broker.connect()
    broker.hold_apply()
    assert put(broker.connect(), b"1").code == 200
    reader.send("get", "a", 0, 1, 1000, extensions={"wait": 1000})
    reader.disconnect()
    broker.let_go()
    assert not broker.partition("a").waiters
    assert not broker.context.unapplied


def test_read_does_not_wait_for_a_full_disk() -> None:
    broker = node()
    reader = broker.connect()
    broker.hold_apply()
    assert put(broker.connect(), bytes(5000)).code == 200
    opaques = [reader.send("offset", "a", 0, "latest")]
    broker.flush()
    assert opaques[0] not in reader.received
    broker.disk.set_free_bytes(0)
    broker.let_go()
    opaques.append(reader.send("offset", "a", 0, "latest"))
    broker.flush()
    assert [reader.received[opaque].text for opaque in opaques] == ["0 0 0\n"] * 2
