"""Retries against a real broker: order of keys, the retry topic, what is gone, too large, full or cannot be read."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import txmq
from tests.services.consumer.consuming import WAIT_S
from tests.services.consumer.retrying import GROUP, IN_ORDER, LATER, NOW, TOPIC, bad, clear, listening, never, saved
from tests.services.loop_client import Connect
from txmq.client.consumer import failures
from txmq.client.consumer.retry.dead_letters import Redrive
from txmq.client.consumer.retry.retry_store import RetryStore, original
from txmq.errors import StorageError, TransactionStateError
from txmq.log import records
from txmq.log.batch import HEADER_SIZE, checksum
from txmq.protocol.transaction_bodies import encode_branch, encode_part
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess

REQUEST_SIZE_BYTES_MAX = 1 << 20


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A broker that forgets at once, takes no large requests, and makes topics in memory."""
    limits = {
        "request_size_bytes_max": REQUEST_SIZE_BYTES_MAX,
        "batch_size_bytes_max": REQUEST_SIZE_BYTES_MAX,
        "outcomes_kept": 1,
    }
    settings = {"retention_check_interval_ms": 10, "default_storage": "memory", **limits}
    with BrokerProcess(tmp_path_factory.mktemp("retries") / "broker", settings=settings) as process:
        yield process


@pytest.fixture
def client(broker: BrokerProcess, connect: Connect) -> Iterator[txmq.Client]:
    """A client of it, with a topic of one partition whose old segments can be made to go."""
    with connect(broker.address) as made:
        made.topics.create(TOPIC, storage="disk", segment_size_bytes=4096)
        yield made
        clear(made)


def forget(client: txmq.Client, below: int) -> None:
    """Retention takes what is below an offset."""
    client.topics.alter(TOPIC, retention_size_bytes=1)
    for _ in range(4):
        client.producer().send(TOPIC, bytes(3000), key=b"filler")
    eventually(lambda: client.offsets(TOPIC, 0).start >= below, "retention takes the messages")


def test_later_messages_of_a_key_wait_also_across_a_handover(client: txmq.Client, tmp_path: Path) -> None:
    producer = client.producer()
    for value, key in ((b"bad1", b"k"), (b"x1", b"x"), (b"a2", b"k"), (b"none", None), (b"a3", b"k"), (b"x2", b"x")):
        producer.send(TOPIC, value, key=key)
    with listening(client, str(tmp_path / "one"), IN_ORDER, bad) as first:
        first.wait(4)
        eventually(lambda: saved(client)[0] == 6, "the partition moves on")
    assert first.values == [b"bad1", b"x1", b"none", b"x2"]
    assert saved(client) == (6, [[0, 1], [2, 0], [4, 0]])
    producer.send(TOPIC, b"a4", key=b"k")
    with listening(client, str(tmp_path / "two"), IN_ORDER, never) as second:  # on another host, with another disk
        second.wait(4)
    assert second.values == [b"bad1", b"a2", b"a3", b"a4"]
    assert saved(client) == (7, None)


def test_message_that_waited_behind_another_is_retried_and_deferred_itself(client: txmq.Client, tmp_path: Path) -> None:
    for value in (b"bad1", b"bad2", b"good"):
        client.producer().send(TOPIC, value, key=b"k")
    at_once = txmq.ConsumerOptions(retry_delay=0.0, deferred_delay=0.0, deferred_retries=2, keep_key_order=True)
    with listening(client, str(tmp_path / "r"), at_once, bad, max_retries=1) as found:
        eventually(lambda: b"good" in found.values, "dead letters let the key go on")
    assert found.values == [b"bad1"] * 4 + [b"bad2"] * 4 + [b"good"]
    dead_letters = list(client.browse(f"{GROUP}.dead-letter"))
    assert [(dead_letter.value, dead_letter.headers["txmq.dead.attempts"]) for dead_letter in dead_letters] == [
        (b"bad1", b"4"),
        (b"bad2", b"4"),
    ]
    assert saved(client) == (3, None)


