"""The ordered producer against a real broker: outages, kills of both sides, refusals, and an exact count at the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest

import txmq
from tests.services.broker.wire import Wire
from tests.services.loop_client import Connect
from txmq.client.spooling.spool import AssignedSequence, Spool, SpoolIdentity
from txmq.client.spooling.spool_homes import stamped
from txmq.client.transport.session import ClientSession
from txmq.log import records
from txmq.model import TopicPartition
from txmq.testing.eventually import eventually
from txmq.testing.processes import fork_server
from txmq.testing.processes.broker import BrokerProcess

KEYS = 8
LIVES = 4
SELECTOR = txmq.KeyHashSelector()
FAST = txmq.OrderedOptions(timeout=30.0, visibility_wait_s=0.0)  # a broker that is gone is noticed at once
ACKNOWLEDGED, SPOOLED = txmq.SendStatus.ACKNOWLEDGED, txmq.SendStatus.SPOOLED


@pytest.fixture
def client(broker: BrokerProcess, connect: Connect) -> Iterator[txmq.Client]:
    """A client of the broker, which has the topic ``t``."""
    with connect(broker.address) as client:
        client.topics.create("t", partitions=4)
        yield client


@contextmanager
def _ordered(
    client: txmq.Client, tmp_path: Path, options: txmq.OrderedOptions = FAST
) -> Iterator[txmq.OrderedMessageProducer]:
    with client.ordered_producer(SELECTOR, str(tmp_path / "spool"), options=options) as producer:
        yield producer


def _values(client: txmq.Client) -> list[bytes | None]:
    return [message.value for message in client.browse("t")]


def test_outage_spools_and_order_holds_when_it_is_over(
    broker: BrokerProcess, client: txmq.Client, tmp_path: Path
) -> None:
    with _ordered(client, tmp_path) as producer:
        assert producer.send("t", b"0", b"k") == txmq.SendResult("t", SELECTOR.partition_of(b"k", 4), 0, ACKNOWLEDGED)
        broker.kill()
        results = [producer.send("t", b"%d" % number, b"k") for number in range(1, 50)]
        assert {(result.status, result.offset) for result in results} == {(SPOOLED, None)}
        broker.start()
        producer.flush()
        assert producer.send("t", b"50", b"k").status is ACKNOWLEDGED
    assert _values(client) == [b"%d" % number for number in range(51)]


def test_unanswered_message_that_is_sent_again_is_stored_once(
    broker: BrokerProcess, client: txmq.Client, tmp_path: Path
) -> None:
    with _ordered(client, tmp_path) as producer:
        producer.send("t", b"0", b"k")
        broker.pause()
        results = [producer.send("t", b"%d" % number, b"k", timeout=1.0) for number in (1, 2)]
        assert [result.status for result in results] == [SPOOLED, SPOOLED]
        broker.resume()
        producer.flush()
        assert producer.send("t", b"3", b"k").offset == 3
    assert _values(client) == [b"0", b"1", b"2", b"3"]


@pytest.mark.threads
def test_message_in_doubt_is_not_stored_twice_by_next_process(
    broker: BrokerProcess, client: txmq.Client, tmp_path: Path
) -> None:
    with _ordered(client, tmp_path) as producer:
        producer.send("t", b"0", b"k")
        broker.pause()
        producer.send("t", b"1", b"k", timeout=1.0)
        producer.send("t", b"2", b"k", timeout=1.0)
    with Spool(tmp_path / "spool", read_only=True) as spool:
        assert [entry.assigned is not None for entry in spool.entries()] == [True, False]
    broker.resume()  # what lies in its sockets is stored now
    with _ordered(client, tmp_path) as producer:
        producer.flush()
        producer.send("t", b"3", b"k")
    assert _values(client) == [b"0", b"1", b"2", b"3"]


@pytest.mark.threads
def test_flush_ends_what_former_process_left_despite_empty_spool(
    broker: BrokerProcess, client: txmq.Client, tmp_path: Path
) -> None:
    with txmq.connect(broker.address) as former:
        session = former.session
        with Spool(tmp_path / "spool") as spool:
            spool.remember_session(
                SpoolIdentity(session.cluster, session.home, session.id, session.epoch), session.secret
            )
        with _ordered(client, tmp_path) as producer:
            broker.kill()
            with pytest.raises(txmq.errors.RequestTimeoutError):
                producer.flush(timeout=0.1)
            broker.start()
            link, _ = former.control.connect_with_session(former.clock.monotonic() + 60)
            producer.flush()
            with pytest.raises(txmq.TxmqError):  # closed by the broker, as a killed process's would be
                link.request(former.clock.monotonic() + 30, "ping").result()
    with Spool(tmp_path / "spool", read_only=True) as spool:
        assert [left.session for left in spool.sessions()] == []


def store_in_session(client: txmq.Client, session: ClientSession, partition: TopicPartition, batch: bytearray) -> None:
    """As what a killed process left in its sockets; the producer that has the session cannot end it any more."""
    with txmq.connect(f"txmq://{client.control.connect(client.clock.monotonic() + 60).address}") as other:
        other.control.call("hello", 1, "me", extensions={"session": session.wish}, timeout=60.0)
        other.control.call("put", *partition, body=[batch], timeout=60.0)


@pytest.mark.threads
@pytest.mark.parametrize("was_stored", [True, False])
def test_log_tells_the_fate_of_a_message_whose_session_ended(
    was_stored: bool, client: txmq.Client, tmp_path: Path
) -> None:
    # A row pinned to a number nobody answers for: its session is told from the one that stored it by the cluster only.
    with _ordered(client, tmp_path) as producer:
        producer.send("t", b"0", b"k")
        partition = "t", SELECTOR.partition_of(b"k", 4)
        identity = producer._homes.any().sender.core.identity
        session = producer._homes.any().sessions.main.session
        assert identity is not None
        assert session is not None
        assigned = AssignedSequence(replace(identity, cluster=identity.cluster ^ 1), 1, 1)
        content = bytes(records.encode([(b"k", b"1", (), 1)]))
        if was_stored:
            store_in_session(client, session, partition, stamped(content, assigned))
    with Spool(tmp_path / "spool") as spool:
        spool.append(partition, content, 1, assigned)
    with _ordered(client, tmp_path) as producer:
        producer.send("t", b"2", b"k")
        producer.flush()
        assert producer.parked() == []
    assert _values(client) == [b"0", b"1", b"2"]


@pytest.mark.threads
@pytest.mark.parametrize("was_stored", [True, False])
def test_spool_without_secrets_is_stored_once_in_any_case(
    was_stored: bool, client: txmq.Client, tmp_path: Path
) -> None:
    """Its session cannot be resumed, so the log says what became of the batch."""
    with _ordered(client, tmp_path) as producer:
        producer.send("t", b"0", b"k")
        partition, identity = ("t", SELECTOR.partition_of(b"k", 4)), producer._homes.any().sender.core.identity
        session = producer._homes.any().sessions.main.session
        assert identity is not None
        assert session is not None
        assigned, content = AssignedSequence(identity, 1, 1), bytes(records.encode([(b"k", b"1", (), 1)]))
        if was_stored:
            store_in_session(client, session, partition, stamped(content, assigned))
    with Spool(tmp_path / "spool") as spool:
        spool.append(partition, content, 1, assigned)
        spool._database.execute("UPDATE sessions SET secret = ''")
    with _ordered(client, tmp_path) as producer:
        producer.send("t", b"2", b"k")
        producer.flush()
        assert producer.parked() == []
    assert _values(client) == [b"0", b"1", b"2"]


def test_closed_topic_and_its_successor_are_waited_for(client: txmq.Client, tmp_path: Path) -> None:
    with _ordered(client, tmp_path) as producer:
        producer.send("t", b"0", b"k")
        client.topics.alter("t", accept_publish=False)
        assert producer.send("t", b"1", b"k").status is SPOOLED
        client.topics.alter("t", accept_publish=True)
        producer.flush()
        client.topics.delete("t")
        client.topics.create("t", partitions=4)
        assert producer.send("t", b"2", b"k").is_success  # its partition does not know our numbers any more
        producer.flush()
        assert producer.send("t", b"3", b"k").status is ACKNOWLEDGED
    assert _values(client) == [b"2", b"3"]


def test_poison_is_parked_and_what_is_behind_it_goes_on(
    broker: BrokerProcess, client: txmq.Client, tmp_path: Path
) -> None:
    with _ordered(client, tmp_path) as producer:
        producer.send("t", b"0", b"k")
        broker.kill()
        producer.send("t", b"1", b"k")
        producer.send("t", bytes(20_000), b"k")
        producer.send("t", b"2", b"k")
        broker.start(env={"TXMQ_BATCH_SIZE_BYTES_MAX": "10000"})
        producer.flush()
        (parked,) = producer.parked()
        assert "refused 5 times" in parked.reason
        assert producer.send("t", b"3", b"k").status is ACKNOWLEDGED
    assert _values(client) == [b"0", b"1", b"2", b"3"]


def test_full_spool_refuses_and_takes_more_when_it_is_drained(
    broker: BrokerProcess, client: txmq.Client, tmp_path: Path
) -> None:
    with _ordered(client, tmp_path, txmq.OrderedOptions(timeout=30.0, spool_size_bytes_max=2048)) as producer:
        producer.send("t", b"first", b"k")
        broker.kill()
        sent = [b"first"]
        sent += [b"%d" % number * 50 for number in range(8)]
        for value in sent[1:]:
            assert producer.send("t", value, b"k").status is SPOOLED
        with pytest.raises(txmq.errors.SpoolFullError, match="spool_size_bytes_max 2048"):
            producer.send("t", bytes(1500), b"k")
        broker.start()
        producer.flush()
        assert producer.send("t", b"last", b"k").status is ACKNOWLEDGED
    assert _values(client) == [*sent, b"last"]


def test_a_send_that_stands_in_a_transaction_is_refused(client: txmq.Client, tmp_path: Path) -> None:
    with (
        _ordered(client, tmp_path) as producer,
        client.producer() as plain,
        plain.transaction(),
        pytest.raises(txmq.errors.TransactionStateError, match="ordered producer"),
    ):
        producer.send("t", b"1", b"k")
    assert _values(client) == []


def test_what_is_refused_for_good_is_told_and_not_spooled(client: txmq.Client, tmp_path: Path) -> None:
    with _ordered(client, tmp_path) as producer:
        with pytest.raises(txmq.UnknownTopicError):
            producer.send("nowhere", b"1", b"k")
        with pytest.raises(txmq.errors.TooLargeError):
            producer.send("t", bytes(16 << 20), b"k")
        assert producer.spooled == 0
        assert producer.send("t", b"1", b"k").status is ACKNOWLEDGED


@pytest.mark.threads
def test_connection_of_former_life_is_closed_before_anything_is_sent(
    broker: BrokerProcess, client: txmq.Client, tmp_path: Path
) -> None:
    with Wire(broker) as former:
        former.send(b"hello 1 former session=new 1\r\n")
        hello = json.loads(former.hear(1).answers[0][2])
        cluster, home, session = (int(hello[name], 16) for name in ("cluster", "home", "session"))
        with Spool(tmp_path / "spool") as spool:
            spool.remember_session(SpoolIdentity(cluster, home, session, hello["epoch"]), hello["secret"])
        with _ordered(client, tmp_path) as producer:
            assert producer.send("t", b"0", b"k").status is ACKNOWLEDGED
        assert former.hear(1).is_closed


@pytest.mark.threads
def test_a_forked_child_is_refused_and_the_parent_goes_on(client: txmq.Client, tmp_path: Path) -> None:
    with _ordered(client, tmp_path) as producer:
        producer.send("t", b"0", b"k")
        child = os.fork()
        if child == 0:
            try:
                producer.send("t", b"child", b"k")
            except txmq.errors.ClosedError as error:
                os._exit(7 if "spool of its own" in str(error) else 1)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert producer.send("t", b"1", b"k").offset == 1
    assert _values(client) == [b"0", b"1"]


class _Child:
    """A process that sends until it is killed."""

    def __init__(self, broker: BrokerProcess, spool: Path, life: int, kind: str) -> None:
        command = [
            sys.executable,
            "-m",
            "tests.services.producer.ordered_child",
            broker.address,
            str(spool),
            str(life),
            str(KEYS),
            kind,
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    def wait_for(self, more: int) -> None:
        """Wait until so many more messages were told."""
        wanted = len(self.lines) + more
        eventually(lambda: len(self.lines) >= wanted, "the child sends")

    def kill(self) -> list[tuple[int, str]]:
        """Kill it; what was told: key, and ``life:number``."""
        self.process.kill()
        self.process.wait()
        self._thread.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return [(int(line.split()[1]), line.split()[0]) for line in self.lines if line.endswith("\n")]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


@pytest.mark.threads
@pytest.mark.parametrize("kind", ["ordered", "plain", "loop"])
def test_kills_of_broker_and_producer_lose_repeat_and_reorder_nothing(
    broker: BrokerProcess, client: txmq.Client, tmp_path: Path, kind: str
) -> None:
    told: dict[int, list[str]] = defaultdict(list)
    spooled = 0
    for life in range(LIVES):
        with _Child(broker, tmp_path / "spool", life, kind) as child:
            child.wait_for(20)
            broker.kill()
            child.wait_for(20)
            if life % 2:  # dies while the broker is away; else while the spool drains
                messages = child.kill()
                broker.start()
            else:
                broker.start()
                child.wait_for(1 + 7 * life)
                messages = child.kill()
        spooled += sum("spooled" in line for line in child.lines)
        for key, value in messages:
            told[key].append(value)
    assert spooled > LIVES * 10
    with _ordered(client, tmp_path) as producer:
        producer.flush(timeout=200.0)
        assert producer.parked() == []
    for key in range(KEYS):
        stored = [(message.value or b"").decode() for message in client.browse("t") if message.key == b"%d" % key]
        assert len(stored) == len(set(stored))
        # Between the kill and what was told there is at most one message a life, which may be stored.
        told_of = set(told[key])
        assert [value for value in stored if value in told_of] == told[key]
        untold = [value for value in stored if value not in told_of]
        assert len({value.split(":")[0] for value in untold}) == len(untold)
        numbers = [tuple(map(int, value.split(":"))) for value in stored]
        assert numbers == sorted(numbers)


@pytest.mark.threads
def test_the_command_line_shows_the_spool_and_drains_it(
    broker: BrokerProcess, client: txmq.Client, tmp_path: Path
) -> None:
    spool = str(tmp_path / "spool")
    with _ordered(client, tmp_path) as producer:
        producer.send("t", b"0", b"k")
        broker.kill()
        producer.send("t", b"1", b"k")
        producer.send("t", bytes(20_000), b"k")
        assert _cli("spool", "list", spool, "--json")[0]["waiting"] == 2  # while its producer runs
    broker.start(env={"TXMQ_BATCH_SIZE_BYTES_MAX": "10000"})
    drained = _cli("spool", "drain", spool, "--bootstrap", broker.address, "--json")
    assert drained == {"sent": 1, "parked": 1}
    (shown,) = _cli("spool", "show", spool, "--parked", "--json")
    assert (shown["key"], shown["state"], shown["attempts"]) == ("k", "parked", 4)
    assert "too-large" in shown["reason"] or "batch_size_bytes_max" in shown["reason"]
    broker.stop()
    broker.start()
    drained = _cli("spool", "drain", spool, "--parked", "--bootstrap", broker.address, "--json")
    assert drained == {"sent": 1, "parked": 0}
    assert _values(client) == [b"0", b"1", bytes(20_000)]


def _cli(*words: str) -> Any:
    run = fork_server.run([sys.executable, "-m", "txmq.cli.main", *words], timeout=60.0)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)
