"""A process forks inside a block, and the child leaves it: what the parent has decided, or will, stands."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial

import pytest

import txmq
from tests.services.consumer.consuming import delivered
from tools.crash.directory import ORDERS, CampaignDirectory
from txmq.client.transaction import block
from txmq.runtime import crashpoints
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess


class ChangedMindError(Exception):
    """The parent's reason to leave."""


LEFT = {KeyError: 3, txmq.errors.TransactionStateError: 4}  # by what it left: its exit status


@pytest.fixture(autouse=True)
def _no_hook_stays() -> Iterator[None]:
    yield
    crashpoints.set_hook(None)


class Fork:
    """A child that waits for a word, leaves the block, and ends."""

    def __init__(self, *, raises: bool) -> None:
        self._raises, self.status = raises, -1
        self._pid, (self._heard, self._said) = 0, os.pipe()

    def is_here(self) -> bool:
        """Fork, in the block. True in the parent; in the child, later, False, or it raises."""
        self._pid = os.fork()
        if self._pid:
            return True
        os.close(self._said)  # so that a parent that fails ends the child's wait
        os.read(self._heard, 1)
        if self._raises:
            raise KeyError
        return False

    def leave(self) -> None:
        """In the parent: have the child leave, and wait for its end."""
        os.write(self._said, b".")
        self.status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def play(self, work: Callable[[], None]) -> None:
        """Do ``work``, which reaches ``is_here``; the child does not come back from it."""
        parent = os.getpid()
        try:
            work()
        except BaseException as error:
            if os.getpid() != parent:
                os._exit(LEFT.get(type(error), 5))
            raise
        finally:
            if os.getpid() != parent:
                os._exit(6)
            os.close(self._heard)
            os.close(self._said)


@pytest.mark.parametrize("stream_at_bytes", [0, 1 << 20])
def test_child_that_leaves_block_undoes_nothing_of_its_parents(
    broker: BrokerProcess, campaign: CampaignDirectory, monkeypatch: pytest.MonkeyPatch, stream_at_bytes: int
) -> None:
    """Found: its prepare was refused, so it rolled back, where the database of its parent had committed."""
    monkeypatch.setattr(block, "_STREAM_AT_BYTES", stream_at_bytes)
    database, names = campaign.resource(), ["one", "two"]

    def take_order(client: txmq.Client, name: str, fork: Fork) -> None:
        with client.producer().transaction(database) as tx:
            tx.connection(database).execute("INSERT INTO orders (rowid_text, key) VALUES (?, 'k')", (name,))
            tx.send(ORDERS, name.encode())
            if fork.is_here():
                crashpoints.set_hook(lambda point: fork.leave() if point == "client.tx.db_committed" else None)
        assert tx.outcome is txmq.Outcome.COMMITTED

    with txmq.connect(broker.address) as client:
        for name, raises in zip(names, (False, True), strict=True):
            fork = Fork(raises=raises)
            fork.play(partial(take_order, client, name, fork))
            assert fork.status == LEFT[KeyError if raises else txmq.errors.TransactionStateError]
        assert [message.value for message in client.browse(ORDERS)] == [b"one", b"two"]
    assert [row for row, _ in campaign.rows()["orders-db"]] == names


def test_a_child_cannot_join_its_parents_block(broker: BrokerProcess, campaign: CampaignDirectory) -> None:
    """What it sends there would be gone without a word."""
    fork = Fork(raises=False)
    with txmq.connect(broker.address) as client:
        producer = client.producer()

        def work() -> None:
            with producer.transaction():
                producer.send(ORDERS, b"parent's")
                if fork.is_here():
                    fork.leave()
                else:
                    producer.send(ORDERS, b"child's")
                    os._exit(0)

        fork.play(work)
        assert fork.status == LEFT[txmq.errors.TransactionStateError]
        assert [message.value for message in client.browse(ORDERS)] == [b"parent's"]
    assert campaign.rows()["orders-db"] == []


def test_child_that_leaves_a_half_message_block_decides_nothing(
    broker: BrokerProcess, campaign: CampaignDirectory
) -> None:
    fork, answers = Fork(raises=False), [txmq.Resolution.UNKNOWN]
    with txmq.connect(broker.address) as client:
        producer = client.producer(group="shop", checker=lambda _: answers[0])

        def work() -> None:
            with producer.half(ORDERS, b"one") as half:
                if fork.is_here():
                    fork.leave()
                    assert client.outcome(half.txid) is txmq.Outcome.UNKNOWN
                    answers[0] = txmq.Resolution.ROLLBACK
                    raise ChangedMindError

        with pytest.raises(ChangedMindError):
            fork.play(work)
        assert fork.status == LEFT[txmq.errors.TransactionStateError]
        assert list(client.browse(ORDERS)) == []
    assert campaign.rows()["orders-db"] == []


@pytest.mark.parametrize("use", [None, "poll", "ack", "reject"])
def test_child_that_leaves_consumers_block_takes_nothing_from_parent(
    broker: BrokerProcess, campaign: CampaignDirectory, use: str | None
) -> None:
    """Found: it left the group in its parent's name, and another member was given what its parent had in hand."""
    fork = Fork(raises=False)
    with txmq.connect(broker.address) as client:
        client.producer().send_many(ORDERS, [(b"k", b"%d" % number) for number in range(20)])

        def work() -> None:
            with client.consumer("billing", [ORDERS]) as consumer:
                messages = delivered(consumer, 20)
                if fork.is_here():
                    with client.consumer("billing", [ORDERS]) as other:
                        eventually(lambda: len(client.groups.describe("billing")["members"]) == 2, "both have joined")
                        fork.leave()
                        assert other.poll(timeout=1.0) == []
                        for message in messages:
                            message.ack(sync=message is messages[-1])
                elif use == "poll":
                    consumer.poll(timeout=0.0)
                elif use is not None:
                    getattr(messages[0], use)()
                else:
                    raise KeyError

        fork.play(work)
        assert fork.status == (LEFT[KeyError] if use is None else 5)
        assert client.groups.describe("billing")["partitions"][0]["offset"] == 20