def test_partition_without_room_for_waiting_messages_stops_and_loses_nothing(
    client: txmq.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "SIZE_BYTES_MAX", 5000)
    for value in (b"bad1", bytes(9000), b"after"):
        client.producer().send(TOPIC, value, key=b"k")
    with listening(client, str(tmp_path / "r"), IN_ORDER, bad) as found:
        eventually(lambda: (TOPIC, 0) in found.consumer.stopped, "it says so")
        assert "full" in found.consumer.stopped[TOPIC, 0]
        assert saved(client)[0] in (None, 1)
        monkeypatch.setattr(failures, "SIZE_BYTES_MAX", 50_000)
        eventually(lambda: saved(client)[0] == 3, "it goes on by itself")
        assert found.consumer.stopped == {}
    assert saved(client) == (3, [[0, 1], [1, 0], [2, 0]])
    assert found.values == [b"bad1"]


def test_key_order_without_a_retry_store_is_refused(client: txmq.Client) -> None:
    with pytest.raises(txmq.errors.ConfigError, match="keep_key_order needs a retry_store"):
        client.consumer(GROUP, [TOPIC], options=IN_ORDER)


def test_the_retry_topic_keeps_contents_that_retention_took(client: txmq.Client) -> None:
    client.producer().send(TOPIC, b"bad", key=b"k", headers={"h": b"\xff"}, tag="red")
    (sent,) = client.fetch(TOPIC, 0, 0)
    with listening(client, "topic", LATER, bad) as first:
        eventually(lambda: saved(client) == (1, [[0, 1]]), "deferred")
    (copy,) = client.browse(f"{GROUP}.retry")
    assert (copy.headers["txmq.retry.topic"], copy.headers["txmq.retry.offset"]) == (TOPIC.encode(), b"0")
    assert (copy.headers["txmq.retry.attempts"], b"cannot" in copy.headers["txmq.retry.reason"]) == (b"1", True)
    assert original(copy) == sent
    forget(client, 1)
    with listening(client, "topic", LATER, never) as second:  # on another host
        eventually(lambda: sent in second.seen, "its content comes from the copy")
    assert first.values == [b"bad"]
    assert second.seen.count(sent) == 1
    assert saved(client)[1] is None


@pytest.mark.threads
def test_retry_topic_has_equal_limits_and_dead_letters(client: txmq.Client) -> None:
    for value in (b"bad", b"good"):
        client.producer().send(TOPIC, value, key=b"k")
    with listening(client, "topic", NOW, bad) as found:
        found.wait(5)
        eventually(lambda: saved(client) == (2, None), "a dead letter")
    assert sorted(found.values) == [b"bad"] * 4 + [b"good"]
    (dead_letter,) = client.browse(f"{GROUP}.dead-letter")
    assert (dead_letter.value, dead_letter.key, dead_letter.headers["txmq.dead.attempts"]) == (b"bad", b"k", b"4")
    assert len(list(client.browse(f"{GROUP}.retry"))) == 1
    dead_letters = Redrive(client, GROUP)
    assert [redriven.outcome for redriven in dead_letters.redrive(dead_letters.dead_letters())] == ["sent"]
    made = {topic.name: topic.storage for topic in client.topics.list() if topic.name != TOPIC}
    names = (f"{GROUP}.retry", f"{GROUP}.dead-letter", f"{GROUP}.dead-letter.redriven")
    assert made == dict.fromkeys(names, txmq.Storage.DISK)  # whatever a topic is by default: nothing may be lost


