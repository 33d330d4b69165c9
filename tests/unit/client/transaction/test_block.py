"""The transaction block, and local transactions at a broker whose answers go missing."""

# ruff: noqa: PT012  the error leaves a whole transaction block, so more than one statement stands in it

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest

from tests.chains import has_circle
from tools.simulated.broker import SimulatedBroker
from tools.simulated.faults import Fault, Reply, lost
from txmq.client.transaction import block as module
from txmq.client.transaction.block import Transaction
from txmq.client.transaction.current import current_transaction
from txmq.client.transport.reconnecting import AWAY_S_MAX
from txmq.errors import (
    BrokerAwayError,
    ConfigError,
    DiskFullError,
    FencedError,
    OutcomeUnknownError,
    OverloadedError,
    RemoteProtocolError,
    RequestTimeoutError,
    RolledBackError,
    TooLargeError,
    TransactionConflictError,
    TransactionStateError,
    TransactionTimeoutError,
    TxmqError,
    UnavailableError,
    UnknownTopicError,
)
from txmq.model import Outcome, SendStatus


def block(home: SimulatedBroker, timeout: float = 30.0) -> Transaction:
    return Transaction(home, home, (), timeout)


@pytest.fixture
def home() -> SimulatedBroker:
    return SimulatedBroker()


# --- the block -------------------------------------------------------------------------------------------------------


def test_one_request_carries_all_topics_and_results_keep_sending_order(home: SimulatedBroker) -> None:
    with block(home) as tx:
        tx.send("orders", b"1", key=b"\x00")
        tx.send("audit", b"2")
        home.send("orders", b"3", key=b"\x01")
        tx.send("orders", b"4", key=b"\x00")
        assert {result.status for result in tx.results} == {SendStatus.PENDING}
    assert home.requests == ["commit"]
    assert tx.outcome is Outcome.COMMITTED
    assert [(r.topic, r.partition, r.offset) for r in tx.results] == [
        ("orders", 0, 0), ("audit", 0, 0), ("orders", 1, 0), ("orders", 0, 1),
    ]  # fmt: skip
    assert tx.pending == ()
    assert {message.txid for message in home.messages("orders")} == {tx.txid}


def test_an_empty_transaction_sends_nothing_and_is_committed(home: SimulatedBroker) -> None:
    with block(home) as tx:
        pass
    assert (home.requests, tx.outcome, tx.results) == ([], Outcome.COMMITTED, [])


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_body_raises_goes_on_unchanged_and_nothing_is_sent(
    home: SimulatedBroker, kind: type[BaseException]
) -> None:
    error = kind("body")
    with pytest.raises(kind) as caught, block(home) as tx:
        tx.send("orders", b"1")
        raise error
    assert caught.value is error
    assert (home.requests, tx.outcome) == ([], Outcome.ROLLED_BACK)


def test_blocks_do_not_nest_and_the_outer_one_goes_on(home: SimulatedBroker) -> None:
    with block(home) as outer:
        with pytest.raises(TransactionStateError, match="nest"), block(home):
            pass
        assert current_transaction() is outer
        outer.send("orders", b"1")
    assert home.values("orders") == [b"1"]
    assert current_transaction() is None


@pytest.mark.parametrize(
    "use",
    [
        lambda tx: tx.send("orders", b"late"),
        lambda tx: tx.add("orders", 0, None, b"late", [], 0),
        lambda tx: tx.connection(None),
        lambda tx: tx.__enter__(),
    ],
)
def test_a_block_that_is_over_or_new_refuses_its_use(
    home: SimulatedBroker, use: Callable[[Transaction], object]
) -> None:
    with block(home) as tx:
        tx.send("orders", b"1")
    with pytest.raises(TransactionStateError):
        use(tx)
    assert home.values("orders") == [b"1"]


def test_a_transaction_that_has_not_begun_has_no_id(home: SimulatedBroker) -> None:
    with pytest.raises(TransactionStateError, match="not begun"):
        _ = block(home).txid


@pytest.mark.parametrize("timeout", [0.0, -1.0, 1e12])
def test_a_timeout_out_of_range_is_refused(home: SimulatedBroker, timeout: float) -> None:
    with pytest.raises(ConfigError, match="timeout"):
        block(home, timeout)


def test_what_is_no_resource_is_refused(home: SimulatedBroker) -> None:
    with pytest.raises(ConfigError, match="not a resource"):
        Transaction(home, home, ["orders-db"])  # type: ignore[list-item]


