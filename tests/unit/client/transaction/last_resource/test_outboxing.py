"""Which blocks may go to an outbox, and as what."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash_points import at_moment
from tests.unit.client.transaction.last_resource.test_run_unanswered import another, order
from tests.unit.xa.support import LastResourceFixture, Quiet, quiet_resolver
from txmq.client.transaction.block import Transaction
from txmq.client.transaction.last_resource.outboxing import keys_of
from txmq.client.transaction.messages import EncodedPart
from txmq.errors import ConfigError, ConnectionLostError, RolledBackError
from txmq.model import Outcome
from txmq.testing.simulated.faults import Fault
from txmq.xa import LastResource
from txmq.xa.database.outbox_keys import ANY_KEY, OutboxKey
from txmq.xa.database.outbox_tables import OutboxSize
from txmq.xa.database.outbox_topics import TopicSize
from txmq.xa.last_resource.outbox import TRIPPED_S_MIN, OutboxOptions, OutboxState


@pytest.fixture
def world(tmp_path: Path) -> Iterator[LastResourceFixture]:
    made = LastResourceFixture(tmp_path)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Quiet:
    return quiet_resolver(monkeypatch)


def with_outbox(world: LastResourceFixture) -> LastResource:
    resource = LastResource("orders-db", connect=world.connect, outbox=True)
    resource.install(world.home)
    assert resource.outbox is not None
    resource.outbox.trip()
    return resource


def put(world: LastResourceFixture, resource: LastResource, value: bytes, timeout: float = 30.0) -> Transaction:
    with world.block(timeout, resource) as tx:
        tx.connection(resource).execute("INSERT INTO orders (value) VALUES (?)", (value,))
        tx.send("orders", value)
    return tx


def test_keys_of_parts() -> None:
    parts = [EncodedPart("t", 0, bytearray(b"x"), frozenset({0x1A, 0x2B})), EncodedPart("t", 1, bytearray(b"x"), None)]
    assert keys_of(parts) == {OutboxKey("t-0", "0000001a"), OutboxKey("t-0", "0000002b"), OutboxKey("t-1", ANY_KEY)}
    assert keys_of([EncodedPart("t", 0, bytearray(b"x"), frozenset({0}))]) == {OutboxKey("t-0", ANY_KEY)}  # no key


def test_block_of_a_tripped_breaker_asks_the_broker_for_nothing(world: LastResourceFixture) -> None:
    resource = with_outbox(world)
    tx = put(world, resource, b"1")
    assert (world.rows(), tx.pending, world.markers()) == ([b"1"], ("broker",), {tx.txid: "outboxed"})
    assert world.home.states() == {}


def test_block_without_messages_leaves_no_row(world: LastResourceFixture) -> None:
    resource = with_outbox(world)
    with world.block(resource=resource) as tx:
        tx.connection(resource).execute("INSERT INTO orders (value) VALUES (x'31')")
    assert (world.rows(), tx.pending) == ([b"1"], ())
    assert resource.outbox is not None
    assert resource.outbox.size.rows == 0


def test_rows_are_counted_behind_their_commit(world: LastResourceFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drainer that counts before does not see them, and would look for them much later."""
    resource = with_outbox(world)
    outbox = resource.outbox
    assert outbox is not None
    with at_moment("client.tx.db_committed", lambda: outbox.counted(OutboxSize(0, 0, 0, 0), outbox.newest)):
        put(world, resource, b"1")
    outbox.is_tripped = False
    assert (outbox.size.rows, outbox.is_to_be_looked_at) == (1, True)


