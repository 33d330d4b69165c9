"""Single deaths with a known end: what the broker, the database and the caller hold afterwards."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

import txmq
from tests.stopped import until_stopped
from tools.crash import final_reads
from tools.crash.campaign import KILLED
from tools.crash.directory import ORDERS, CampaignDirectory
from tools.crash.processes import Child
from txmq.log.records import encode
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess, free_port

WAIT_S = 60.0
QUIET = {"mark_idle_ms": 60_000}  # no sync but those of requests: the nth sync is known to be one of a put


# --- the broker dies between sync and answer -----------------------------------------------------------------------


class RawClient:
    """A conversation typed by hand: independent of the client library's retries."""

    def __init__(self, broker: BrokerProcess) -> None:
        self._socket = socket.create_connection((broker.host, broker.port), timeout=WAIT_S)
        self._file = self._socket.makefile("rb")
        self._number = 0

    def ask(self, words: str, body: bytes | None = None) -> tuple[int, str]:
        """One request; code and body of the answer.

        Raises:
            ConnectionError: the broker went away before it answered.
        """
        self._number += 1
        length = "" if body is None else f" {len(body)}"
        self._socket.sendall(f"{words}{length} {self._number}\r\n".encode() + (body or b""))
        line = self._file.readline().split()
        if len(line) != 4:
            raise ConnectionError("the broker is gone")
        return int(line[1]), self._file.read(int(line[2])).decode()

    def close(self) -> None:
        """Hang up."""
        self._file.close()
        self._socket.close()


def _batch(session: int, sequence: int) -> bytes:
    record = (b"key", b"value %d" % sequence, (), 1_700_000_000_000)
    return bytes(encode([record], producer_id=session, producer_epoch=0, base_sequence=sequence))


@pytest.mark.parametrize(
    ("point", "is_stored"),
    [("journal.sync.done", True), ("journal.append.before", False), ("broker.put.accepted", False)],
)
def test_batch_whose_answer_died_with_broker_is_stored_once(tmp_path: Path, point: str, is_stored: bool) -> None:
    with BrokerProcess(tmp_path / "broker", settings=QUIET) as broker:
        with txmq.connect(broker.address) as client:
            client.topics.create("t")
        first = RawClient(broker)
        hello = first.ask("hello 1 raw session=new")[1]
        session, secret = _json_text(hello, "session"), _json_text(hello, "secret")
        first.close()
        broker.stop()
        broker.start(env={"TXMQ_CRASH": f"{point}:6"})
        sequence = _put_until_it_dies(broker, session, secret)
        broker.start(env={})
        again = RawClient(broker)
        assert again.ask(f"hello 1 raw session={session}.0.{secret}")[0] == 200
        assert again.ask("offset t 0 latest")[1].split()[2] == str(sequence + is_stored)
        batch = _batch(int(session, 16), sequence)
        assert [again.ask("put t 0", batch) for _ in range(2)] == [(200, f"{sequence}\n")] * 2
        assert again.ask("offset t 0 latest")[1].split()[2] == str(sequence + 1)
        again.close()


def _put_until_it_dies(broker: BrokerProcess, session: str, secret: str) -> int:
    """Returns the sequence of the batch that got no answer; all before it were acknowledged at their offsets."""
    raw = RawClient(broker)
    assert raw.ask(f"hello 1 raw session={session}.0.{secret}")[0] == 200
    for sequence in range(10):
        try:
            answer = raw.ask("put t 0", _batch(int(session, 16), sequence))
        except ConnectionError:
            raw.close()
            assert broker.wait(WAIT_S) == KILLED
            return sequence
        assert answer == (200, f"{sequence}\n")
    raise AssertionError("the broker did not die")


