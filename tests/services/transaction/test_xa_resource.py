"""The broker as a resource of a foreign transaction manager: a real broker, disconnects, restarts, operators."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

import txmq
from txmq import Xid
from txmq.client.transaction.xa_resource import BrokerXAResource
from txmq.testing.processes.broker import BrokerProcess
from txmq.xa import XACode, XAFlag


def xid(number: int) -> Xid:
    return Xid(4711, b"manager\x00%d" % number, b"\xff\x00branch")


class Manager:
    """A client with a transaction manager on top."""

    def __init__(self, broker: BrokerProcess) -> None:
        self.client = txmq.connect(broker.address)
        self.producer = self.client.producer()
        self.resource: BrokerXAResource = self.client.xa_resource()

    def work(self, number: int, value: bytes) -> Xid:
        """A branch that has sent a message and is idle."""
        self.resource.start(xid(number))
        result = self.producer.send("orders", value, key=b"42")
        assert result.status is txmq.SendStatus.PENDING
        self.resource.end(xid(number))
        return xid(number)

    def prepared(self, number: int, value: bytes) -> Xid:
        """One that is prepared."""
        found = self.work(number, value)
        assert self.resource.prepare(found) is XACode.XA_OK
        return found

    def visible(self) -> list[bytes | None]:
        """What readers see."""
        return [message.value for message in self.client.browse("orders")]

    def refused(self, call: str, of: Xid) -> int:
        """The code of the XAError that a call raises."""
        with pytest.raises(txmq.errors.XAError) as caught:
            getattr(self.resource, call)(of)
        return caught.value.xa_code


@pytest.fixture
def manager(broker: BrokerProcess) -> Iterator[Manager]:
    opened = Manager(broker)
    opened.client.topics.create("orders")
    yield opened
    opened.client.close()


def test_messages_between_start_and_end_are_out_after_both_phases(manager: Manager) -> None:
    branch = manager.prepared(1, b"two phases")
    manager.producer.send("orders", b"alone", key=b"42")  # the thread is not associated any more
    assert manager.visible() == [b"alone"]
    [row] = manager.client.transactions.list()
    assert (row["kind"], row["xid"]) == ("foreign", f"4711.{branch.gtrid.hex()}.{branch.bqual.hex()}")
    assert manager.resource.commit(branch) is XACode.XA_OK
    one_phase = manager.work(2, b"one phase")
    assert manager.resource.commit(one_phase, XAFlag.TMONEPHASE) is XACode.XA_OK
    assert manager.visible() == [b"alone", b"two phases", b"one phase"]
    assert manager.resource.rollback(manager.prepared(3, b"never")) is XACode.XA_OK
    assert manager.refused("commit", xid(3)) == XACode.XAER_NOTA
    assert (len(manager.visible()), manager.resource.recover()) == (3, [])


def test_disconnect_rolls_back_the_unprepared_and_keeps_the_prepared(manager: Manager, broker: BrokerProcess) -> None:
    kept, gone = manager.prepared(1, b"kept"), manager.work(2, b"gone")
    manager.client.close()
    other = Manager(broker)
    assert other.resource.recover() == [kept]
    assert other.refused("commit", gone) == XACode.XAER_NOTA
    assert other.resource.commit(kept) is XACode.XA_OK
    assert other.visible() == [b"kept"]
    other.client.close()


def test_parts_sent_ahead_are_gone_with_the_connection(manager: Manager, broker: BrokerProcess) -> None:
    manager.resource.start(xid(1))
    for _ in range(10):
        manager.producer.send("orders", bytes(1 << 20), key=b"42")
    assert manager.client.stats("transactions")
    manager.client.close()
    other = Manager(broker)
    assert (other.resource.recover(), other.visible()) == ([], [])
    manager.resource.end(xid(1))
    assert manager.refused("prepare", xid(1)) in (XACode.XAER_RMFAIL, XACode.XA_RBCOMMFAIL, XACode.XA_RBOTHER)
    other.client.close()


def test_after_a_restart_of_the_broker_the_manager_recovers(manager: Manager, broker: BrokerProcess) -> None:
    first, second = manager.prepared(1, b"first"), manager.prepared(2, b"second")
    broker.kill()
    broker.start()
    assert manager.resource.recover() == [first, second]
    assert manager.resource.commit(first) is XACode.XA_OK
    assert manager.resource.rollback(second) is XACode.XA_OK
    assert manager.visible() == [b"first"]


def test_an_operator_s_decision_is_told_until_it_is_forgotten(manager: Manager, broker: BrokerProcess) -> None:
    committed, rolled_back = manager.prepared(1, b"c"), manager.prepared(2, b"r")
    txids = [row["txid"] for row in manager.client.transactions.list()]
    manager.client.transactions.commit(txids[0], "the manager burnt")
    manager.client.transactions.rollback(txids[1], "the manager burnt")
    broker.kill()
    broker.start()
    other = Manager(broker)
    assert set(other.resource.recover()) == {committed, rolled_back}
    assert other.refused("rollback", committed) == XACode.XA_HEURCOM
    assert manager.refused("commit", committed) == XACode.XA_HEURCOM
    assert manager.refused("commit", rolled_back) == XACode.XA_HEURRB
    for branch in (committed, rolled_back):
        assert other.resource.forget(branch) is XACode.XA_OK
        assert other.refused("forget", branch) == XACode.XAER_NOTA
    assert (other.resource.recover(), other.client.transactions.list(state="all")) == ([], [])
    other.client.close()


def test_an_xid_that_is_prepared_is_not_used_twice(manager: Manager, broker: BrokerProcess) -> None:
    other = Manager(broker)
    raced = other.work(1, b"raced")
    branch = manager.prepared(1, b"v")
    assert manager.refused("start", branch) == XACode.XAER_DUPID
    assert Manager.refused(other, "start", xid(1)) == XACode.XAER_DUPID
    assert other.refused("prepare", raced) in range(100, 108)
    assert manager.refused("forget", branch) == XACode.XAER_PROTO
    other.client.close()


def test_threads_have_own_branches_and_blocks_do_not_mix(manager: Manager) -> None:
    manager.resource.start(xid(1))
    thread = threading.Thread(target=manager.work, args=(2, b"2"))
    thread.start()
    thread.join()
    for inner in (manager.producer.transaction, lambda: manager.resource.start(xid(3))):
        with pytest.raises((txmq.errors.TransactionStateError, txmq.errors.XAError)):
            inner()
    manager.producer.send("orders", b"1")
    manager.resource.end(xid(1))
    with manager.producer.transaction(), pytest.raises(txmq.errors.XAError) as caught:
        manager.resource.start(xid(4))
    assert caught.value.xa_code == XACode.XAER_OUTSIDE
    for number in (2, 1):
        manager.resource.prepare(xid(number))
        manager.resource.commit(xid(number))
    assert manager.visible() == [b"2", b"1"]


def test_without_a_broker_the_answer_is_rmfail(manager: Manager, broker: BrokerProcess) -> None:
    branch = manager.prepared(1, b"v")
    manager.resource = manager.client.xa_resource(timeout=0.2)
    broker.kill()
    for call in ("commit", "rollback", "forget"):
        assert manager.refused(call, branch) == XACode.XAER_RMFAIL
    with pytest.raises(txmq.errors.XAError):
        manager.resource.recover()
