"""``put``: answers and errors of docs/protocol.md, idempotent batches, closed topics, topics in memory."""

from __future__ import annotations

import pytest

from tools.images.node import Node
from tools.images.requests import batch, part
from txmq.broker.verbs.session_expiry import SESSION_IDLE_MS_MIN

from ..support import node, put, restarted, values


def test_a_put_is_answered_with_its_base_offset() -> None:
    client = node().connect()
    assert [put(client, b"1", b"2").text, put(client, b"3").text] == ["0\n", "2\n"]
    assert put(client, b"4", partition=1).text == "0\n"


def test_raw_put_makes_batch_of_its_value_and_key() -> None:
    broker = node()
    client = broker.connect()
    assert client.ask("put", "a", 0, extensions={"raw": None, "key": "42"}, body=b"hello").text == "0\n"
    (message,) = broker.messages(broker.partition("a"))
    assert (message.key, message.value, message.timestamp_ms) == (b"42", b"hello", broker.clock.now_ms())


def test_raw_put_without_key_has_none_and_may_be_empty() -> None:
    broker = node()
    assert broker.connect().ask("put", "a", 0, extensions={"raw": None}, body=b"").code == 200
    assert broker.messages(broker.partition("a"))[0].key is None


@pytest.mark.parametrize(("topic", "partition"), [("nobody", 0), ("a", 2), ("a", 99)])
def test_a_put_to_nowhere_is_refused(topic: str, partition: int) -> None:
    answer = put(node().connect(), topic=topic, partition=partition)
    assert (answer.code, answer.error) == (404, "unknown-topic")


@pytest.mark.parametrize("position", [0, 8, 16, 17, 21, 23, 57, 61, -1])
def test_batch_with_any_flipped_field_is_refused_without_a_trace(position: int) -> None:
    broker = node()
    client = broker.connect()
    damaged = bytearray(batch(b"value"))
    damaged[position] ^= 1
    answer = client.ask("put", "a", 0, body=damaged)
    assert (answer.code, answer.error) == (400, "invalid-batch")
    assert put(client).text == "0\n"


def test_key_without_raw_is_refused() -> None:
    answer = node().connect().ask("put", "a", 0, extensions={"key": "1"}, body=batch())
    assert (answer.code, answer.error) == (400, "bad-request")


def test_a_batch_over_its_limit_is_refused() -> None:
    client = node(batch_size_bytes_max=1024).connect()
    assert put(client, bytes(2000)).error == "too-large"
    assert client.ask("put", "a", 0, extensions={"raw": None}, body=bytes(500)).error == "too-large"
    assert put(client).text == "0\n"


# --- idempotent batches ----------------------------------------------------------------------------------------------


def test_a_repeated_batch_is_answered_as_before_and_stored_once() -> None:
    broker = node()
    client = broker.session()
    first = put(client, b"1", b"2", producer=1)
    assert put(client, b"3", producer=1, sequence=2).text == "2\n"
    assert put(client, b"1", b"2", producer=1) == first
    assert values(broker) == [b"1", b"2", b"3"]
    assert broker.context.counters.duplicates == 1


def test_duplicate_is_known_after_restart_and_after_checkpoint() -> None:
    broker = node()
    client = broker.session()
    put(client, b"1", producer=1)
    broker.checkpoint()
    put(client, b"2", producer=1, sequence=1)
    broker = restarted(broker)
    client = broker.session("1.0")
    assert put(client, b"1", producer=1).text == "0\n"
    assert put(client, b"2", producer=1, sequence=1).text == "1\n"
    assert put(client, b"3", producer=1, sequence=2).text == "2\n"
    assert values(broker) == [b"1", b"2", b"3"]


def test_a_duplicate_of_another_partition_is_none() -> None:
    client = node().session()
    put(client, b"1", producer=1)
    assert put(client, b"1", producer=1, partition=1).text == "0\n"


@pytest.mark.parametrize("sequence", [1, 2, 7])
def test_a_gap_is_refused_and_leaves_no_trace(sequence: int) -> None:
    broker = node()
    client = broker.session()
    answer = put(client, producer=1, sequence=sequence)
    assert (answer.code, answer.error) == (409, "sequence")
    assert put(client, b"first", producer=1).text == "0\n"


def test_a_repeat_with_other_content_is_refused() -> None:
    client = node().session()
    put(client, b"1", producer=1)
    answer = put(client, b"other", producer=1)
    assert (answer.code, answer.error) == (409, "sequence")


def test_more_than_in_flight_max_batches_ago_is_refused() -> None:
    client = node(in_flight_max=2).session()
    for sequence in range(3):
        assert put(client, b"%d" % sequence, producer=1, sequence=sequence).code == 200
    assert put(client, b"1", producer=1, sequence=1).text == "1\n"
    assert put(client, b"0", producer=1, sequence=0).error == "sequence"


def test_duplicate_is_answered_by_closed_topic_and_on_full_disk() -> None:
    broker = node()
    client = broker.session()
    put(client, b"1", producer=1)
    client.ask("topic", "alter", "a", extensions={"accept_publish": "false"})
    broker.context.disk_full = True
    assert put(client, b"1", producer=1).text == "0\n"
    assert put(client, b"2", producer=1, sequence=1).error == "topic-closed"


def test_a_producer_id_needs_its_session() -> None:
    broker = node()
    owner, other = broker.session(), broker.session()
    assert put(broker.connect(), producer=1).error == "other-session"
    assert put(other, producer=1).error == "other-session"
    assert put(owner, producer=1).code == 200