@pytest.mark.threads
def test_a_redrive_that_cannot_read_the_account_yet_sends_nothing(client: txmq.Client) -> None:
    """After a decision whose database is away no account is visible: run twice, each dead letter went out twice."""
    put_dead_letters(client, 2)
    dead_letters = Redrive(client, GROUP)
    first, second = dead_letters.dead_letters()
    decision, uuid = hold(client)
    assert [redriven.outcome for redriven in dead_letters.redrive([first])] == ["sent"]
    for _ in range(2):
        with looking_briefly(client, dead_letters), pytest.raises(TransactionStateError, match="run it again"):
            list(dead_letters.redrive([second]))
    client.control.call("complete", decision, extensions={"uuid": uuid}, timeout=60.0)
    assert [redriven.outcome for redriven in dead_letters.redrive(dead_letters.dead_letters())] == ["done", "sent"]
    assert [message.value for message in client.browse(TOPIC)] == [b"held", b"letter 0", b"letter 1"]


@pytest.mark.threads
def test_redrive_sends_nothing_twice_when_an_earlier_outcome_is_gone(
    client: txmq.Client, broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have begun, the earlier commits, and its session moves on before the later asks; no account is visible."""
    put_dead_letters(client, 1)
    decision, uuid = hold(client)
    later = Redrive(client, GROUP)
    letters = list(later.dead_letters())
    begin = later._begin
    earlier_has_begun, later_has_begun, outcome_is_gone = (threading.Event() for _ in range(3))

    def commit_and_move_on() -> None:
        with txmq.connect(broker.address) as other:
            earlier = Redrive(other, GROUP)
            settled = earlier._settled

            def await_later(*words: Any) -> set[Any]:
                found = settled(*words)
                earlier_has_begun.set()
                assert later_has_begun.wait(WAIT_S)
                return found

            monkeypatch.setattr(earlier, "_settled", await_later)
            assert [redriven.outcome for redriven in earlier.redrive(letters)] == ["sent"]
            for _ in range(3):  # the broker keeps one finished outcome
                with other.producer().transaction() as tx:
                    tx.send(TOPIC, b"other")
        outcome_is_gone.set()

    def begin_and_await_earlier(*words: Any) -> int:
        offset = begin(*words)
        later_has_begun.set()
        assert outcome_is_gone.wait(WAIT_S)
        return offset

    thread = threading.Thread(target=commit_and_move_on)
    thread.start()
    assert earlier_has_begun.wait(WAIT_S)
    monkeypatch.setattr(later, "_begin", begin_and_await_earlier)
    with looking_briefly(client, later), pytest.raises(TransactionStateError, match="run it again"):
        list(later.redrive(letters))
    thread.join(WAIT_S)
    client.control.call("complete", decision, extensions={"uuid": uuid}, timeout=60.0)
    assert [redriven.outcome for redriven in later.redrive(letters)] == ["done"]
    assert [message.value for message in client.browse(TOPIC)].count(b"letter 0") == 1


@contextmanager
def looking_briefly(client: txmq.Client, redrive: Redrive) -> Iterator[None]:
    """It waits for what is not visible for a moment; for the broker's answers as long as a busy machine takes."""
    await_visible = redrive._await_visible

    def briefly(offset: int) -> None:
        patient, client.timeout = client.timeout, 0.2
        try:
            await_visible(offset)
        finally:
            client.timeout = patient

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(redrive, "_await_visible", briefly)
        yield


def put_dead_letters(client: txmq.Client, count: int) -> None:
    """Dead letters of the first messages of the topic, and an account that is empty."""
    client.groups.reset(GROUP, [(TOPIC, 0, 0)], create=True)
    for name in (f"{GROUP}.dead-letter", f"{GROUP}.dead-letter.redriven"):
        client.topics.create(name, storage="disk")
    for number in range(count):
        origin = {"txmq.dead.topic": TOPIC, "txmq.dead.partition": "0", "txmq.dead.offset": str(number)}
        headers = {name: word.encode() for name, word in origin.items()}
        client.producer().send(f"{GROUP}.dead-letter", b"letter %d" % number, headers=headers)


def hold(client: txmq.Client) -> tuple[str, str]:
    """Decide a transaction with a branch that nobody completes; its id, and the branch's."""
    uuid = "5" * 32
    details = {"bqual": uuid, "connection": 1, "wrote": True, "marker": True, "table": "txmq_marker"}
    _, txid = client.session.next_txid()
    part = encode_part(TOPIC, 0, records.encode([(None, b"held", (), 1)], txid=txid))
    body = [encode_branch("orders-db", uuid, details), *part]
    client.control.call("decide", txid, extensions={"branches": 1}, body=body, timeout=60.0)
    return txid, uuid


@pytest.mark.parametrize("how", ["reset", "seek"])
def test_reset_to_a_retained_start_loses_nothing_that_is_deferred(
    client: txmq.Client, tmp_path: Path, how: str
) -> None:
    """What the log has comes again from there; what it has not is in the store alone."""
    client.producer().send(TOPIC, b"bad", key=b"k")
    store = str(tmp_path / "deferred")
    with listening(client, store, LATER, bad):
        eventually(lambda: saved(client) == (1, [[0, 1]]), "deferred")
    forget(client, 1)
    if how == "reset":
        client.groups.reset(GROUP, [(TOPIC, 0, 0)])
    fails = bad if how == "seek" else never
    with listening(client, store, LATER, fails) as found:
        if how == "seek":
            eventually(lambda: b"bad" in found.values, "it is retried once when the partition comes")
            found.consumer.seek(TOPIC, 0, 0)
            eventually(lambda: saved(client)[0] == client.offsets(TOPIC, 0).end, "the log is consumed again")
        else:
            eventually(lambda: b"bad" in found.values, "it is delivered from the store")
    if how == "seek":
        assert saved(client)[1] == [[0, 2]]


def test_message_gone_from_everywhere_becomes_dead_letter_with_reason(client: txmq.Client, tmp_path: Path) -> None:
    client.producer().send(TOPIC, b"bad", key=b"k")
    with listening(client, str(tmp_path / "lost"), LATER, bad):
        eventually(lambda: saved(client) == (1, [[0, 1]]), "deferred")
    forget(client, 1)
    with listening(client, str(tmp_path / "new"), LATER, never):
        eventually(lambda: saved(client)[1] is None, "it is told and forgotten")
    (dead_letter,) = client.browse(f"{GROUP}.dead-letter")
    assert (dead_letter.value, dead_letter.headers["txmq.dead.value"]) == (b"", b"gone")
    assert (dead_letter.headers["txmq.dead.offset"], dead_letter.headers["txmq.dead.attempts"]) == (b"0", b"1")
    assert b"gone" in dead_letter.headers["txmq.dead.reason"]


@pytest.mark.parametrize(("room", "said"), [(600, None), (0, b"too-large")])
def test_oversized_dead_letter_is_cut(client: txmq.Client, room: int, said: bytes | None) -> None:
    value = b"bad" + bytes(REQUEST_SIZE_BYTES_MAX - 1024 - 3 - room)
    client.producer().send(TOPIC, b"bad")  # with it the dead letters' producer learns the broker's limit
    client.producer().send(TOPIC, value)
    client.producer().send(TOPIC, b"good")
    consumer = client.consumer(GROUP, [TOPIC], max_retries=0)
    with consumer:
        for message in consumer:
            if bad(message):
                message.reject("x" * 2000)
            else:
                message.ack()
                break
    assert saved(client) == (3, None)
    small, dead_letter = client.browse(f"{GROUP}.dead-letter")
    assert (small.value, len(small.headers["txmq.dead.reason"])) == (b"bad", 1000)
    assert dead_letter.headers.get("txmq.dead.value") == said
    assert dead_letter.value == (value if said is None else b"")
    assert ("txmq.dead.reason" in dead_letter.headers, dead_letter.headers["txmq.dead.offset"]) == (
        said is not None,
        b"1",
    )


def save_as_a_member(client: txmq.Client, deferred: str) -> None:
    """Save such a text for partition 0, as a member of another version would."""
    words: dict[str, str | int] = {"member": "other", "topics": TOPIC}
    join = client.control.call("group", "join", GROUP, timeout=60.0, extensions=words, body=[b"[]"])
    (row,) = json.loads(join)["assigned"]
    save = json.dumps([[TOPIC, 0, row[2], 1, deferred]]).encode()
    client.control.call("group", "save", GROUP, timeout=60.0, extensions={"member": "other"}, body=[save])
    client.control.call("group", "leave", GROUP, timeout=60.0, extensions={"member": "other"}, body=[b"[]"])


@pytest.mark.threads
def test_unreadable_deferred_message_stops_only_its_partition(client: txmq.Client, tmp_path: Path) -> None:
    client.producer().send(TOPIC, b"one")
    client.producer().send(TOPIC, b"two")
    save_as_a_member(client, "[[of another version")
    client.topics.alter(TOPIC, partitions=3)
    client.producer().send(TOPIC, b"elsewhere", partition=2)
    with listening(client, str(tmp_path / "r"), LATER, never) as found:
        found.wait(1)
        assert "cannot be read" in found.consumer.stopped[TOPIC, 0]
    assert found.values == [b"elsewhere"]
    row = client.groups.describe(GROUP)["partitions"][0]
    assert (row["offset"], row["deferred"]) == (1, "[[of another version")


def test_store_that_cannot_be_read_for_moment_is_read_again(
    client: txmq.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.producer().send(TOPIC, b"bad")
    with listening(client, str(tmp_path / "r"), LATER, bad) as first:
        first.wait(1)
    client.producer().send(TOPIC, b"new")
    read = RetryStore.partition
    failed: list[object] = []

    def locked(store: RetryStore, *place: str | int) -> object:
        if not failed:
            failed.append(place)
            raise StorageError("database is locked")
        return read(store, *place)  # type: ignore[arg-type]

    monkeypatch.setattr(RetryStore, "partition", locked)
    with listening(client, str(tmp_path / "r"), LATER, never) as second:
        second.wait(2)
        assert second.consumer.stopped == {}
    assert sorted(second.values) == [b"bad", b"new"]
    assert saved(client) == (2, None)


def test_unreadable_batch_becomes_dead_letter_and_is_passed(broker: BrokerProcess, client: txmq.Client) -> None:
    made = records.encode([(b"k", b"one", (), 1000), (b"k", b"two", (), 1000)])
    made[HEADER_SIZE] ^= 2  # another length than the record has, under a right CRC
    made[17:21] = checksum(memoryview(made)[21:]).to_bytes(4, "big")
    client.producer().send(TOPIC, b"before")
    with txmq.connect(broker.address) as defective:
        defective.routes.link_for(TOPIC, 0).control.repeat("put", TOPIC, 0, body=[made], timeout=WAIT_S)
    client.producer().send(TOPIC, b"after")
    with client.consumer(GROUP, [TOPIC], options=txmq.ConsumerOptions(pass_unreadable=True)) as consumer:
        taken: list[txmq.Message] = []
        while len(taken) < 2:
            for message in consumer.poll(timeout=WAIT_S):
                message.ack()
                taken.append(message)
        assert [(message.offset, message.value) for message in taken] == [(0, b"before"), (3, b"after")]
        assert consumer.stopped == {}
    assert saved(client)[0] == 4
    (dead,) = client.browse(f"{GROUP}.dead-letter")
    assert (dead.headers["txmq.dead.value"], dead.headers["txmq.dead.offset"]) == (b"batch", b"1")
    assert dead.value is not None
    assert dead.value[HEADER_SIZE:] == made[HEADER_SIZE:]
    with txmq.connect(broker.address) as other:
        redrive = Redrive(other, GROUP)
        assert [found.outcome for found in redrive.redrive(redrive.dead_letters())] == ["gone"]
