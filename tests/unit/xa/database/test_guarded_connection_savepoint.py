"""``tx.savepoint``: a statement in it may fail, and the rest of the block is as sound as before."""

# ruff: noqa: PT012  the error leaves a whole transaction block, so more than one statement stands in it

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from pathlib import Path

import pytest

from txmq.client.transaction import block as module
from txmq.client.transaction.block import Transaction
from txmq.errors import HeuristicHazardError, RolledBackError, TransactionStateError
from txmq.model import Message, Outcome
from txmq.xa import LastResource

from ..support import LastResourceFixture

DUPLICATE = "INSERT INTO orders (id) VALUES (1), (1)"


@pytest.fixture(params=["", None], ids=["implicit", "autocommit"])
def world(request: pytest.FixtureRequest, world: LastResourceFixture) -> LastResourceFixture:
    world.options["isolation_level"] = request.param
    return world


def _fail(world: LastResourceFixture, tx: Transaction) -> None:
    tx.connection(world.resource).execute(DUPLICATE)


def test_error_that_leaves_it_undoes_only_its_rows_and_messages(world: LastResourceFixture) -> None:
    with world.block() as tx:
        world.insert(tx, b"before")
        with pytest.raises(sqlite3.IntegrityError), tx.savepoint(world.resource):
            world.insert(tx, b"undone")
            _fail(world, tx)
        world.insert(tx, b"behind")
    assert tx.outcome is Outcome.COMMITTED
    assert world.rows() == world.home.values("orders") == [b"before", b"behind"]
    assert [result.offset for result in tx.results] == [0, 1]


def test_application_exception_undoes_the_savepoint(world: LastResourceFixture) -> None:
    with world.block() as tx:
        with pytest.raises(ZeroDivisionError), tx.savepoint(world.resource):
            world.insert(tx, b"undone")
            _ = 1 / 0
        world.insert(tx, b"behind")
    assert world.rows() == world.home.values("orders") == [b"behind"]


def test_a_statement_whose_failure_is_caught_inside_leaves_the_others(world: LastResourceFixture) -> None:
    with world.block() as tx:
        with tx.savepoint(world.resource):
            world.insert(tx, b"stays")
            with suppress(sqlite3.IntegrityError):
                _fail(world, tx)
        world.insert(tx, b"behind")
    assert world.rows() == world.home.values("orders") == [b"stays", b"behind"]


def test_they_nest_and_the_inner_one_alone_is_undone(world: LastResourceFixture) -> None:
    with world.block() as tx:
        with tx.savepoint(world.resource):
            world.insert(tx, b"outer")
            with pytest.raises(sqlite3.IntegrityError), tx.savepoint(world.resource):
                world.insert(tx, b"inner")
                _fail(world, tx)
        with pytest.raises(ZeroDivisionError), tx.savepoint(world.resource):
            with tx.savepoint(world.resource):
                world.insert(tx, b"released, and undone with the outer one")
            _ = 1 / 0
    assert world.rows() == world.home.values("orders") == [b"outer"]


def test_it_forgives_nothing_that_failed_in_front_of_it(world: LastResourceFixture) -> None:
    with pytest.raises(RolledBackError, match="UNIQUE"), world.block() as tx:
        with suppress(sqlite3.IntegrityError):
            _fail(world, tx)
        with tx.savepoint(world.resource):
            world.insert(tx, b"x")
    assert (tx.outcome, world.rows()) == (Outcome.ROLLED_BACK, [])


def test_block_that_fails_behind_it_is_undone_as_whole(world: LastResourceFixture) -> None:
    with pytest.raises(ZeroDivisionError), world.block() as tx:
        with tx.savepoint(world.resource):
            world.insert(tx, b"x")
        _ = 1 / 0
    assert (tx.outcome, world.rows(), world.home.requests) == (Outcome.ROLLED_BACK, [], [])


def test_body_that_commits_in_the_savepoint_dooms_the_block(world: LastResourceFixture) -> None:
    tx = world.block()
    with pytest.raises(HeuristicHazardError), tx, suppress(RolledBackError), tx.savepoint(world.resource):
        world.insert(tx, b"x")
        tx.connection(world.resource).execute("COMMIT")
    assert (world.rows(), world.home.values("orders"), tx.outcome) == ([b"x"], [], Outcome.UNKNOWN)


def test_rollback_of_databases_own_in_it_dooms_block(world: LastResourceFixture) -> None:
    with pytest.raises(RolledBackError), world.block() as tx:
        world.insert(tx, b"x")
        with suppress(sqlite3.IntegrityError), tx.savepoint(world.resource):
            tx.connection(world.resource).execute("INSERT OR ROLLBACK INTO orders (id) VALUES (1)")
    assert (world.rows(), tx.outcome, world.home.requests) == ([], Outcome.ROLLED_BACK, [])


def test_messages_that_were_sent_ahead_cannot_be_taken_back(
    world: LastResourceFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_STREAM_AT_BYTES", 1000)
    with pytest.raises(RolledBackError, match="ahead") as caught, world.block() as tx:
        with pytest.raises(sqlite3.IntegrityError), tx.savepoint(world.resource):
            world.insert(tx, b"x" * 2000)
            _fail(world, tx)
        world.insert(tx, b"behind")
    assert (world.rows(), world.home.values("orders"), caught.value.retriable) == ([], [], False)


def test_what_takes_no_part_and_offsets_are_refused(world: LastResourceFixture, tmp_path: Path) -> None:
    other = LastResource("other", connect=lambda: tmp_path)
    with world.block() as tx:
        with pytest.raises(TransactionStateError, match="no part"), tx.savepoint(other):
            pytest.fail("it was entered")
        message = Message("orders", 0, 0, None, b"", {}, None, 0, None)
        with pytest.raises(TransactionStateError, match="outside of the savepoint"), tx.savepoint(world.resource):
            tx.ack(message)
    assert tx.outcome is Outcome.COMMITTED


def test_message_of_another_thread_is_refused_while_it_is_open(world: LastResourceFixture) -> None:
    """It is not known whether the savepoint is to take such a message back; it did, without a word."""
    with ThreadPoolExecutor(1) as thread, world.block() as tx:
        with pytest.raises(ZeroDivisionError), tx.savepoint(world.resource):
            world.insert(tx, b"undone")
            with pytest.raises(TransactionStateError, match="savepoint"):
                thread.submit(tx.send, "orders", b"another thread's").result()
            _ = 1 / 0
        world.insert(tx, b"mine")
        thread.submit(tx.send, "orders", b"another thread's").result()
    assert (world.rows(), world.home.values("orders")) == ([b"mine"], [b"mine", b"another thread's"])


def test_another_thread_opens_none_while_one_is_open(world: LastResourceFixture) -> None:
    world.options["check_same_thread"] = False
    with ThreadPoolExecutor(1) as thread, world.block() as tx, tx.savepoint(world.resource):
        with pytest.raises(TransactionStateError, match="savepoint"):
            thread.submit(tx.savepoint(world.resource).__enter__).result()
        world.insert(tx, b"x")
    assert world.rows() == world.home.values("orders") == [b"x"]


def test_threads_that_carry_its_context_send_in_it(world: LastResourceFixture) -> None:
    with ThreadPoolExecutor(1) as thread, world.block() as tx:
        with pytest.raises(ZeroDivisionError), tx.savepoint(world.resource):
            thread.submit(copy_context().run, tx.send, "orders", b"undone").result()
            _ = 1 / 0
        world.insert(tx, b"behind")
    assert world.rows() == world.home.values("orders") == [b"behind"]
