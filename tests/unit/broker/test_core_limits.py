"""Limits, a full disk, a stopping broker: refused with the right name, and decisions are still served."""

from __future__ import annotations

import errno
import json

import pytest

from tools.images.node import Client, Node, small_settings
from tools.images.requests import batch, part
from tools.simulated.disk import SimDisk
from txmq.errors import JournalFullError, StorageError
from txmq.log.verify import verify_log
from txmq.protocol.group_rows import ROWS_MAX, GroupOffsets, OffsetRow, encode_offsets
from txmq.redo import entries
from txmq.redo.journal import Journal

from .support import node, prepare, put, restarted, stated, values


def _refusals(broker: Node, client: Client) -> set[tuple[int, str]]:
    """Everything that brings new messages."""
    answers = [
        put(client),
        client.ask("put", "a", 0, extensions={"raw": None}, body=b"1"),
        client.ask("put", "a", 0, extensions={"tx": broker.txid(1, 5)}, body=batch()),
        client.ask("commit", broker.txid(1, 6), body=part("a", 0, batch())),
        prepare(client, broker.txid(1, 7), ("a", 0, batch())),
    ]
    return {(answer.code, answer.error) for answer in answers}


def test_a_full_disk_refuses_messages_and_serves_decisions() -> None:
    broker = node()
    client = broker.session()
    for counter in (1, 2):
        prepare(client, broker.txid(1, counter), ("a", 0, batch(b"%d" % counter)))
    broker.context.disk_full = True
    assert _refusals(broker, client) == {(507, "disk-full")}
    assert client.ask("commit", broker.txid(1, 1), body=b"").code == 200
    assert client.ask("rollback", broker.txid(1, 2)).code == 200
    assert client.ask("outcome", broker.txid(1, 3), extensions={"fence": None}).text == "rolled-back\n"
    assert client.ask("get", "a", 0, 0, 1000).code == 200
    broker.context.disk_full = False
    assert put(client).code == 200
    assert broker.context.counters.refused_disk_full == 5


def test_unwanted_body_is_refused_at_once_and_connection_goes_on() -> None:
    broker = node(request_size_bytes_max=1 << 20)
    client = broker.connect()
    client.send_bytes(b"group join g member=m topics=a 300000 J\r\n")
    broker.pump()
    assert client.received.pop(b"J") == (413, b"too-large a body of 300000 bytes: group takes at most 262144\n")
    client.send_bytes(bytes(300_000) + b"ping P\r\n")
    broker.pump()
    assert client.received.pop(b"P").code == 200
    assert (broker.context.groups, client.client.closing) == ({}, False)


def test_unwanted_body_under_a_token_in_use_ends_the_connection() -> None:
    broker = node(request_size_bytes_max=1 << 20)
    client = broker.connect()
    client.send_bytes(b"get a 0 0 100 wait=1000 J\r\ngroup list * 300000 J\r\n")
    assert client.client.closing


@pytest.mark.parametrize("action", ["heartbeat", "save", "reset"])
def test_rows_beyond_what_a_request_may_have_are_refused_whole(action: str) -> None:
    broker = node(request_size_bytes_max=1 << 20)
    body = json.dumps([["a", 0]] * (ROWS_MAX + 1)).encode()
    answer = broker.connect().ask("group", action, "g", extensions={"member": "m"}, body=body)
    assert (answer.code, answer.error) == (413, "too-large")
    offsets = encode_offsets([GroupOffsets("g", 1, tuple(OffsetRow("a", n, 1, 0, None) for n in range(ROWS_MAX + 1)))])
    client = broker.session()
    answer = client.ask("commit", broker.txid(1, 1), extensions={"offsets": len(offsets)}, body=offsets)
    assert (answer.code, answer.error) == (413, "too-large")


def test_a_stopping_broker_refuses_messages_and_serves_decisions() -> None:
    broker = node()
    client = broker.session()
    prepare(client, broker.txid(1, 1), ("a", 0, batch()))
    broker.context.stopping = True
    assert _refusals(broker, client) == {(503, "unavailable")}
    assert client.ask("commit", broker.txid(1, 1), body=b"").code == 200


