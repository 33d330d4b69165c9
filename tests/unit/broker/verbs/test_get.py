"""``get`` with its long polls, ``offset``, ``meta``: answers and errors of docs/protocol.md."""

from __future__ import annotations

import json

import pytest

from tools.images.node import Client
from tools.simulated.clock import START_MS
from txmq.broker.verbs.get import POLL_WAIT_MS_MAX
from txmq.errors import UnknownTopicError
from txmq.log import records

from ..support import node, put, restarted


def _read(client: Client, offset: int, size: int = 1 << 20, **extensions: int) -> list[int]:
    answer = client.ask("get", "a", 0, offset, size, extensions=extensions)
    assert answer.code == 200, answer
    return [message.offset for message in records.decode(answer.body, "a", 0)]


def test_get_begins_with_the_batch_that_holds_the_offset() -> None:
    client = node().connect()
    put(client, b"1", b"2", b"3")
    put(client, b"4")
    assert _read(client, 1) == [0, 1, 2, 3]
    assert _read(client, 3) == [3]


def test_get_brings_whole_batches_within_size_and_at_least_one() -> None:
    client = node().connect()
    for number in range(4):
        put(client, b"%d" % number, bytes(100))
    assert _read(client, 0, 1) == [0, 1]
    assert _read(client, 0, 500) == [0, 1, 2, 3]


def test_get_at_the_end_is_empty() -> None:
    client = node().connect()
    put(client)
    assert client.ask("get", "a", 0, 1, 1000).body == b""


@pytest.mark.parametrize("offset", [2, 10**19])
def test_get_beyond_the_end_is_refused(offset: int) -> None:
    client = node().connect()
    put(client)
    answer = client.ask("get", "a", 0, offset, 1000)
    assert (answer.code, answer.error) == (404, "offset-out-of-range")


def test_get_before_the_log_start_is_refused_with_both_ends() -> None:
    broker = node()
    client = broker.connect()
    client.ask("topic", "create", "c", extensions={"segment_size_bytes": 4096, "retention_size_bytes": 4096})
    for _ in range(4):
        put(client, bytes(3000), topic="c")
    broker.retire()
    answer = client.ask("get", "c", 0, 0, 1000)
    assert answer.error == "offset-out-of-range"
    assert "[2, 4]" in answer.text
    assert client.ask("offset", "c", 0, "earliest").text == "2 2 4\n"


def test_get_from_nowhere_is_refused() -> None:
    client = node().connect()
    assert client.ask("get", "x", 0, 0, 1000).error == "unknown-topic"
    assert client.ask("get", "a", 7, 0, 1000).error == "unknown-topic"


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


# --- long polls ------------------------------------------------------------------------------------------------------


def test_a_poll_waits_for_the_next_message() -> None:
    broker = node()
    client, writer = broker.connect(), broker.connect()
    waiting = client.send("get", "a", 0, 0, 1000, extensions={"wait": 500})
    broker.pump()
    assert waiting not in client.received
    put(writer, b"1")
    assert [m.value for m in records.decode(client.received[waiting].body, "a", 0)] == [b"1"]


def test_a_poll_wakes_only_after_the_force() -> None:
    broker = node(sync="never")
    client, writer = broker.connect(), broker.connect()
    waiting = client.send("get", "a", 0, 0, 1000, extensions={"wait": 500})
    assert put(writer, b"1").code == 200
    assert waiting not in client.received
    broker.force()
    broker.flush()
    assert client.received[waiting].body


def test_a_poll_ends_empty_when_its_time_is_over() -> None:
    broker = node()
    client = broker.connect()
    waiting = client.send("get", "a", 0, 0, 1000, extensions={"wait": 500})
    broker.clock.advance(0.499)
    broker.core.tick(broker.clock.now_ms())
    broker.flush()
    assert waiting not in client.received
    broker.clock.advance(0.001)
    broker.core.tick(broker.clock.now_ms())
    broker.flush()
    assert client.received[waiting] == (200, b"")
    assert broker.context.waiting_polls.count() == 0


def test_no_poll_waits_longer_than_the_limit() -> None:
    broker = node()
    client = broker.connect()
    waiting = client.send("get", "a", 0, 0, 1000, extensions={"wait": 4_000_000_000})
    broker.clock.advance(POLL_WAIT_MS_MAX / 1000)
    broker.core.tick(broker.clock.now_ms())
    broker.flush()
    assert waiting in client.received


def test_poll_that_waits_while_reading_is_closed_gets_nothing_more() -> None:
    broker = node()
    client, writer = broker.connect(), broker.connect()
    waiting = client.send("get", "a", 0, 0, 1000, extensions={"wait": 500})
    writer.ask("topic", "alter", "a", extensions={"accept_read": "false"})
    put(writer, b"1")
    assert client.received[waiting] == (200, b"")
    assert client.ask("get", "a", 0, 0, 1000, extensions={"wait": 500}).error == "topic-closed"


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


# --- offset and meta -------------------------------------------------------------------------------------------------


def test_offset_tells_both_ends() -> None:
    client = node().connect()
    put(client, b"1", b"2")
    assert client.ask("offset", "a", 0, "earliest").text == "0 0 2\n"
    assert client.ask("offset", "a", 0, "latest").text == "2 0 2\n"
    assert client.ask("offset", "a", 1, "latest").text == "0 0 0\n"


def test_offset_by_time_is_the_first_batch_not_older() -> None:
    client = node().connect()
    for number in range(3):
        put(client, b"1", b"2", time_ms=START_MS + 10 * number)
    found = [client.ask("offset", "a", 0, START_MS + ms).text.split()[0] for ms in (-5, 0, 1, 10, 20, 21)]
    assert found == ["0", "0", "2", "2", "4", "6"]


def test_offset_of_anything_else_is_refused() -> None:
    answer = node().connect().ask("offset", "a", 0, "0")
    assert answer.code == 200
    client = node().connect()
    client.send_bytes(b"offset a 0 newest 1\r\n")
    client.node.flush()
    assert client.received[b"1"].error == "bad-request"


def test_meta_describes_one_topic_or_all() -> None:
    client = node().connect()
    one = json.loads(client.ask("meta", "a").body)["topics"]
    assert [(topic["name"], topic["partitions"]) for topic in one] == [("a", 2)]
    assert [topic["name"] for topic in json.loads(client.ask("meta", "*").body)["topics"]] == ["a", "b"]
    assert client.ask("meta", "nobody").error == "unknown-topic"


def test_readers_find_after_a_restart_what_they_found_before() -> None:
    broker = node()
    client = broker.connect()
    put(client, b"1", b"2")
    put(client, b"3")
    before = client.ask("get", "a", 0, 0, 1 << 20)
    assert restarted(broker).connect().ask("get", "a", 0, 0, 1 << 20) == before
