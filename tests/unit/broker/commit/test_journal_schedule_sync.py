"""With ``sync = interval`` a reader that waits has what was acknowledged forced; records are written during a sync."""

from __future__ import annotations

import pytest

from tools.images.node import Client, Node
from tools.images.requests import batch
from txmq.broker.commit import journal_schedule
from txmq.broker.commit.steps import Append, Apply, Mark, Sync
from txmq.config import BrokerSettings
from txmq.log import records

from ..support import node, put, values

LONG_MS = 60_000


def relaxed(**changes: object) -> Node:
    """A broker that syncs seldom."""
    return node(sync="interval", sync_interval_ms=LONG_MS, **changes)


def poll(client: Client, offset: int, partition: int = 0) -> bytes:
    """Wait for a message."""
    return client.send("get", "a", partition, offset, 1000, extensions={"wait": 30_000})


def begin_sync(of: Node) -> Sync:
    """A sync that is under way: forced, and not reported yet."""
    step = of.next_step()
    assert type(step) is Sync
    step.run()
    return step


def syncing(**changes: object) -> tuple[Node, Client, Sync]:
    """A broker, one acknowledged message, and its sync under way; no reader waits."""
    broker = relaxed(**changes)
    client = broker.session()
    assert put(client, b"first").code == 200
    assert values(broker) == []
    broker.pipeline.want_sync()
    return broker, client, begin_sync(broker)


def test_put_that_a_reader_waits_for_is_seen_at_once() -> None:
    broker = relaxed()
    reader, writer = broker.connect(), broker.session()
    waiting = poll(reader, 0)
    assert put(writer, b"1").code == 200
    assert [m.value for m in records.decode(reader.received[waiting].body, "a", 0)] == [b"1"]


def test_it_is_acknowledged_before_it_is_forced() -> None:
    broker = relaxed()
    reader, writer = broker.connect(), broker.session()
    poll(reader, 0)
    broker.pump()
    opaque = writer.send("put", "a", 0, body=batch(b"1"))
    step = broker.next_step()
    assert isinstance(step, Append)
    step.run()
    broker.step_done(step)
    assert writer.received[opaque].code == 200
    assert values(broker) == []
    assert type(broker.next_step()) is Sync


def test_reader_behind_the_acknowledgement_sees_it_at_once() -> None:
    broker = relaxed()
    reader, writer = broker.connect(), broker.session()
    assert put(writer, b"1").code == 200
    assert values(broker) == []
    waiting = poll(reader, 0)
    broker.pump()
    assert [m.value for m in records.decode(reader.received[waiting].body, "a", 0)] == [b"1"]


@pytest.mark.parametrize("sync", ["interval", "never"])
def test_nothing_is_forced_early_for_nobody(sync: str) -> None:
    broker = relaxed() if sync == "interval" else node(sync=sync)
    reader, writer = broker.connect(), broker.session()
    syncs = broker.context.counters.syncs
    poll(reader, 0, partition=1 if sync == "interval" else 0)  # of another partition; never is never
    assert put(writer, b"1").code == 200
    assert put(writer, b"2").code == 200
    assert values(broker) == []
    assert broker.context.counters.syncs == syncs


def test_reader_that_was_served_has_nothing_forced() -> None:
    broker = relaxed()
    reader, writer = broker.connect(), broker.session()
    poll(reader, 0)
    put(writer, b"1")
    syncs = broker.context.counters.syncs
    put(writer, b"2")
    assert values(broker) == [b"1"]
    assert broker.context.counters.syncs == syncs


def test_puts_are_acknowledged_beside_a_sync() -> None:
    broker, client, sync = syncing()
    assert put(client, b"second").code == 200
    assert values(broker) == [b"first"]  # which was forced; the second was written when the sync had begun
    broker.step_done(sync)
    assert values(broker) == [b"first"]


