"""Where a checkpoint belongs: the record that says so, and what makes one due."""

from __future__ import annotations

from tools.images.node import Node
from tools.images.requests import batch
from txmq.broker.commit.checkpointer import RETRY_S
from txmq.redo import entries, inspect
from txmq.redo.checkpoint import path_of
from txmq.redo.record_format import record_size

from ..support import node, prepare, put, restarted, values


def taken_at(of: Node) -> list[int]:
    """Ends of the records whose last entry says that a checkpoint is taken there."""
    found = []
    for record in inspect.dump(of.disk):
        kinds = [kind for kind, _, _ in entries.split(record.payload)]
        assert entries.CHECKPOINT not in kinds[:-1]
        if kinds[-1:] == [entries.CHECKPOINT]:
            found.append(record.header.lsn + record_size(len(record.payload)))
    return found


def test_checkpoint_belongs_to_the_record_that_says_so() -> None:
    broker = node()
    for count in (1, 2):
        put(broker.connect(), b"1")
        broker.checkpoint()
        assert taken_at(broker)[count - 1 :] == [broker.store.checkpoint_lsn]
    assert restarted(broker).recovered.records == 0


def test_idle_broker_takes_no_checkpoint_of_its_own_marks() -> None:
    broker = node()
    put(broker.connect(), b"1")
    for _ in range(5):
        broker.mark()
        broker.clock.advance(broker.settings.checkpoint_interval_ms / 1000)
        broker.run_steps()
    assert len(taken_at(broker)) == 1


def test_broker_that_recovered_takes_a_checkpoint_by_time() -> None:
    broker = node()
    put(broker.connect(), b"1")
    again = restarted(broker)
    assert again.recovered.records > 0
    again.clock.advance(again.settings.checkpoint_interval_ms / 1000)
    again.run_steps()
    assert restarted(again).recovered.records == 0


def test_checkpoint_that_is_there_is_not_written_again() -> None:
    broker = node()
    client = broker.session()
    prepare(client, broker.txid(1, 1), ("a", 1, batch(b"held")))
    broker.checkpoint()
    older = broker.store.checkpoint_lsn
    assert client.ask("commit", broker.txid(1, 1), body=b"").code == 200
    for _ in range(3):
        broker.checkpoint()  # once more would let go of payloads that the older one names
    broker.disk.damage(path_of(broker.store.checkpoint_lsn), 3, b"?")
    again = restarted(broker)
    assert again.store.checkpoint_lsn == older
    assert values(again, partition=1) == [b"held"]


def test_checkpoint_that_is_tried_again_makes_the_journal_no_longer() -> None:
    broker = node()
    put(broker.connect(), b"1")
    before = broker.store.checkpoint_lsn
    broker.disk.set_free_bytes(0)
    for _ in range(5):
        broker.pipeline.want_checkpoint()
        broker.run_steps()
        broker.mark()
        broker.clock.advance(RETRY_S)
    assert (len(taken_at(broker)), broker.store.checkpoint_lsn) == (1, before)
    broker.disk.set_free_bytes(1 << 20)
    broker.checkpoint()
    assert taken_at(broker) == [broker.store.checkpoint_lsn]
    again = restarted(broker)
    assert (again.recovered.records, again.partition("a").high_watermark) == (0, 1)