def test_an_old_epoch_is_fenced() -> None:
    answer = put(node().session(), producer=1, epoch=1)
    assert (answer.code, answer.error) == (410, "fenced")


def test_a_producer_id_without_a_sequence_is_refused() -> None:
    client = node().session()
    assert client.ask("put", "a", 0, body=batch(producer=1, sequence=-1)).error == "invalid-batch"


# --- closed topics and topics in memory ------------------------------------------------------------------------------


def test_closed_topic_refuses_puts_and_parts_and_is_read() -> None:
    broker = node()
    client = broker.session()
    put(client, b"1")
    client.ask("topic", "alter", "a", extensions={"accept_publish": "false"})
    refused = put(client, b"2")
    assert (refused.code, refused.error) == (403, "topic-closed")
    body = part("a", 0, batch())
    assert client.ask("commit", broker.txid(1, 1), body=body).error == "topic-closed"
    assert client.ask("get", "a", 0, 0, 1000).body[-1:] == b"\x00"
    client.ask("topic", "alter", "a", extensions={"accept_publish": "true"})
    assert put(client, b"2").text == "1\n"


def test_a_topic_closed_for_reading_takes_puts_only() -> None:
    client = node().connect()
    client.ask("topic", "alter", "a", extensions={"accept_read": "false"})
    assert put(client).code == 200
    assert client.ask("get", "a", 0, 0, 1000).error == "topic-closed"
    assert client.ask("offset", "a", 0, "latest").error == "topic-closed"


def test_topic_in_memory_tells_duplicates_and_is_empty_after_restart() -> None:
    broker = node()
    client = broker.session()
    client.ask("topic", "create", "m", extensions={"storage": "memory"})
    assert [put(client, b"%d" % n, topic="m", producer=1, sequence=n).text for n in range(3)] == ["0\n", "1\n", "2\n"]
    assert put(client, b"2", topic="m", producer=1, sequence=2).text == "2\n"
    assert values(broker, "m") == [b"0", b"1", b"2"]
    broker = restarted(broker)
    client = broker.session("1.0")
    assert values(broker, "m") == []
    assert put(client, b"3", topic="m", producer=1, sequence=3).code == 200
    assert put(client, b"4", topic="m", producer=1, sequence=4).code == 200


def test_topic_in_memory_continues_its_offsets_from_the_checkpoint() -> None:
    broker = node()
    client = broker.session()
    client.ask("topic", "create", "m", extensions={"storage": "memory"})
    for number in range(3):
        put(client, b"%d" % number, topic="m", producer=1, sequence=number)
    broker.checkpoint()
    put(client, b"after the checkpoint", topic="m")
    broker = restarted(broker)
    client = broker.session("1.0")
    assert client.ask("offset", "m", 0, "earliest").text == "3 3 3\n"
    assert put(client, b"3", topic="m", producer=1, sequence=7).text == "3\n"
    assert values(broker, "m") == [b"3"]


def test_topic_in_memory_wakes_polls_and_stays_out_of_transactions() -> None:
    broker = node()
    client = broker.session()
    client.ask("topic", "create", "m", extensions={"storage": "memory"})
    waiting = client.send("get", "m", 0, 0, 1000, extensions={"wait": 1000})
    put(client, b"1", topic="m")
    assert client.received[waiting].body
    assert client.ask("commit", broker.txid(1, 1), body=part("m", 0, batch())).error == "bad-request"


def _write_and_leave(broker: Node, *partitions: int) -> int:
    client = broker.session()
    number = broker.newest_session
    for partition in partitions:
        assert put(client, partition=partition, producer=number).code == 200
    client.disconnect()
    return number


def test_producers_that_are_away_make_room_for_sequences() -> None:
    broker = node(sequences_max=3)
    idle, eldest, younger = _write_and_leave(broker), _write_and_leave(broker, 0, 1), _write_and_leave(broker, 0)
    broker.clock.advance(SESSION_IDLE_MS_MIN / 1000)
    client = broker.session()
    number = broker.newest_session
    assert put(client, partition=1, producer=number).code == 200
    assert sorted(broker.state.sessions) == [idle, younger, number]
    assert put(client, partition=1, producer=number, sequence=1).code == 200
    assert broker.state.sequences.count == 2
    again = restarted(broker)
    assert (again.state.sequences.count, sorted(again.state.sequences.produced_in)) == (2, [younger, number])
    assert eldest not in again.state.sessions


@pytest.mark.parametrize("checkpoint", [False, True])
def test_producers_that_are_there_refuse_more_sequences(checkpoint: bool) -> None:
    broker = node(sequences_max=2)
    client = broker.session()
    assert put(client, producer=1).code == put(client, partition=1, producer=1).code == 200
    refused = put(client, topic="b", producer=1)
    assert (refused.code, refused.error, "sequences_max" in refused.text) == (429, "overloaded", True)
    assert put(client, producer=1, sequence=1).code == 200  # of these it has sequences
    assert put(broker.connect(), topic="b").code == 200  # without a producer there are none
    if checkpoint:
        broker.checkpoint()
    broker = restarted(broker)
    client = broker.session("1.0")
    assert put(client, topic="b", producer=1).code == 429
    assert broker.connect().ask("topic", "delete", "a").code == 200
    assert broker.state.sequences.count == 0
    assert put(client, topic="b", producer=1).code == 200
