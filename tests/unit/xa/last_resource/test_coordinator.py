"""The last-resource coordinator: its table, and what must hold for every way through it."""

from __future__ import annotations

import itertools

import pytest

from tests.transition_tables import reachable
from txmq.errors import TransactionStateError
from txmq.state_machine import next_step
from txmq.xa.last_resource.coordinator import (
    ENDS,
    TRANSITIONS,
    LastResourceCoordinator,
    LastResourceEffect,
    LastResourceEvent,
    LastResourceState,
)

Coordinator = LastResourceCoordinator
Effect = LastResourceEffect
Event = LastResourceEvent
State = LastResourceState

# The events that may come in each state; every other pair is a defect and must say so.
EXPECTED: dict[State, set[Event]] = {
    State.ACTIVE: {Event.PARTS_STREAMED, Event.BODY_DONE, Event.BODY_FAILED, Event.INTERRUPTED},
    State.STREAMING: {Event.PARTS_STREAMED, Event.BODY_DONE, Event.BODY_FAILED, Event.INTERRUPTED},
    State.PREPARING: {
        Event.MARKER_INSERTED, Event.MARKER_LEFT, Event.MARKER_REFUSED, Event.PREPARED, Event.PREPARE_REFUSED,
        Event.PREPARE_UNKNOWN, Event.INTERRUPTED,
    },
    State.MARKED: {Event.PREPARED, Event.PREPARE_REFUSED, Event.PREPARE_UNKNOWN, Event.INTERRUPTED},
    State.PREPARED: {Event.MARKER_INSERTED, Event.MARKER_REFUSED, Event.INTERRUPTED},
    State.COMMITTING: {
        Event.DATABASE_COMMITTED, Event.MARKER_REFUSED, Event.DATABASE_REFUSED, Event.DATABASE_UNKNOWN,
        Event.INTERRUPTED,
    },
    State.LOOKING_UP: {Event.PROVED_COMMITTED, Event.PROVED_ROLLED_BACK, Event.LOOKUP_FAILED, Event.INTERRUPTED},
    State.CONFIRMING: {
        Event.BROKER_ROLLED_BACK, Event.BROKER_CONTRADICTS, Event.BROKER_UNKNOWN, Event.INTERRUPTED,
    },
    State.DECIDED: {Event.COMMIT_WRITTEN, Event.COMMIT_LEFT, Event.INTERRUPTED},
    State.UNDOING: {Event.DATABASE_ROLLED_BACK, Event.DATABASE_ENDED, Event.INTERRUPTED},
    State.UNDOING_BOTH: {Event.DATABASE_ROLLED_BACK, Event.DATABASE_ENDED, Event.INTERRUPTED},
    State.REPORTING: {
        Event.BROKER_ROLLED_BACK, Event.BROKER_CONTRADICTS, Event.BROKER_UNKNOWN, Event.INTERRUPTED,
    },
    State.WITHDRAWING: {
        Event.BROKER_ROLLED_BACK, Event.BROKER_CONTRADICTS, Event.BROKER_UNKNOWN, Event.INTERRUPTED,
    },
}  # fmt: skip
ROLLBACKS = {Effect.ROLL_BACK_DATABASE, Effect.SEND_ROLLBACK}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_every_state_and_event_has_a_row_or_an_error(state: State, event: Event) -> None:
    if event in EXPECTED.get(state, set()):
        following, effects = next_step(TRANSITIONS, state, event)
        assert following in ENDS or effects or event in {Event.PARTS_STREAMED, Event.PREPARED}
    else:
        with pytest.raises(TransactionStateError) as caught:
            next_step(TRANSITIONS, state, event)
        assert state.value in str(caught.value)
        assert event.value in str(caught.value)


def test_every_state_is_reached_and_every_state_reaches_an_end() -> None:
    assert reachable(TRANSITIONS, State.ACTIVE) == set(State)
    assert all(reachable(TRANSITIONS, state) & ENDS for state in State)


def test_behind_the_decision_nothing_rolls_back() -> None:
    for state in reachable(TRANSITIONS, State.DECIDED):
        for event in EXPECTED.get(state, ()):
            assert not ROLLBACKS & set(TRANSITIONS[state, event][1])
    assert State.ROLLED_BACK not in reachable(TRANSITIONS, State.DECIDED)


def _ways(length: int) -> list[tuple[Event, ...]]:
    """Every way through the table of at most so many events."""
    ways: list[tuple[Event, ...]] = []
    todo: list[tuple[State, tuple[Event, ...]]] = [(State.ACTIVE, ())]
    while todo:
        state, way = todo.pop()
        ways.append(way)
        if len(way) < length:
            todo.extend((TRANSITIONS[state, event][0], (*way, event)) for event in EXPECTED.get(state, ()))
    return ways


def test_database_is_committed_once_and_only_behind_prepared_and_marker() -> None:
    commits = 0
    for way in _ways(7):
        coordinator = Coordinator()
        effects: list[Effect] = []
        for event in way:
            coming = coordinator.step(event)
            if Effect.COMMIT_DATABASE in coming:
                commits += 1
                before = set(way[: way.index(event) + 1])
                assert Event.PREPARED in before
                assert before & {Event.MARKER_INSERTED, Event.MARKER_LEFT}
            effects.extend(coming)
        assert effects.count(Effect.COMMIT_DATABASE) <= 1
    assert commits


def test_rolled_back_is_told_only_while_no_commit_is_possible() -> None:
    """After COMMIT was sent, a rollback needs the database's refusal, or the marker's proof and the broker's word."""
    checked = 0
    for way in _ways(8):
        coordinator = Coordinator()
        sent = False
        for event in way:
            sent |= Effect.COMMIT_DATABASE in coordinator.step(event)
        if sent and coordinator.state is State.ROLLED_BACK:
            checked += 1
            proof = {Event.PROVED_ROLLED_BACK, Event.BROKER_ROLLED_BACK}
            assert {Event.DATABASE_REFUSED, Event.MARKER_REFUSED} & set(way) or proof <= set(way)
    assert checked


def test_committed_is_told_only_with_a_proof() -> None:
    for way in _ways(8):
        coordinator = Coordinator()
        for event in way:
            coordinator.step(event)
        if coordinator.state in {State.COMMITTED, State.COMMITTED_PENDING}:
            proofs = {
                Event.DATABASE_COMMITTED,
                Event.PROVED_COMMITTED,
                Event.BROKER_CONTRADICTS,
            }
            assert proofs & set(way)


def test_whoever_asked_broker_for_anything_tells_it_to_roll_back() -> None:
    for way in _ways(8):
        coordinator = Coordinator()
        effects: list[Effect] = []
        for event in way:
            effects.extend(coordinator.step(event))
        asked = Effect.SEND_PREPARE in effects or Event.PARTS_STREAMED in way
        if coordinator.state is State.ROLLED_BACK and asked:
            assert Effect.SEND_ROLLBACK in effects


def test_database_ended_by_the_body_is_never_called_rolled_back() -> None:
    ends = set()
    for way in _ways(8):
        coordinator = Coordinator()
        effects: list[Effect] = []
        for event in way:
            effects.extend(coordinator.step(event))
        if Event.DATABASE_ENDED in way and coordinator.is_over:
            ends.add(coordinator.state)
            assert Effect.REPORT_HAZARD in effects
    assert ends == {State.HAZARD}
