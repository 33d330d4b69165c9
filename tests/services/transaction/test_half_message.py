"""Half messages at a real broker: owners die, members of their group answer, the broker is restarted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

import txmq
from tests.services.loop_client import Connect
from txmq import Outcome, Resolution
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess

WITHIN_S = 60.0  # far above what it takes: a loaded machine must not turn it red

OWNER = """
import sys, txmq
client = txmq.connect(sys.argv[1])
producer = client.producer(group="shop", checker=lambda half: txmq.Resolution.UNKNOWN)
half = producer.half("orders", sys.argv[2].encode(), key=b"42", headers={"h": b"x"}, tag="T")
print(half.txid, flush=True)
sys.stdin.read()
"""


def never(_: txmq.CheckRequest) -> Resolution:
    return Resolution.UNKNOWN


@pytest.fixture
def client(broker: BrokerProcess, connect: Connect) -> Iterator[txmq.Client]:
    with connect(broker.address) as opened:
        opened.topics.create("orders")
        yield opened


def killed_owner(broker: BrokerProcess, value: str) -> str:
    """A process that prepares a half message and is killed; the message's transaction."""
    command = [sys.executable, "-c", OWNER, broker.address, value]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        txid = owner.stdout.readline().strip()
        owner.send_signal(signal.SIGKILL)
    return txid


def wait_for(client: txmq.Client, txid: str, wanted: Outcome) -> None:
    eventually(lambda: client.outcome(txid) is wanted, lambda: client.transactions.show(txid))


def visible(client: txmq.Client) -> list[bytes | None]:
    return [message.value for message in client.browse("orders")]


def threads() -> int:
    return sum(thread.name == "txmq-checks" for thread in threading.enumerate())


def test_the_end_of_the_block_lets_the_message_out(client: txmq.Client) -> None:
    producer = client.producer(group="shop", checker=never)
    with producer.half("orders", b"created", key=b"42") as half:
        assert visible(client) == []
        [row] = client.transactions.list(state="prepared")
        assert (row["txid"], row["kind"], row["group"], row["checks"]) == (half.txid, "half", "shop", 0)
    assert (visible(client), half.outcome, half.result.offset) == ([b"created"], Outcome.COMMITTED, 0)
    with producer.half("orders", b"dropped") as other:
        other.rollback()
    assert (visible(client), client.outcome(other.txid)) == ([b"created"], Outcome.ROLLED_BACK)
    assert client.transactions.list() == []


def test_checker_of_another_member_decides_for_owners_that_were_killed(
    broker: BrokerProcess, client: txmq.Client
) -> None:
    done, not_done = killed_owner(broker, "done"), killed_owner(broker, "not done")
    asked: dict[str, txmq.CheckRequest] = {}

    def check(half: txmq.CheckRequest) -> Resolution:
        asked[half.txid] = half
        return Resolution.COMMIT if half.value == b"done" else Resolution.ROLLBACK

    client.producer(group="shop", checker=check)
    wait_for(client, done, Outcome.COMMITTED)
    wait_for(client, not_done, Outcome.ROLLED_BACK)
    assert visible(client) == [b"done"]
    message = asked[done].message
    assert (message.key, message.headers, message.tag, message.txid) == (b"42", {"h": b"x"}, "T", done)
    assert asked[done].attempt >= 1


@pytest.mark.threads
def test_foreign_member_is_not_asked_and_a_restart_drops_nothing(broker: BrokerProcess, client: txmq.Client) -> None:
    txid = killed_owner(broker, "kept")
    strangers: list[str] = []

    def strange(half: txmq.CheckRequest) -> Resolution:
        strangers.append(half.txid)
        return Resolution.ROLLBACK

    client.producer(group="strangers", checker=strange)
    answers = iter([Resolution.UNKNOWN])
    asked = threading.Event()

    def check(_: txmq.CheckRequest) -> Resolution:
        answer = next(answers, Resolution.COMMIT)
        asked.set()
        return answer

    client.producer(group="shop", checker=check)
    assert asked.wait(WITHIN_S)
    broker.kill()
    broker.start()
    wait_for(client, txid, Outcome.COMMITTED)
    assert (visible(client), strangers) == ([b"kept"], [])


@pytest.mark.threads
def test_decision_that_broker_missed_is_told_when_it_is_back(broker: BrokerProcess, client: txmq.Client) -> None:
    producer = client.producer(group="shop", checker=never)
    with producer.half("orders", b"late") as half:
        broker.kill()
    assert (half.pending, half.outcome) == (("broker",), Outcome.UNKNOWN)
    broker.start()
    wait_for(client, half.txid, Outcome.COMMITTED)
    assert visible(client) == [b"late"]


def test_an_operator_s_rollback_is_told_to_the_owner(client: txmq.Client) -> None:
    half = client.producer(group="shop", checker=never).half("orders", b"v")
    client.transactions.rollback(half.txid, "by hand")
    with pytest.raises(txmq.errors.HeuristicRollbackError):
        half.commit()
    assert visible(client) == []


def test_the_thread_ends_with_its_client_at_once(broker: BrokerProcess) -> None:
    before = threads()
    with txmq.connect(broker.address) as client:
        client.producer(group="shop", checker=never)
        client.producer(group="shop", checker=never)
        assert threads() == before + 1
    eventually(lambda: threads() == before, "the thread of the check-backs has ended")


def in_child(work: Callable[[], None]) -> int:
    """Run something in a forked process; its exit status."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.threads
def test_a_forked_child_sends_and_checks_on_its_own(broker: BrokerProcess, client: txmq.Client) -> None:
    producer = client.producer(group="shop", checker=lambda _: Resolution.COMMIT)
    txid = client.producer(group="parents", checker=never).half("orders", b"parent's").txid

    def child() -> None:
        assert threads() == 0
        with producer.half("orders", b"child's"):
            assert threads() == 1

    assert in_child(child) == 0
    assert visible(client) == [b"child's"]
    assert client.outcome(txid) is Outcome.UNKNOWN
    wait_for(client, killed_owner(broker, "later"), Outcome.COMMITTED)  # the parent's thread is unharmed


def test_producer_without_group_and_block_of_transaction_are_refused(client: txmq.Client) -> None:
    with pytest.raises(txmq.errors.ConfigError, match="producer group"):
        client.producer().half("orders", b"v")
    with pytest.raises(txmq.errors.ConfigError, match="callable"):
        client.producer(group="shop")
    producer = client.producer(group="shop", checker=never)
    with producer.transaction(), pytest.raises(txmq.errors.TransactionStateError, match="outside"):
        producer.half("orders", b"v")
    with pytest.raises(txmq.UnknownTopicError):
        producer.half("absent", b"v")