def test_sync_takes_along_what_is_written_before_its_end() -> None:
    broker = relaxed()
    client = broker.session()
    put(client, b"first")
    broker.pipeline.want_sync()
    sync = broker.next_step()
    client.send("put", "a", 0, body=batch(b"second"))
    append = broker.next_step()
    assert isinstance(sync, Sync)
    assert isinstance(append, Append)
    append.run()
    sync.run()
    broker.step_done(append)
    assert put(client, b"third").code == 200  # nothing is unforced, and the end of the sync not reported
    broker.step_done(sync)
    broker.run_steps()
    assert values(broker) == [b"first", b"second"]


def test_next_sync_begins_when_the_last_has_ended() -> None:
    broker, client, sync = syncing()
    poll(broker.connect(), 0)
    put(client, b"second")
    assert broker.next_step() is None
    broker.step_done(sync)
    kinds = []
    while (step := broker.next_step()) is not None:
        kinds.append(type(step))
        step.run()
        broker.step_done(step)
    assert kinds == [Sync, Apply]
    assert values(broker) == [b"first", b"second"]


def test_reader_that_comes_during_a_sync_gets_another() -> None:
    broker, client, sync = syncing()
    put(client, b"second")  # for nobody
    reader = broker.connect()
    waiting = poll(reader, 1)
    put(client, b"of another partition", partition=1)
    broker.step_done(sync)
    broker.run_steps()
    assert reader.received[waiting].body
    assert values(broker) == [b"first", b"second"]


def test_what_needs_a_sync_waits_for_the_one_under_way() -> None:
    broker, client, sync = syncing()
    opaque = client.send("topic", "create", "t")
    broker.run_steps()
    assert opaque not in client.received
    broker.step_done(sync)
    broker.run_steps()
    assert client.received[opaque].code == 200


def test_answer_from_memory_waits_for_what_it_tells() -> None:
    broker, client, sync = syncing()
    put(client, b"second")
    opaque = client.send("meta", "a")
    third = client.send("put", "a", 0, body=batch(b"third"))
    broker.run_steps()
    assert opaque not in client.received
    broker.step_done(sync)
    broker.run_steps()
    assert client.received[opaque].code == client.received[third].code == 200


def test_group_for_a_new_journal_file_waits() -> None:
    broker, client, sync = syncing()
    large = batch(bytes(broker.store.journal.payload_size_bytes_max - 200))
    assert not broker.store.journal.has_room(len(large))
    opaque = client.send("put", "a", 0, body=large)
    broker.run_steps()
    assert opaque not in client.received
    broker.step_done(sync)
    broker.run_steps()
    assert client.received[opaque].code == 200


def test_what_is_written_beside_a_sync_is_bounded() -> None:
    broker, client, sync = syncing(sync_interval_messages=3)
    opaques = []
    for number in range(5):
        opaques.append(client.send("put", "a", 0, body=batch(b"%d" % number)))
        broker.run_steps()
    assert [opaque in client.received for opaque in opaques] == [True] * 3 + [False] * 2
    broker.step_done(sync)
    broker.run_steps()
    assert all(client.received[opaque].code == 200 for opaque in opaques)


def test_a_mark_is_not_starved_by_syncs_for_readers() -> None:
    broker, client, sync = syncing()
    put(client, b"second")
    broker.pipeline.want_mark()
    assert broker.next_step() is None
    broker.step_done(sync)
    steps = []
    while (step := broker.next_step()) is not None:
        step.run()
        broker.step_done(step)
        steps.append(type(step))
    assert Mark in steps


def test_bytes_that_wait_for_a_sync_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_schedule, "UNSYNCED_BYTES_MAX", 100)
    due, broker = journal_schedule.SyncSchedule(BrokerSettings(sync="never")), relaxed()
    broker.session().send("put", "a", 0, body=batch(bytes(200)))
    group = broker.core.seal()
    assert not due.is_due(0.0, group)
    assert due.may_follow(group)
    due.written(group, 0.0)
    assert due.is_due(0.0, group)
    assert not due.may_follow(group)
    due.began()
    assert not due.is_due(0.0, group)