def test_ends_that_were_seen_raise_the_floor(home: SimulatedBroker) -> None:
    for _ in range(3):
        with block(home) as tx:
            tx.send("orders", b"1")
    with pytest.raises(ZeroDivisionError), block(home) as tx:
        assert tx.txid
        _ = 1 / 0
    assert home.session.finished_through == 4


# --- answers that go missing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_executed", [False, True])
def test_commit_without_answer_is_sent_again_and_executed_once(home: SimulatedBroker, is_executed: bool) -> None:
    home.faults["commit"].extend([lost(is_executed=is_executed)] * 3)
    with block(home) as tx:
        tx.send("orders", b"1")
    assert (tx.outcome, home.values("orders"), tx.results[0].offset) == (Outcome.COMMITTED, [b"1"], 0)


@pytest.mark.parametrize("is_executed", [False, True])
@pytest.mark.parametrize("error", [lost(is_executed=False).error, RequestTimeoutError(""), UnavailableError("")])
def test_no_answer_until_deadline_is_unknown_outcome_by_id(
    home: SimulatedBroker, error: TxmqError, is_executed: bool
) -> None:
    home.faults["commit"].extend([Fault(error, is_executed)] * 5000)
    with pytest.raises(OutcomeUnknownError) as caught, block(home, 5.0) as tx:
        tx.send("orders", b"1")
    assert (caught.value.txid, tx.outcome) == (tx.txid, Outcome.UNKNOWN)
    assert home.session.finished_through == 0, "its outcome must stay to be asked for"


@pytest.mark.parametrize("is_executed", [False, True])
def test_lost_outcome_is_asked_later_and_no_longer_holds_floor(home: SimulatedBroker, is_executed: bool) -> None:
    home.faults["commit"].extend([Fault(RequestTimeoutError(""), is_executed)] * 5000)
    with pytest.raises(OutcomeUnknownError), block(home, 5.0) as lost_one:
        lost_one.send("orders", b"1")
    home.faults["commit"].clear()
    home.faults["outcome"].append(lost(is_executed=True))  # the first time it is asked for in vain
    for floor in (0, 3):
        with block(home) as tx:
            tx.send("orders", b"2")
        assert (tx.outcome, home.session.finished_through) == (Outcome.COMMITTED, floor)
    assert home.session.known_outcome(1) is (Outcome.COMMITTED if is_executed else Outcome.ROLLED_BACK)
    assert home.values("orders") == [b"1"] * is_executed + [b"2"] * 2
    with pytest.raises(TransactionConflictError) if not is_executed else nullcontext():
        home.call("commit", lost_one.txid, body=())  # fenced: what never arrived must not arrive now


@pytest.mark.parametrize("is_executed", [False, True])
def test_answer_to_commit_that_cannot_be_read_is_asked_about(home: SimulatedBroker, is_executed: bool) -> None:
    """Found: ROLLED_BACK was told of what was committed."""
    home.faults["commit"].append(Fault(RemoteProtocolError("no result line"), is_executed))
    with nullcontext() if is_executed else pytest.raises(RolledBackError), block(home) as tx:
        tx.send("orders", b"1")
    assert tx.outcome is (Outcome.COMMITTED if is_executed else Outcome.ROLLED_BACK)
    assert home.values("orders") == [b"1"] * is_executed
    if not is_executed:
        with pytest.raises(TransactionConflictError):
            home.call("commit", tx.txid, body=())


def test_interrupted_commit_is_asked_for(home: SimulatedBroker) -> None:
    home.faults["commit"].append(Fault(KeyboardInterrupt(), is_executed=True))  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt), block(home) as tx:
        tx.send("orders", b"1")
    with block(home) as later:
        later.send("orders", b"2")
    assert (tx.outcome, home.session.known_outcome(1), home.session.finished_through) == (
        Outcome.UNKNOWN,
        Outcome.COMMITTED,
        2,
    )


def test_a_deadline_that_passed_in_the_body_sends_nothing(home: SimulatedBroker) -> None:
    with pytest.raises(TransactionTimeoutError), block(home, 5.0) as tx:
        tx.send("orders", b"1")
        home.clock.advance(5.1)
    assert (home.requests, tx.outcome) == ([], Outcome.ROLLED_BACK)


