"""The last-resource coordinator: its table, and what must hold for every way through it."""

from __future__ import annotations

import itertools

import pytest

from txmq.errors import TransactionStateError
from txmq.xa.last_resource.coordinator import (
    ENDS,
    TRANSITIONS,
    LastResourceCoordinator,
    LastResourceEffect,
    LastResourceEvent,
    LastResourceState,
    next_step,
)

# The events that may come in each state; every other pair is a defect and must say so.
EXPECTED: dict[LastResourceState, set[LastResourceEvent]] = {
    LastResourceState.ACTIVE: {LastResourceEvent.PARTS_STREAMED, LastResourceEvent.BODY_DONE, LastResourceEvent.BODY_FAILED, LastResourceEvent.INTERRUPTED},
    LastResourceState.STREAMING: {LastResourceEvent.PARTS_STREAMED, LastResourceEvent.BODY_DONE, LastResourceEvent.BODY_FAILED, LastResourceEvent.INTERRUPTED},
    LastResourceState.PREPARING: {
        LastResourceEvent.MARKER_INSERTED, LastResourceEvent.MARKER_REFUSED, LastResourceEvent.PREPARED, LastResourceEvent.PREPARE_REFUSED, LastResourceEvent.PREPARE_UNKNOWN,
        LastResourceEvent.INTERRUPTED,
    },
    LastResourceState.MARKED: {LastResourceEvent.PREPARED, LastResourceEvent.PREPARE_REFUSED, LastResourceEvent.PREPARE_UNKNOWN, LastResourceEvent.INTERRUPTED},
    LastResourceState.PREPARED: {LastResourceEvent.MARKER_INSERTED, LastResourceEvent.MARKER_REFUSED, LastResourceEvent.INTERRUPTED},
    LastResourceState.COMMITTING: {
        LastResourceEvent.DATABASE_COMMITTED, LastResourceEvent.DATABASE_REFUSED, LastResourceEvent.DATABASE_UNKNOWN, LastResourceEvent.INTERRUPTED,
    },
    LastResourceState.LOOKING_UP: {LastResourceEvent.PROVED_COMMITTED, LastResourceEvent.PROVED_ROLLED_BACK, LastResourceEvent.LOOKUP_FAILED, LastResourceEvent.INTERRUPTED},
    LastResourceState.CONFIRMING: {
        LastResourceEvent.BROKER_ROLLED_BACK, LastResourceEvent.BROKER_CONTRADICTS, LastResourceEvent.BROKER_UNKNOWN, LastResourceEvent.INTERRUPTED,
    },
    LastResourceState.DECIDED: {LastResourceEvent.BROKER_COMMITTED, LastResourceEvent.BROKER_UNKNOWN, LastResourceEvent.BROKER_CONTRADICTS, LastResourceEvent.INTERRUPTED},
    LastResourceState.UNDOING: {LastResourceEvent.DATABASE_ROLLED_BACK, LastResourceEvent.DATABASE_ENDED, LastResourceEvent.INTERRUPTED},
    LastResourceState.UNDOING_BOTH: {LastResourceEvent.DATABASE_ROLLED_BACK, LastResourceEvent.DATABASE_ENDED, LastResourceEvent.INTERRUPTED},
    LastResourceState.REPORTING: {
        LastResourceEvent.BROKER_ROLLED_BACK, LastResourceEvent.BROKER_CONTRADICTS, LastResourceEvent.BROKER_UNKNOWN, LastResourceEvent.INTERRUPTED,
    },
    LastResourceState.WITHDRAWING: {
        LastResourceEvent.BROKER_ROLLED_BACK, LastResourceEvent.BROKER_CONTRADICTS, LastResourceEvent.BROKER_UNKNOWN, LastResourceEvent.INTERRUPTED,
    },
}  # fmt: skip
ROLLBACKS = {LastResourceEffect.ROLL_BACK_DATABASE, LastResourceEffect.SEND_ROLLBACK}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(LastResourceState, LastResourceEvent)))
def test_every_state_and_event_is_in_the_table_or_an_error_that_names_both(
    state: LastResourceState, event: LastResourceEvent
) -> None:
    if event in EXPECTED.get(state, set()):
        following, effects = next_step(state, event)
        assert following in ENDS or effects or event in {LastResourceEvent.PARTS_STREAMED, LastResourceEvent.PREPARED}
    else:
        with pytest.raises(TransactionStateError) as caught:
            next_step(state, event)
        assert state.value in str(caught.value)
        assert event.value in str(caught.value)