@pytest.mark.parametrize("is_lost", [False, True])
def test_prepare_of_an_outboxed_block_is_void(world: LastResourceFixture, is_lost: bool) -> None:
    """At once if the broker is there; the resolver makes sure of it."""
    resource = with_outbox(world)
    put(world, resource, b"1")
    assert resource.outbox is not None
    resource.outbox.is_tripped = False
    if is_lost:
        world.home.faults["rollback"].append(Fault(ConnectionLostError(""), is_executed=False))
    tx = put(world, resource, b"2")  # it finds the first one's key
    assert (tx.pending, world.markers()[tx.txid]) == (("broker",), "outboxed")
    assert world.home.states() == {tx.txid: "prepared" if is_lost else "rolled-back"}
    assert [(left.txid, left.outcome) for left in resource.unresolved] == [(tx.txid, "outboxed")]


def known_topics(world: LastResourceFixture) -> list[tuple[str, int, int]]:
    with world.outside() as connection:
        select = "SELECT name, topic_id, partitions FROM txmq_marker_outbox_topics ORDER BY name"
        return connection.execute(select).fetchall()


def test_blocks_tell_the_database_of_topics(world: LastResourceFixture) -> None:
    resource = with_outbox(world)
    assert known_topics(world) == [("audit", 2, 1), ("orders", 1, 1)]
    world.home.topics.partitions = 8
    put(world, resource, b"1")
    assert known_topics(world) == [("audit", 2, 1), ("orders", 1, 8)]
    assert resource.outbox is not None
    assert resource.outbox.told == {"orders": TopicSize(1, 8)}


def test_block_whose_topic_has_grown_is_run_again(world: LastResourceFixture) -> None:
    """Another process has told the database; this block's message names a partition of before."""
    resource = with_outbox(world)
    with world.outside() as connection:
        connection.execute("UPDATE txmq_marker_outbox_topics SET partitions = 8")
    with pytest.raises(RolledBackError, match="orders has other partitions by now") as refused:
        put(world, resource, b"1")
    assert refused.value.retriable
    assert world.home.topics.assumed["orders"] == TopicSize(1, 8)
    world.home.topics.partitions = 8
    put(world, resource, b"2")
    assert world.rows() == [b"2"]


def test_block_in_which_a_topic_changes_is_run_again(world: LastResourceFixture) -> None:
    resource = with_outbox(world)
    tx = world.block(resource=resource)
    tx.__enter__()
    tx.send("orders", b"1")
    world.home.topics.changes += 1
    with pytest.raises(RolledBackError, match="has other partitions by now"):
        tx.__exit__(None, None, None)
    assert world.markers() == {}


def test_block_that_would_overtake_another_database_waits(world: LastResourceFixture, tmp_path: Path) -> None:
    """Its client's commit to that partition is not answered: neither outbox nor prepare goes before it."""
    stock = another(world, tmp_path / "stock")
    order(stock, b"first")
    resource = with_outbox(world)
    with pytest.raises(RolledBackError):
        put(world, resource, b"second", timeout=0.3)
    assert world.rows() == []


@pytest.mark.parametrize("options", [OutboxOptions(rows_max=1), OutboxOptions(size_bytes_max=200)])
def test_full_outbox_refuses(world: LastResourceFixture, options: OutboxOptions) -> None:
    resource = LastResource("orders-db", connect=world.connect, outbox=options)
    resource.install(world.home)
    assert resource.outbox is not None
    resource.outbox.trip()
    put(world, resource, b"1")
    with pytest.raises(RolledBackError, match="full"):
        put(world, resource, b"2")
    assert world.rows() == [b"1"]


def test_slow_database_does_not_trip_the_breaker(world: LastResourceFixture) -> None:
    """The prepare was answered long before, beside the marker's INSERT."""
    resource = with_outbox(world)
    state = resource.outbox
    assert state is not None
    state.is_tripped = False
    for value in (b"1", b"2", b"3"):
        with at_moment("client.tx.marker_inserted", lambda: world.home.clock.advance(0.3)):
            put(world, resource, value)
    assert not state.is_tripped