def test_broker_that_cannot_be_reached_at_all_is_rollback(
    home: SimulatedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert home.session.finished_through == 0  # it is connected
    began, reached = home.clock.monotonic(), home.control.reach

    def away_behind_it(deadline: float) -> None:
        reached(deadline)
        home.is_away = True

    with pytest.raises(BrokerAwayError) as caught, block(home, 500.0) as tx:
        monkeypatch.setattr(home.control, "reach", away_behind_it)
        tx.send("orders", b"1")
    assert isinstance(caught.value, RolledBackError)
    assert (tx.outcome, home.clock.monotonic() - began) == (Outcome.ROLLED_BACK, AWAY_S_MAX)


def test_block_does_not_begin_while_broker_is_away_nor_end(home: SimulatedBroker) -> None:
    home.is_away = True
    body_ran = False
    with pytest.raises(BrokerAwayError), block(home):
        body_ran = True
    assert not body_ran
    home.is_away = False
    with pytest.raises(BrokerAwayError) as caught, block(home) as tx:
        tx.send("orders", b"1")
        home.is_away = True
    assert isinstance(caught.value, RolledBackError)
    assert (tx.outcome, home.requests) == (Outcome.ROLLED_BACK, [])


def test_a_refused_commit_is_a_rollback_with_its_cause(home: SimulatedBroker) -> None:
    with pytest.raises(RolledBackError) as caught, block(home) as tx:
        tx.send("orders", b"1")
        tx.send("no-such-topic", b"2")
    assert isinstance(caught.value.__cause__, UnknownTopicError)
    assert (tx.outcome, home.values("orders")) == (Outcome.ROLLED_BACK, [])


def test_fenced_without_an_earlier_attempt_was_not_executed(home: SimulatedBroker) -> None:
    home.faults["commit"].append(Fault(FencedError("")))
    with pytest.raises(RolledBackError), block(home) as tx:
        tx.send("orders", b"1")


@pytest.mark.parametrize("is_executed", [False, True])
def test_fenced_behind_a_lost_attempt_is_unknown(home: SimulatedBroker, is_executed: bool) -> None:
    home.faults["commit"].extend([lost(is_executed=is_executed), Fault(FencedError(""))])
    with pytest.raises(OutcomeUnknownError), block(home) as tx:
        tx.send("orders", b"1")
    assert tx.outcome is Outcome.UNKNOWN


@pytest.mark.parametrize("refusal", [OverloadedError(""), TransactionConflictError(""), UnknownTopicError("")])
@pytest.mark.parametrize("is_executed", [False, True])
def test_refusal_after_a_lost_attempt_is_fenced_and_raised_unchanged(
    home: SimulatedBroker, refusal: TxmqError, is_executed: bool
) -> None:
    home.faults["commit"].extend([lost(is_executed=is_executed), Fault(refusal)])
    if is_executed:
        with block(home) as tx:
            tx.send("orders", b"1")
        assert (tx.outcome, tx.results[0].offset) == (Outcome.COMMITTED, 0)
    else:
        with pytest.raises(RolledBackError), block(home) as tx:
            tx.send("orders", b"1")
        assert home.states() == {tx.txid: "rolled-back"}, "a copy of the first attempt that arrives late is refused"


def test_a_refusal_that_cannot_be_fenced_is_unknown(home: SimulatedBroker) -> None:
    home.faults["commit"].extend([lost(is_executed=False), Fault(OverloadedError(""))])
    home.faults["rollback"].append(lost(is_executed=False))
    with pytest.raises(OutcomeUnknownError), block(home) as tx:
        tx.send("orders", b"1")


def test_an_interrupt_in_the_commit_is_not_a_rollback(home: SimulatedBroker) -> None:
    def interrupted(*_: object) -> Reply:
        raise KeyboardInterrupt

    home.intercept = interrupted
    with pytest.raises(KeyboardInterrupt), block(home) as tx:
        tx.send("orders", b"1")
    assert tx.outcome is Outcome.UNKNOWN
    assert home.session.finished_through == 0


# --- larger than one request -----------------------------------------------------------------------------------------


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> SimulatedBroker:
    """A home that takes 64 KiB a request, and a client that keeps 100 KiB at most."""
    monkeypatch.setattr(module, "_STREAM_AT_BYTES", 100 << 10)
    return SimulatedBroker(request_size_bytes_max=64 << 10)


def _large(tx: Transaction, count: int = 30) -> list[bytes]:
    values = [bytes([n]) * 10_000 for n in range(count)]
    for value in values:
        tx.send("orders", value, key=b"\x00")
    return values


def test_a_large_transaction_streams_its_parts_and_keeps_order(narrow: SimulatedBroker) -> None:
    with block(narrow) as tx:
        values = _large(tx)
        assert narrow.requests.count("put") > 1, "memory is bounded while the body runs"
        assert narrow.values("orders") == []
    assert narrow.requests[-1] == "commit"
    assert narrow.values("orders") == values
    assert [result.offset for result in tx.results] == list(range(30))


def test_a_body_error_rolls_back_what_was_streamed(narrow: SimulatedBroker) -> None:
    with pytest.raises(ZeroDivisionError), block(narrow) as tx:
        _large(tx)
        _ = 1 / 0
    assert narrow.requests[-1] == "rollback"
    assert (narrow.states(), narrow.values("orders")) == ({tx.txid: "rolled-back"}, [])


def test_a_rollback_that_fails_does_not_replace_the_body_error(narrow: SimulatedBroker) -> None:
    narrow.faults["rollback"].append(lost(is_executed=False))
    with pytest.raises(ZeroDivisionError), block(narrow) as tx:
        _large(tx)
        _ = 1 / 0
    assert tx.outcome is Outcome.ROLLED_BACK


@pytest.mark.parametrize("error", [lost(is_executed=False).error, RequestTimeoutError("")])
@pytest.mark.parametrize("is_executed", [False, True])
def test_lost_part_dooms_block_even_where_body_goes_on(
    narrow: SimulatedBroker, is_executed: bool, error: TxmqError
) -> None:
    narrow.faults["put"].extend([None, Fault(error, is_executed)])
    with pytest.raises(RolledBackError), block(narrow) as tx:
        with pytest.raises(RolledBackError):
            _large(tx)
        tx.send("orders", b"small")
    assert (tx.outcome, narrow.values("orders")) == (Outcome.ROLLED_BACK, [])
    assert "commit" not in narrow.requests


@pytest.mark.parametrize("is_executed", [False, True])
def test_lost_commit_of_streamed_parts_is_told_as_it_is(narrow: SimulatedBroker, is_executed: bool) -> None:
    """A lost connection rolls back what was only streamed; what was decided stays."""
    narrow.faults["commit"].append(lost(is_executed=is_executed))
    if is_executed:
        with block(narrow) as tx:
            values = _large(tx)
        assert narrow.values("orders") == values
    else:
        with pytest.raises(RolledBackError), block(narrow) as tx:
            _large(tx)
        assert narrow.values("orders") == []
    assert tx.outcome is (Outcome.COMMITTED if is_executed else Outcome.ROLLED_BACK)


# --- what leaves a block ---------------------------------------------------------------------------------------------


class _OwnError(Exception):
    """The application's."""


def test_error_of_a_late_part_is_not_its_own_cause(home: SimulatedBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STREAM_AT_BYTES", 100)
    with pytest.raises(TransactionTimeoutError) as caught, block(home, timeout=1.0) as tx:
        home.clock.advance(2.0)
        tx.send("orders", b"x" * 200)
    assert not has_circle(caught.value)


def test_refusal_met_again_while_it_is_handled_makes_no_circle(
    home: SimulatedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_STREAM_AT_BYTES", 100)
    home.faults["put"].append(Fault(UnknownTopicError("gone")))
    with pytest.raises(RolledBackError) as caught, block(home) as tx:
        try:
            tx.send("orders", b"x" * 200)
        except RolledBackError as first:
            try:
                raise _OwnError from first
            except _OwnError:
                tx.send("orders", b"y" * 200)
    assert isinstance(caught.value.__cause__, UnknownTopicError)
    assert not has_circle(caught.value)


def test_whether_block_may_be_run_again_is_what_refusal_says(home: SimulatedBroker) -> None:
    refusals: dict[TxmqError, bool] = {
        TooLargeError("5 MiB"): False, UnknownTopicError("gone"): False, OverloadedError("busy"): True,
        DiskFullError("full"): True, TransactionConflictError("of this id"): True, FencedError("this id"): True,
    }  # fmt: skip
    for refusal, is_retriable in refusals.items():
        home.faults["commit"].append(Fault(refusal))
        with pytest.raises(RolledBackError) as caught, block(home) as tx:
            tx.send("orders", b"1")
        assert caught.value.retriable is is_retriable, refusal