@pytest.mark.parametrize(
    ("point", "is_taken"), [("broker.outbox.page_taken", False), ("broker.outbox.page_taken>journal.sync.done", True)]
)
def test_outbox_page_whose_answer_died_is_told_by_chain(tmp_path: Path, point: str, is_taken: bool) -> None:
    uuid = "5e" * 16
    batch = bytes(encode([(b"key", b"value", (), 1_700_000_000_000)]))
    body = b"t 0 %d\r\n" % len(batch) + batch
    with BrokerProcess(tmp_path / "broker", settings=QUIET) as broker:
        with txmq.connect(broker.address) as client:
            client.topics.create("t")
        broker.stop()
        broker.start(env={"TXMQ_CRASH": f"{point}:1"})
        raw = RawClient(broker)
        hello = raw.ask("hello 1 raw session=new")[1]
        session, secret = _json_text(hello, "session"), _json_text(hello, "secret")
        txid = "-".join(_json_text(hello, word) for word in ("cluster", "home", "session")) + "-1"
        with pytest.raises(ConnectionError):
            raw.ask(f"commit {txid} outbox={uuid} name=shop after=-", body)
        raw.close()
        assert broker.wait(WAIT_S) == KILLED
        broker.start(env={})
        raw = RawClient(broker)
        assert raw.ask(f"hello 1 raw session={session}.0.{secret}")[0] == 200
        assert json.loads(raw.ask(f"outbox {uuid}")[1]) == {"last": txid if is_taken else None}
        outcome = raw.ask(f"outcome {txid} fence")[1]
        assert outcome.splitlines()[0] == ("committed" if is_taken else "rolled-back")
        assert raw.ask("offset t 0 latest")[1].split()[2] == str(int(is_taken))
        raw.close()


def _json_text(text: str, name: str) -> str:
    return str(json.loads(text)[name])


@pytest.mark.parametrize("point", ["broker.answers.sent", "broker.apply.before", "broker.apply.done"])
def test_large_groups_survive_death_beside_their_answers(tmp_path: Path, point: str) -> None:
    """A thread writes groups over 1 MiB to the partition files, when their answers are gone."""
    values = [b"%d " % number + bytes(50_000) for number in range(360)]  # 18 MB, in groups of at most 8 MiB
    with BrokerProcess(tmp_path / "broker", settings=QUIET) as broker, txmq.connect(broker.address) as client:
        client.topics.create("t")
        broker.stop()
        broker.start(env={"TXMQ_CRASH": f"{point}:3"})
        with client.producer(timeout=WAIT_S) as producer, ThreadPoolExecutor(1) as thread:
            sent = thread.submit(producer.send_many, "t", [(None, value) for value in values])
            assert broker.wait(WAIT_S) == KILLED
            broker.start(env={})
            offsets = [result.offset for result in sent.result()]
        stored = {message.offset: message.value for message in client.browse("t")}
    assert [stored[offset] for offset in offsets if offset is not None] == values
    assert len(stored) == len(values)


# --- a client dies or is paused ------------------------------------------------------------------------------------


class Order:
    """One order, taken by a process of its own."""

    def __init__(
        self, campaign: CampaignDirectory, broker: BrokerProcess, name: str, crash: str, timeout: float = 10.0
    ) -> None:
        self.name, self._said = name, campaign.directory / f"{name}.said"
        environment = os.environ | {"TXMQ_CRASH": crash}
        with self._said.open("wb") as said, (campaign.directory / f"{name}.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tools.crash.one_order",
                 str(campaign.directory), broker.address, name, str(timeout)],
                stdout=said, stderr=log, env=environment, cwd=Path(__file__).resolve().parents[2],
            )  # fmt: skip

    @property
    def said(self) -> list[str]:
        """Lines: the transaction's id, what was told."""
        return self._said.read_text().splitlines()


@contextmanager
def _resolver(campaign: CampaignDirectory) -> Iterator[Child]:
    child = Child(
        "resolver",
        campaign.directory,
        lambda _: ["txmq.cli.main", "resolver", "--config", str(campaign.resolver_config)],
    )
    child.start()
    try:
        yield child
    finally:
        child.kill()


def _messages(broker: BrokerProcess) -> list[str]:
    with txmq.connect(broker.address) as client:
        return [(message.value or b"").decode() for message in client.browse(ORDERS)]


def _rows(campaign: CampaignDirectory) -> list[str]:
    with closing(sqlite3.connect(campaign.database)) as connection:
        return [row for (row,) in connection.execute("SELECT rowid_text FROM orders ORDER BY id")]


def _outcome(broker: BrokerProcess, txid: str) -> txmq.Outcome:
    with txmq.connect(broker.address) as client:
        return client.outcome(txid)