@pytest.mark.parametrize("lacking", [errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE])
def test_missing_resource_while_applying_holds_the_watermark_until_it_returns(lacking: int) -> None:
    broker = node()
    client = broker.session()
    put(client, b"1")
    broker.disk.fail_at(1, lacking, "write", forever=True, path_prefix="log/")
    assert put(client, b"2").text == "1\n"
    assert put(client, b"3").text == "2\n"
    assert values(broker) == [b"1"]
    assert broker.store.has_unapplied
    assert broker.store.unapplied_bytes > 0
    broker.disk.clear_faults()
    for group in broker.store.apply_pending():
        broker.core.applied(group)
    assert values(broker) == [b"1", b"2", b"3"]
    assert (broker.store.has_unapplied, broker.store.unapplied_bytes) == (False, 0)


@pytest.mark.parametrize("way", ["delete a topic", "retention"])
def test_requests_that_free_a_full_disk_do_not_wait(way: str) -> None:
    broker = node()
    client = broker.session()
    words = {"segment_size_bytes": 4096, "retention_size_bytes": 4096}
    client.ask("topic", "create", "big", extensions=words)
    for _ in range(6):
        put(client, bytes(3000), topic="big")
    broker.mark()  # the journal has room ahead
    broker.disk.set_free_bytes(0)
    assert put(client, b"1").code == 200
    assert values(broker) == []
    assert broker.store.has_unapplied
    if way == "retention":
        broker.retire()
    else:
        assert client.ask("topic", "delete", "big").code == 200
    assert values(broker) == [b"1"]
    assert not broker.store.has_unapplied
    after = broker.kill()
    after.set_free_bytes(1 << 20)
    again = Node(after, broker.settings)
    assert values(again) == [b"1"]
    assert len(again.disk.list_directory("log/3/0")) == (2 if way == "retention" else 0)


def test_segment_held_up_by_a_full_disk_is_archived_whole() -> None:
    broker = node()
    client = broker.session()
    words: dict[str, str | int | None] = {
        "segment_size_bytes": 4096, "retention_size_bytes": 1, "retention_policy": "archive",
    }  # fmt: skip
    client.ask("topic", "create", "big", extensions=words)
    put(client, bytes(3000), topic="big")
    broker.disk.fail_at(1, errno.ENOSPC, "write", path_prefix="log/", forever=True)
    put(client, bytes(500), topic="big")
    put(client, bytes(3000), topic="big")
    partition = broker.partition("big")
    broker.context.group.unlinked.append((partition, [partition.segment_path(0)]))
    broker.context.answer_when_durable(client.client, b"x")
    broker.pump()
    assert broker.disk.list_directory("archive") == []
    broker.disk.clear_faults()
    broker.checkpoint()
    (name,) = broker.disk.list_directory("archive/3/0")
    assert verify_log(broker.disk).is_sound
    assert broker.disk.open(f"archive/3/0/{name}").size() > 3500


def test_error_while_applying_that_is_not_full_disk_stops_broker() -> None:
    broker = node()
    client = broker.session()
    broker.disk.fail_at(1, errno.EIO, "write", path_prefix="log/", forever=True)
    with pytest.raises(OSError, match="Input/output"):
        put(client)


def test_a_failed_journal_is_never_written_again() -> None:
    broker = node()
    client = broker.session()
    broker.disk.fail_at(1, errno.EIO, "sync")
    opaque = client.send("put", "a", 0, body=batch(b"1"))
    with pytest.raises(StorageError):
        broker.pump()
    assert opaque not in client.received
    end = broker.store.journal.next_lsn
    client.send("put", "a", 0, body=batch(b"2"))
    broker.pump()
    assert not client.received
    assert broker.store.journal.next_lsn == end


