"""A KeyboardInterrupt anywhere in the end of a block: it ends, its locks go, and its context takes the next one.

At the very entry of ``__exit__`` nothing of a Python function can catch it, so the sweeps begin after that.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import pytest

from tests.interrupts import LoopStrike, Strike
from tests.unit.xa.support import LastResourceFixture, quiet_resolver
from tests.unit.xa.xa_support import Notes, XAFixture
from tools.simulated.broker import SimulatedBroker
from txmq.client.transaction import block, current, ending, last_resource_ending, local_ending, two_phase_ending
from txmq.client.transaction.block import Transaction
from txmq.client.transaction.current import current_transaction
from txmq.errors import TransactionError
from txmq.model import Outcome

FIRST = 2  # after the entry of ``__exit__``
STRUCK = (block, current, ending, last_resource_ending, local_ending, two_phase_ending)
Body = Callable[[Transaction], None]
Struck = Callable[[int, Transaction, Body], bool]


@pytest.fixture
def bank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LastResourceFixture]:
    quiet_resolver(monkeypatch)
    with closing(LastResourceFixture(tmp_path)) as made:
        yield made


def _struck(number: int, tx: Transaction, body: Body, *, fails: bool) -> bool:
    """Run a block whose end is struck at the n-th chance. Returns whether it had so many."""
    strike = Strike(number, *STRUCK)
    try:
        with suppress(KeyboardInterrupt, ZeroDivisionError, TransactionError), tx:
            body(tx)
            sys.setprofile(strike)
            if fails:
                raise ZeroDivisionError
    finally:
        sys.setprofile(None)
    assert current_transaction() is None, f"struck at {number}"
    return strike.left <= 0


def _struck_in_loops(number: int, tx: Transaction, body: Body) -> bool:
    """The same at the n-th loop of the end that begins again."""
    strike = LoopStrike(number, *STRUCK)
    try:
        with suppress(KeyboardInterrupt, TransactionError), tx:
            body(tx)
            strike.start()
    finally:
        strike.stop()
    assert current_transaction() is None, f"struck at {number}"
    return strike.left <= 0


def _send_with_id(tx: Transaction) -> None:
    assert tx.txid
    tx.send("orders", b"1")


@pytest.mark.parametrize("fails", [False, True])
def test_local_block_ends_wherever_it_is_interrupted(fails: bool) -> None:
    number, is_struck = FIRST - 1, True
    while is_struck:
        number += 1
        home = SimulatedBroker()
        tx = Transaction(home, home)
        is_struck = _struck(number, tx, _send_with_id, fails=fails)
        with Transaction(home, home) as later:
            later.send("orders", b"2")
        with Transaction(home, home) as later:
            later.send("orders", b"3")
        assert home.session.finished_through >= 2, f"struck at {number}"
        assert home.values("orders")[-2:] == [b"2", b"3"]
        assert not (tx.outcome is Outcome.ROLLED_BACK and b"1" in home.values("orders"))
    assert number > 5


def _sweep_last_resource(bank: LastResourceFixture, first: int, struck: Struck) -> int:
    """Strike each block at the next chance, until one has no more. Returns how many were tried."""
    number, is_struck = first - 1, True
    while is_struck:
        number += 1
        value = b"%d" % number
        is_struck = struck(number, bank.block(), partial(bank.insert, value=value))
        bank.order(b"behind " + value)  # waits for no lock
    bank.heal()
    assert Counter(bank.rows()) == Counter(bank.home.values("orders"))  # a resolver sends late what it finds decided
    return number


def _sweep_xa(monkeypatch: pytest.MonkeyPatch, first: int, struck: Struck) -> int:
    """The same over two branches."""
    number, is_struck = first - 1, True
    while is_struck:
        number += 1
        world = XAFixture("ab")
        notes = Notes(world.home)
        monkeypatch.setattr(block, "resolver_of", lambda _client, notes=notes: notes)
        is_struck = struck(number, world.block(), partial(world.insert, value=b"1"))
        assert all(branch.is_over for resource in world.resources for branch in resource.branches), number
        world.home.owner_dies()
        world.resolver().run_once()
        world.check()
        notes.resolver.close()
    return number


@pytest.mark.parametrize("fails", [False, True])
def test_last_resource_is_let_go_wherever_block_is_interrupted(bank: LastResourceFixture, fails: bool) -> None:
    assert _sweep_last_resource(bank, FIRST, partial(_struck, fails=fails)) > 5


@pytest.mark.parametrize("fails", [False, True])
def test_xa_branches_are_let_go_wherever_block_is_interrupted(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    assert _sweep_xa(monkeypatch, FIRST, partial(_struck, fails=fails)) > 5


def test_last_resource_is_let_go_where_a_loop_is_interrupted(bank: LastResourceFixture) -> None:
    assert _sweep_last_resource(bank, 1, _struck_in_loops) > 3


def test_xa_branches_are_let_go_where_a_loop_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _sweep_xa(monkeypatch, 1, _struck_in_loops) > 3