@pytest.mark.parametrize(
    ("point", "outcome"),
    [
        ("client.tx.prepare_sent", txmq.Outcome.ROLLED_BACK),
        ("client.tx.marker_inserted", txmq.Outcome.ROLLED_BACK),
        ("client.tx.prepared", txmq.Outcome.ROLLED_BACK),
        ("client.tx.db_committed", txmq.Outcome.COMMITTED),
        ("client.tx.commit_sent", txmq.Outcome.COMMITTED),
    ],
)
def test_what_a_dead_client_left_is_settled_by_the_resolver(
    campaign: CampaignDirectory, broker: BrokerProcess, point: str, outcome: txmq.Outcome
) -> None:
    order = Order(campaign, broker, "order-1", f"{point}:1")
    assert order.process.wait(WAIT_S) == KILLED
    (txid,) = order.said
    with _resolver(campaign):
        eventually(lambda: not final_reads.in_doubt(broker.address), "no transaction is in doubt")
    committed = ["order-1"] if outcome is txmq.Outcome.COMMITTED else []
    assert (_rows(campaign), _messages(broker)) == (committed, committed)
    assert _outcome(broker, txid) in (outcome, txmq.Outcome.UNKNOWN if not committed else outcome)


@pytest.mark.parametrize("point", ["client.tx.prepare_sent", "client.tx.prepared"])
def test_client_that_sleeps_past_its_deadline_is_told_truth(
    campaign: CampaignDirectory, broker: BrokerProcess, point: str
) -> None:
    order = Order(campaign, broker, "order-1", f"{point}:1:stop", timeout=6.0)
    until_stopped(order.process.pid)
    eventually(lambda: bool(final_reads.in_doubt(broker.address)), "a transaction is prepared")
    with _resolver(campaign):
        eventually(lambda: _is_overdue(broker), "the deadline passes")
        order.process.send_signal(signal.SIGCONT)
        order.process.wait(WAIT_S)
        eventually(lambda: not final_reads.in_doubt(broker.address), "no transaction is in doubt")
    txid, told = order.said
    expected = ["order-1"] if told == "committed" else []
    assert (_rows(campaign), _messages(broker)) == (expected, expected)
    assert _outcome(broker, txid).value == told
    if point == "client.tx.prepare_sent":  # the marker row was still to come, and the deadline is its condition
        assert told == "rolled-back"


def _is_overdue(broker: BrokerProcess) -> bool:
    with txmq.connect(broker.address) as client:
        (listed,) = client.transactions.list(state="in-doubt")
    return int(str(listed["prepared_ms"])) + int(str(listed["age_ms"])) > int(str(listed["deadline_ms"])) + 500


# --- disk and directory --------------------------------------------------------------------------------------------

# What the test takes away, but never more than a quarter; half of that others may use or free meanwhile.
FULL_BYTES_MAX = 4 << 30


def test_full_disk_refuses_messages_serves_decisions_and_resumes_by_itself(tmp_path: Path) -> None:
    free_bytes = shutil.disk_usage(tmp_path).free
    full_bytes = min(FULL_BYTES_MAX, free_bytes // 4)
    limit = free_bytes - full_bytes // 2
    with BrokerProcess(tmp_path / "broker", settings={"disk_free_bytes_min": limit}) as broker:
        campaign = CampaignDirectory(tmp_path)
        campaign.create(broker.address)
        with txmq.connect(broker.address) as client, client.producer() as producer:
            client.topics.create(ORDERS)
            campaign.resource().install(client)
            producer.send(ORDERS, b"before")
            order = Order(campaign, broker, "order-1", "client.tx.db_committed:1")
            assert order.process.wait(WAIT_S) == KILLED
            filler = tmp_path / "filler"
            with filler.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, full_bytes)
            eventually(lambda: _refuses(producer), "the broker refuses messages on the full disk")
            with _resolver(campaign):
                eventually(lambda: not final_reads.in_doubt(broker.address), "the decision is served")
            assert "order-1" in _messages(broker)
            assert _refuses(producer)
            filler.unlink()
            eventually(lambda: not _refuses(producer), "the broker takes messages again")


def _refuses(producer: txmq.Producer) -> bool:
    while True:
        try:
            producer.send(ORDERS, b"is there space?", timeout=2.0)
        except txmq.errors.DiskFullError:
            return True
        except (txmq.DeliveryUnknownError, txmq.errors.RequestTimeoutError):
            continue  # a disk that is written full is slow
        return False


def test_second_broker_on_one_directory_refuses_and_first_serves_on(tmp_path: Path, broker: BrokerProcess) -> None:
    command = [sys.executable, "-m", "txmq.cli.main", "broker", "--data", str(broker.data_dir)]
    command += ["--listen", f"127.0.0.1:{free_port()}"]
    second = subprocess.run(command, capture_output=True, timeout=WAIT_S, text=True, check=False)
    assert second.returncode not in (0, KILLED)
    assert f"held by process {broker.pid}" in second.stderr
    with txmq.connect(broker.address) as client, client.producer() as producer:
        client.topics.create("t")
        assert producer.send("t", b"still here").offset == 0