def test_rows_of_a_commit_without_an_answer_are_counted(world: LastResourceFixture) -> None:
    resource = with_outbox(world)
    assert resource.outbox is not None
    resource.outbox.counted(OutboxSize(0, 0, 0, 0), resource.outbox.newest)
    with world.block(resource=resource) as tx:
        tx.connection(resource).execute("INSERT INTO orders (value) VALUES (x'31')")
        tx.send("orders", b"1")
        world.opened[-1].fail_behind = sqlite3.OperationalError("connection lost")
    assert tx.outcome is Outcome.COMMITTED
    assert (resource.outbox.size.rows, resource.outbox.may_wait) == (1, True)


def test_slow_prepares_in_turn_trip_the_breaker(world: LastResourceFixture) -> None:
    clock = world.home.clock
    state = OutboxState(OutboxOptions(slow_after_ms=100), clock, "h")
    for took_s in (0.2, 0.2, 0.01, 0.2, 0.2):
        state.prepared(took_s)
    assert not state.is_tripped
    state.prepared(0.2)
    assert state.is_tripped
    state.close()
    assert state.is_tripped
    clock.advance(TRIPPED_S_MIN)
    state.close()
    assert not state.is_tripped


# --- always ----------------------------------------------------------------------------------------------------------


def always(world: LastResourceFixture, **options: int) -> LastResource:
    resource = LastResource("orders-db", connect=world.connect, outbox=OutboxOptions(when="always", **options))
    resource.install(world.home)
    return resource


def test_outbox_always_asks_the_broker_for_nothing(world: LastResourceFixture, quiet: Quiet) -> None:
    resource = always(world)
    tx = put(world, resource, b"1")
    assert (world.rows(), tx.pending, world.markers()) == ([b"1"], ("broker",), {tx.txid: "enclosed"})
    assert (world.home.states(), quiet.drains, quiet.wakes) == ({}, [resource], 0)


def test_word_always_is_the_option() -> None:
    found = LastResource("orders-db", connect=lambda: None, outbox="always").outbox
    assert found is not None
    assert found.is_always
    with pytest.raises(ConfigError):
        OutboxOptions(when="never")  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        OutboxOptions(markers_kept_s=1.0)


def test_enclosed_block_whose_topic_has_grown_leaves_nothing(world: LastResourceFixture) -> None:
    resource = always(world)
    put(world, resource, b"1")  # now it knows what the database knows
    with world.outside() as connection:
        connection.execute("UPDATE txmq_marker_outbox_topics SET partitions = 8")
    with pytest.raises(RolledBackError, match="orders has other partitions by now"):
        put(world, resource, b"2")
    assert world.home.topics.assumed["orders"] == TopicSize(1, 8)
    assert (world.rows(), len(world.markers())) == ([b"1"], 1)


def test_enclosed_block_that_would_overtake_another_database_waits(
    world: LastResourceFixture, tmp_path: Path
) -> None:  # fmt: skip
    stock = another(world, tmp_path / "stock")
    order(stock, b"first")
    resource = always(world)
    with pytest.raises(RolledBackError):
        put(world, resource, b"second", timeout=0.3)
    assert world.rows() == []


@pytest.mark.parametrize("is_in", [False, True])
def test_commit_without_an_answer_is_looked_up(world: LastResourceFixture, is_in: bool) -> None:
    resource = always(world)
    tx = world.block(resource=resource)
    tx.__enter__()
    tx.connection(resource).execute("INSERT INTO orders (value) VALUES (x'31')")
    tx.send("orders", b"1")
    lost = ConnectionError("lost")
    setattr(world.opened[-1], "fail_behind" if is_in else "fail_before", lost)
    if is_in:
        tx.__exit__(None, None, None)
        assert (tx.outcome, world.markers()) == (Outcome.COMMITTED, {tx.txid: "enclosed"})
    else:
        with pytest.raises(RolledBackError):
            tx.__exit__(None, None, None)
        assert tx.outcome is Outcome.ROLLED_BACK
    assert world.rows() == ([b"1"] if is_in else [])