def test_decisions_go_to_the_ballast_when_the_journal_cannot_grow() -> None:
    broker = node()
    client = broker.session()
    broker.mark()
    for counter in range(1, 8):
        prepare(client, broker.txid(1, counter), ("a", 0, batch(bytes(1500))))
    broker.disk.set_free_bytes(0)
    settled = [client.ask("rollback", broker.txid(1, counter)).code for counter in range(1, 8)]
    assert settled == [200] * 7
    assert restarted(broker).state.transactions == {}


def test_a_broker_starts_on_a_full_disk_from_its_ballast() -> None:
    broker = node()
    journal = broker.store.journal
    broker.mark()
    broker.disk.set_free_bytes(0)
    _fill(journal)
    after = broker.kill()
    after.set_free_bytes(0)
    assert Node(after, broker.settings).recovered.state.epoch == 2


def _fill(journal: Journal) -> None:
    """Append until neither the file in use nor a prepared one takes the smallest record."""
    taken = entries.encode_session_ended(99)
    try:
        while True:
            journal.append(taken)
    except JournalFullError:
        return


def test_messages_of_all_undecided_transactions_together_are_limited() -> None:
    broker = node(prepared_bytes_max=64 << 10)
    client = broker.session()
    content = batch(bytes(10_000))
    answers = [prepare(client, broker.txid(1, counter), ("a", 0, content)) for counter in range(1, 8)]
    assert [(answer.code, answer.error) for answer in answers] == [(200, "")] * 6 + [(429, "overloaded")]
    client.ask("rollback", broker.txid(1, 1))
    assert prepare(client, broker.txid(1, 7), ("a", 0, content)).code == 200


def test_one_transaction_is_limited() -> None:
    broker = node(transaction_size_bytes_max=64 << 10)
    client = broker.session()
    txid, batches = broker.txid(1, 1), []
    for _ in range(6):
        batches.append(batch(bytes(10_800)))
        assert client.ask("put", "a", 0, extensions={"tx": txid}, body=batches[-1]).code == 200
    refused = client.ask("put", "a", 0, extensions={"tx": txid}, body=batch(bytes(1000)))
    assert (refused.code, refused.error) == (413, "too-large")
    assert client.ask("commit", txid, extensions=stated(batches), body=part("a", 0, batch(bytes(1000)))).code == 413
    assert client.ask("commit", txid, extensions=stated(batches), body=b"").code == 200


def test_transaction_has_no_more_parts_than_one_record_can_decide() -> None:
    broker = node()
    client = broker.session()
    txid, batches = broker.txid(1, 1), []
    parts_max = (broker.settings.request_size_bytes_max - 28) // 40
    for number in range(parts_max):
        batches.append(batch(b""))
        client.send("put", "a", 0, extensions={"tx": txid}, body=batches[-1])
        if number % 20 == 0:
            broker.pump()
    assert client.ask("put", "a", 0, extensions={"tx": txid}, body=batch(b"")).error == "too-large"
    words = stated(batches)
    assert client.ask("commit", txid, extensions=words, body=part("a", 0, batch(b""))).error == "too-large"
    assert prepare(client, txid, ("a", 0, batch(b"")), **words).error == "too-large"
    client.send("commit", txid, extensions=words, body=b"")
    limit = broker.settings.group_size_bytes_max + broker.settings.request_size_bytes_max
    assert limit // 4 < broker.context.group.size_bytes < limit


def test_undecided_transactions_are_counted() -> None:
    broker = node(transactions_open_max=2)
    client = broker.session()
    for counter in (1, 2):
        prepare(client, broker.txid(1, counter), ("a", 0, batch()))
    assert prepare(client, broker.txid(1, 3), ("a", 0, batch())).error == "overloaded"
    client.ask("commit", broker.txid(1, 1), body=b"")
    assert prepare(client, broker.txid(1, 3), ("a", 0, batch())).code == 200


def test_second_broker_on_a_directory_is_refused() -> None:
    disk = SimDisk()
    Node(disk, small_settings())
    with pytest.raises(StorageError, match="lock"):
        Node(disk, small_settings())