def _reachable(start: LastResourceState) -> set[LastResourceState]:
    found, todo = {start}, [start]
    while todo:
        state = todo.pop()
        for event in EXPECTED.get(state, ()):
            following = TRANSITIONS[state, event][0]
            if following not in found:
                found.add(following)
                todo.append(following)
    return found


def test_every_state_is_reached_and_every_state_reaches_an_end() -> None:
    assert _reachable(LastResourceState.ACTIVE) == set(LastResourceState)
    assert all(_reachable(state) & ENDS for state in LastResourceState)


def test_behind_the_decision_nothing_rolls_back() -> None:
    for state in _reachable(LastResourceState.DECIDED):
        for event in EXPECTED.get(state, ()):
            assert not ROLLBACKS & set(TRANSITIONS[state, event][1])
    assert LastResourceState.ROLLED_BACK not in _reachable(LastResourceState.DECIDED)


def _ways(length: int) -> list[tuple[LastResourceEvent, ...]]:
    """Every way through the table of at most so many events."""
    ways: list[tuple[LastResourceEvent, ...]] = []
    todo: list[tuple[LastResourceState, tuple[LastResourceEvent, ...]]] = [(LastResourceState.ACTIVE, ())]
    while todo:
        state, way = todo.pop()
        ways.append(way)
        if len(way) < length:
            todo.extend((TRANSITIONS[state, event][0], (*way, event)) for event in EXPECTED.get(state, ()))
    return ways


def test_the_database_is_committed_once_and_only_behind_prepared_and_marker() -> None:
    commits = 0
    for way in _ways(7):
        coordinator = LastResourceCoordinator()
        effects: list[LastResourceEffect] = []
        for event in way:
            coming = coordinator.step(event)
            if LastResourceEffect.COMMIT_DATABASE in coming:
                commits += 1
                assert {LastResourceEvent.PREPARED, LastResourceEvent.MARKER_INSERTED} <= set(
                    way[: way.index(event) + 1]
                )
            effects.extend(coming)
        assert effects.count(LastResourceEffect.COMMIT_DATABASE) <= 1
    assert commits


def test_rolled_back_is_told_only_while_no_commit_is_possible() -> None:
    """After COMMIT was sent, a rollback needs the database's refusal, or the marker's proof and the broker's word."""
    checked = 0
    for way in _ways(8):
        coordinator = LastResourceCoordinator()
        sent = False
        for event in way:
            sent |= LastResourceEffect.COMMIT_DATABASE in coordinator.step(event)
        if sent and coordinator.state is LastResourceState.ROLLED_BACK:
            checked += 1
            proof = {LastResourceEvent.PROVED_ROLLED_BACK, LastResourceEvent.BROKER_ROLLED_BACK}
            assert LastResourceEvent.DATABASE_REFUSED in way or proof <= set(way)
    assert checked


def test_committed_is_told_only_with_a_proof() -> None:
    for way in _ways(8):
        coordinator = LastResourceCoordinator()
        for event in way:
            coordinator.step(event)
        if coordinator.state in {
            LastResourceState.COMMITTED,
            LastResourceState.COMMITTED_PENDING,
            LastResourceState.COMMITTED_ALONE,
        }:
            proofs = {
                LastResourceEvent.DATABASE_COMMITTED,
                LastResourceEvent.PROVED_COMMITTED,
                LastResourceEvent.BROKER_CONTRADICTS,
            }
            assert proofs & set(way)


def test_whoever_asked_the_broker_for_anything_tells_it_to_roll_back() -> None:
    for way in _ways(8):
        coordinator = LastResourceCoordinator()
        effects: list[LastResourceEffect] = []
        for event in way:
            effects.extend(coordinator.step(event))
        asked = LastResourceEffect.SEND_PREPARE in effects or LastResourceEvent.PARTS_STREAMED in way
        if coordinator.state is LastResourceState.ROLLED_BACK and asked:
            assert LastResourceEffect.SEND_ROLLBACK in effects


def test_a_database_that_the_body_has_ended_is_never_told_as_rolled_back() -> None:
    ends = set()
    for way in _ways(8):
        coordinator = LastResourceCoordinator()
        effects: list[LastResourceEffect] = []
        for event in way:
            effects.extend(coordinator.step(event))
        if LastResourceEvent.DATABASE_ENDED in way and coordinator.is_over:
            ends.add(coordinator.state)
            assert LastResourceEffect.REPORT_HAZARD in effects
    assert ends == {LastResourceState.HAZARD}
