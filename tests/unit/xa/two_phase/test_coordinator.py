"""The two-phase coordinator: its table, what must hold for every way through it, and the crash matrix's rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.transition_tables import reachable
from txmq.errors import TransactionStateError
from txmq.state_machine import next_step
from txmq.xa.two_phase.coordinator import (
    ENDS,
    TRANSITIONS,
    BranchState,
    XACoordinator,
    XAEffect,
    XAEvent,
    XAState,
    branches_rolled_back,
    committed,
    vote,
)

E, S, F, B = XAEvent, XAState, XAEffect, BranchState

# The events that may come in each state; every other pair is a defect and must say so.
EXPECTED: dict[XAState, set[XAEvent]] = {
    S.ACTIVE: {E.BODY_DONE, E.BODY_FAILED},
    S.PREPARING: {E.PARTS_REFUSED, E.PREPARED, E.NOT_PREPARED, E.MAYBE_PREPARED},
    S.DECIDING: {E.DECIDED, E.DECIDE_REFUSED, E.DECIDE_DOUBTFUL, E.DECIDE_UNKNOWN},
    S.COMMITTING: {E.BRANCHES_COMMITTED, E.SOME_COMMITTED},
    S.REPORTING: {E.REPORTED, E.NOT_REPORTED},
    S.REPORTING_SOME: {E.REPORTED, E.NOT_REPORTED},
    S.FENCING: {E.FENCED, E.FORGOTTEN, E.FENCE_UNKNOWN, E.DECIDED},
    S.ASKING: {E.FENCED, E.FORGOTTEN, E.FENCE_UNKNOWN, E.DECIDED},
    S.UNDOING: {E.BRANCHES_ROLLED_BACK, E.SOME_ROLLED_BACK},
    S.UNDOING_FENCED: {E.BRANCHES_ROLLED_BACK, E.SOME_ROLLED_BACK},
    S.LEAVING: {E.LEFT},
    S.LEAVING_UNKNOWN: {E.LEFT},
}
for _expected in EXPECTED.values():
    _expected.add(E.INTERRUPTED)
ROLLED_BACK = {S.ROLLED_BACK, S.ROLLED_BACK_PENDING}
COMMITTED = {S.COMMITTED, S.COMMITTED_PENDING}
WAY_LENGTH_MAX = 9  # longer ways repeat an interrupt


@pytest.mark.parametrize(("state", "event"), list(itertools.product(XAState, XAEvent)))
def test_every_state_and_event_has_a_row_or_an_error(state: XAState, event: XAEvent) -> None:
    if event in EXPECTED.get(state, set()):
        following, effects = next_step(TRANSITIONS, state, event)
        assert following in ENDS or effects
    else:
        with pytest.raises(TransactionStateError) as caught:
            next_step(TRANSITIONS, state, event)
        assert state.value in str(caught.value)
        assert event.value in str(caught.value)


class Way:
    """One way through the table: its events, and for each the effects that followed."""

    def __init__(self, events: tuple[XAEvent, ...]) -> None:
        self.events = events
        coordinator = XACoordinator()
        self.states: list[XAState] = []
        self.followed: list[tuple[XAEffect, ...]] = []
        for event in events:
            self.states.append(coordinator.state)
            self.followed.append(coordinator.step(event))
        self.end = coordinator.state

    def is_interrupted_in(self, state: XAState) -> bool:
        """Whether an interrupt came in a state."""
        return (state, E.INTERRUPTED) in zip(self.states, self.events, strict=True)

    def comes(self, effect: XAEffect) -> list[int]:
        """After which events (their places) the effect came."""
        return [place for place, effects in enumerate(self.followed) if effect in effects]


def _ways() -> Iterator[Way]:
    todo: list[tuple[XAState, tuple[XAEvent, ...]]] = [(S.ACTIVE, ())]
    while todo:
        state, events = todo.pop()
        yield Way(events)
        if len(events) < WAY_LENGTH_MAX:
            todo.extend((TRANSITIONS[state, event][0], (*events, event)) for event in EXPECTED.get(state, ()))


WAYS = list(_ways())


def test_every_state_is_reached_and_every_state_reaches_an_end() -> None:
    assert reachable(TRANSITIONS, S.ACTIVE) == set(XAState)
    assert all(reachable(TRANSITIONS, state) & ENDS for state in XAState)


def test_interrupt_is_expected_in_every_state_and_leads_to_end() -> None:
    """KeyboardInterrupt again and again: never a state without a way out."""
    for state in set(XAState) - ENDS:
        following = TRANSITIONS[state, E.INTERRUPTED][0]
        assert reachable(TRANSITIONS, following) & ENDS
        for _ in range(5):
            if following not in ENDS:
                following = TRANSITIONS[following, E.INTERRUPTED][0]
        assert following in ENDS | {S.LEAVING, S.LEAVING_UNKNOWN, S.REPORTING_SOME}


# --- laws ------------------------------------------------------------------------------------------------------------


def test_decide_is_sent_once_when_every_branch_is_prepared() -> None:
    sent = 0
    for way in WAYS:
        places = way.comes(F.SEND_DECIDE)
        sent += len(places)
        assert len(places) <= 1
        assert all(way.events[place] is E.PREPARED for place in places)
    assert sent


def test_behind_decision_nothing_rolls_back_and_nothing_takes_it_back() -> None:
    for start in (S.COMMITTING, S.REPORTING, S.REPORTING_SOME):
        assert reachable(TRANSITIONS, start) & ENDS <= COMMITTED
        for state in reachable(TRANSITIONS, start):
            for event in EXPECTED.get(state, ()):
                assert not {F.ROLL_BACK_BRANCHES, F.SEND_ROLLBACK, F.WITHDRAW} & set(TRANSITIONS[state, event][1])


def test_branches_are_committed_only_behind_the_brokers_word() -> None:
    commits = 0
    for way in WAYS:
        for place in way.comes(F.COMMIT_BRANCHES):
            commits += 1
            assert way.events[place] is E.DECIDED
            assert E.PREPARED in way.events[:place]
    assert commits


def test_what_may_be_prepared_is_rolled_back_only_behind_fence() -> None:
    fenced = 0
    for way in WAYS:
        for place in way.comes(F.ROLL_BACK_BRANCHES):
            before = set(way.events[: place + 1])
            if before & {E.PREPARED, E.MAYBE_PREPARED} or (E.BODY_DONE in before and E.INTERRUPTED in before):
                fenced += 1
                was_never_sent = E.DECIDE_DOUBTFUL not in before and not way.is_interrupted_in(S.DECIDING)
                assert E.FENCED in before or (E.FORGOTTEN in before and was_never_sent)
    assert fenced


def test_fence_that_broker_did_not_acknowledge_leaves_branches() -> None:
    for way in WAYS:
        if E.FENCE_UNKNOWN in way.events:
            behind = way.followed[way.events.index(E.FENCE_UNKNOWN) :]
            assert not {effect for effects in behind for effect in effects} - {F.LEAVE}


def test_complete_is_sent_only_behind_commits() -> None:
    for way in WAYS:
        for place in way.comes(F.SEND_COMPLETE):
            assert way.comes(F.COMMIT_BRANCHES)[0] < place


def test_rolled_back_is_told_only_without_an_executed_decide() -> None:
    checked = 0
    for way in WAYS:
        if way.end in ROLLED_BACK and way.comes(F.SEND_DECIDE):
            checked += 1
            assert E.FENCED in way.events or E.DECIDE_REFUSED in way.events
            assert not {E.DECIDED, E.DECIDE_UNKNOWN} & set(way.events)
    assert checked


def test_committed_is_told_only_if_the_broker_said_it() -> None:
    for way in WAYS:
        if way.end in COMMITTED:
            assert E.DECIDED in way.events
        if way.end is S.COMMITTED:
            assert E.BRANCHES_COMMITTED in way.events
            assert E.REPORTED in way.events


# --- the branches' voices --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("others", [(), (B.PREPARED,), (B.PREPARED, B.PREPARED)])
@pytest.mark.parametrize("one", [B.ACTIVE, B.PREPARING, B.PREPARED, B.REFUSED])
def test_the_vote(one: BranchState, others: tuple[BranchState, ...]) -> None:
    if one is B.PREPARED:
        expected = E.PREPARED
    elif others or one is B.PREPARING:
        expected = E.MAYBE_PREPARED
    else:
        expected = E.NOT_PREPARED
    assert vote((one, *others)) is expected
    assert vote((*others, one)) is expected


@pytest.mark.parametrize("one", list(BranchState))
def test_all_is_all(one: BranchState) -> None:
    is_committed, is_rolled_back = one is B.COMMITTED, one is B.ROLLED_BACK
    assert committed((B.COMMITTED, one)) is (E.BRANCHES_COMMITTED if is_committed else E.SOME_COMMITTED)
    assert branches_rolled_back((one, B.ROLLED_BACK)) is (
        E.BRANCHES_ROLLED_BACK if is_rolled_back else E.SOME_ROLLED_BACK
    )


# --- the crash matrix, as the owner that lives through it sees it ----------------------------------------------------

PREPARED = (E.BODY_DONE, E.PREPARED)
DECIDED = (*PREPARED, E.DECIDED)


@pytest.mark.parametrize(
    ("events", "end"),
    [
        pytest.param(
            (E.BODY_DONE, E.PARTS_REFUSED, E.BRANCHES_ROLLED_BACK), S.ROLLED_BACK, id="5-7 parts are not taken"
        ),
        pytest.param((E.BODY_DONE, E.NOT_PREPARED, E.BRANCHES_ROLLED_BACK), S.ROLLED_BACK, id="8 nobody prepared"),
        pytest.param(
            (E.BODY_DONE, E.MAYBE_PREPARED, E.FENCED, E.BRANCHES_ROLLED_BACK),
            S.ROLLED_BACK,
            id="9 prepare's answer lost",
        ),
        pytest.param(
            (E.BODY_DONE, E.MAYBE_PREPARED, E.FENCED, E.SOME_ROLLED_BACK), S.ROLLED_BACK_PENDING, id="9 and unreachable"
        ),
        pytest.param(
            (E.BODY_DONE, E.MAYBE_PREPARED, E.FENCE_UNKNOWN, E.LEFT), S.ROLLED_BACK_PENDING, id="10 broker away"
        ),
        pytest.param(
            (*PREPARED, E.DECIDE_REFUSED, E.FENCED, E.BRANCHES_ROLLED_BACK), S.ROLLED_BACK, id="12 fenced before"
        ),
        pytest.param((*PREPARED, E.DECIDE_UNKNOWN, E.LEFT), S.UNKNOWN, id="13-16 no answer to decide"),
        pytest.param(
            (*PREPARED, E.DECIDE_DOUBTFUL, E.FENCED, E.BRANCHES_ROLLED_BACK), S.ROLLED_BACK, id="13 it was lost"
        ),
        pytest.param(
            (*PREPARED, E.DECIDE_DOUBTFUL, E.DECIDED, E.BRANCHES_COMMITTED, E.REPORTED),
            S.COMMITTED,
            id="16 it was forced",
        ),
        pytest.param((*PREPARED, E.DECIDE_DOUBTFUL, E.FENCE_UNKNOWN, E.LEFT), S.UNKNOWN, id="15 nobody says"),
        pytest.param((*DECIDED, E.SOME_COMMITTED, E.REPORTED), S.COMMITTED_PENDING, id="17-20 a branch is unreachable"),
        pytest.param((*DECIDED, E.BRANCHES_COMMITTED, E.NOT_REPORTED), S.COMMITTED_PENDING, id="21-22 broker not told"),
        pytest.param((*DECIDED, E.BRANCHES_COMMITTED, E.REPORTED), S.COMMITTED, id="23-24 all is done"),
        pytest.param(
            (E.BODY_FAILED, E.SOME_ROLLED_BACK), S.ROLLED_BACK_PENDING, id="26 a rollback that is not certain"
        ),
        pytest.param((E.INTERRUPTED, E.BRANCHES_ROLLED_BACK), S.ROLLED_BACK, id="ctrl-c in the body"),
        pytest.param(
            (E.BODY_DONE, E.INTERRUPTED, E.FENCED, E.BRANCHES_ROLLED_BACK), S.ROLLED_BACK, id="ctrl-c in prepare"
        ),
        pytest.param(
            (*PREPARED, E.INTERRUPTED, E.DECIDED, E.INTERRUPTED, E.REPORTED), S.COMMITTED_PENDING, id="ctrl-c twice"
        ),
        pytest.param((*PREPARED, E.INTERRUPTED, E.INTERRUPTED, E.LEFT), S.UNKNOWN, id="ctrl-c in decide, twice"),
    ],
)
def test_rows_of_the_crash_matrix(events: tuple[XAEvent, ...], end: XAState) -> None:
    way = Way(events)
    assert way.end is end


def test_row_27_exactly_one_of_commit_and_abort_wins() -> None:
    """The resolver's fence and the owner's decide meet in the broker's journal; the owner follows its word."""
    for way in WAYS:
        if E.FENCED in way.events:
            assert way.end not in COMMITTED
            assert not way.comes(F.COMMIT_BRANCHES)
        if E.DECIDED in way.events and E.DECIDED is way.events[-1]:
            assert F.ROLL_BACK_BRANCHES not in way.followed[-1]
