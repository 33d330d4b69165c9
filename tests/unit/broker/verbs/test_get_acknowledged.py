"""A read that begins after an acknowledgement finds the message, whenever its partition files are written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tools.images.node import Client, Node
from tools.images.requests import batch, part
from txmq.broker.commit.steps import Apply, Step
from txmq.log import records

from ..support import node


def run_until_apply(of: Node) -> Apply:
    """Run what is due, up to the step that writes partition files: everything before it is acknowledged."""
    while (step := of.next_step()) is not None:
        if isinstance(step, Apply):
            return step
        run(of, step)
    raise AssertionError("nothing is to be applied")


def run(of: Node, step: Step) -> None:
    step.run()
    of.step_done(step)


@contextmanager
def acknowledged(of: Node, *values: bytes, partition: int = 0) -> Iterator[None]:
    """A put is acknowledged; its partition files are written when the block ends."""
    producer = of.connect()
    opaque = producer.send("put", "a", partition, body=batch(*values))
    step = run_until_apply(of)
    assert producer.received[opaque].code == 200
    yield
    run(of, step)
    of.run_steps()


@pytest.mark.parametrize("when", ["latest", "earliest"])
def test_offset_tells_an_end_behind_what_was_acknowledged(when: str) -> None:
    broker = node()
    reader = broker.connect()
    with acknowledged(broker, b"1", b"2"):
        opaque = reader.send("offset", "a", 0, when)
        broker.flush()
        assert opaque not in reader.received
    assert reader.received[opaque].text.split()[1:] == ["0", "2"]


def test_offset_for_a_time_finds_what_was_acknowledged() -> None:
    broker = node()
    reader = broker.connect()
    with acknowledged(broker, b"1", b"2"):
        opaque = reader.send("offset", "a", 0, 0)
        broker.flush()
    assert reader.received[opaque].text == "0 0 2\n"


@pytest.mark.parametrize("extensions", [{}, {"wait": 1000}])
@pytest.mark.parametrize("offset", [0, 1])
def test_get_finds_what_was_acknowledged(offset: int, extensions: dict[str, int]) -> None:
    broker = node()
    reader = broker.connect()
    with acknowledged(broker, b"1", b"2"):
        opaque = reader.send("get", "a", 0, offset, 1000, extensions=extensions)
        broker.flush()
    answer = reader.received[opaque]
    assert (answer.code, [m.value for m in records.decode(answer.body, "a", 0)]) == (200, [b"1", b"2"])


def test_get_beyond_what_was_acknowledged_is_refused() -> None:
    broker = node()
    reader = broker.connect()
    with acknowledged(broker, b"1"):
        opaque = reader.send("get", "a", 0, 2, 1000)
        broker.flush()
    assert reader.received[opaque].error == "offset-out-of-range"
    assert broker.context.counters.get_requests == 1


def test_committed_transaction_is_found_too() -> None:
    broker = node()
    owner, reader = broker.session(), broker.connect()
    opaque = owner.send("commit", broker.txid(1, 1), body=part("a", 0, batch(b"1")) + part("a", 1, batch(b"2")))
    step = run_until_apply(broker)
    assert owner.received[opaque].code == 200
    asked = [reader.send("offset", "a", number, "latest") for number in (0, 1)]
    broker.flush()
    run(broker, step)
    assert [reader.received[one].text for one in asked] == ["1 0 1\n", "1 0 1\n"]


def test_reads_elsewhere_and_below_the_watermark_do_not_wait() -> None:
    broker = node()
    reader = broker.connect()
    assert reader.ask("put", "a", 0, body=batch(b"0")).code == 200
    with acknowledged(broker, b"1"):
        assert ask_now(broker, reader, "offset", "a", 1, "latest") == b"0 0 0\n"
        content = ask_now(broker, reader, "get", "a", 0, 0, 1000)
        assert [message.offset for message in records.decode(content, "a", 0)] == [0]


def ask_now(of: Node, client: Client, verb: str, *arguments: str | int) -> bytes:
    opaque = client.send(verb, *arguments)
    of.flush()
    return client.received[opaque].body


def test_read_waits_for_nothing_that_is_acknowledged_later() -> None:
    broker = node()
    reader, producer = broker.connect(), broker.connect()
    with acknowledged(broker, b"1"):
        opaque = reader.send("offset", "a", 0, "latest")
        producer.send("put", "a", 0, body=batch(b"2"))
        while (step := broker.next_step()) is not None:
            run(broker, step)
        assert opaque not in reader.received
        later = reader.send("offset", "a", 0, "latest")
    assert reader.received[opaque].text == "1 0 1\n"
    assert reader.received[later].text == "2 0 2\n"


def test_read_does_not_wait_for_a_full_disk() -> None:
    broker = node()
    reader = broker.connect()
    with acknowledged(broker, bytes(5000)):
        opaque = reader.send("offset", "a", 0, "latest")
        broker.disk.set_free_bytes(0)
    assert reader.received[opaque].text == "0 0 0\n"
    assert ask_now(broker, reader, "offset", "a", 0, "latest") == b"0 0 0\n"


def test_read_of_a_topic_that_is_deleted_meanwhile_is_refused() -> None:
    broker = node()
    reader = broker.connect()
    with acknowledged(broker, b"1"):
        opaque = reader.send("get", "a", 0, 0, 1000)
        reader.send("topic", "delete", "a")
    assert reader.received[opaque].error == "unknown-topic"


def test_reader_that_is_gone_is_forgotten() -> None:
    broker = node()
    reader = broker.connect()
    with acknowledged(broker, b"1"):
        reader.send("get", "a", 0, 1, 1000, extensions={"wait": 1000})
        reader.disconnect()
    assert not broker.partition("a").waiters
    assert not broker.context.unapplied
