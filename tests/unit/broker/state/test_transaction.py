"""The state machine of one transaction: every state x event has one action, and only the actions of docs and design."""

from __future__ import annotations

import itertools

import pytest

from txmq.broker.state import transaction as module
from txmq.broker.state.transaction import TRANSITIONS, Action, TransactionEvent, TransactionState, next_action
from txmq.errors import TransactionStateError

# Rows: states; columns: PART PREPARE COMMIT_PARTS COMMIT DECIDE COMPLETE ROLLBACK FENCE LOOKUP.
# Written down twice on purpose, here from docs/protocol.md: a changed table needs two changed minds.
EXPECTED = """
NONE        ADD_PART        PREPARE         DECIDE          REFUSE_UNKNOWN  DECIDE_BRANCHES REFUSE_UNKNOWN  FENCE           FENCE         TELL
OPEN        ADD_PART        PREPARE         DECIDE          DECIDE          DECIDE_BRANCHES REFUSE_UNKNOWN  ROLL_BACK       ROLL_BACK     TELL
PREPARED    REFUSE_CONFLICT REPEAT          REFUSE_CONFLICT SETTLE          REFUSE_CONFLICT REFUSE_CONFLICT ROLL_BACK       TELL          TELL
DECIDED     REFUSE_CONFLICT REFUSE_CONFLICT REPEAT          REPEAT          REPEAT          COMPLETE        REFUSE_CONFLICT TELL          TELL
PLACING     REFUSE_CONFLICT REFUSE_CONFLICT REPEAT          SETTLE          REPEAT          COMPLETE        REFUSE_CONFLICT TELL          TELL
COMMITTED   REFUSE_CONFLICT REFUSE_CONFLICT REPEAT          REPEAT          REPEAT          REPEAT          REFUSE_CONFLICT TELL          TELL
ROLLED_BACK REFUSE_CONFLICT REFUSE_CONFLICT REFUSE_CONFLICT REFUSE_CONFLICT REFUSE_CONFLICT REFUSE_CONFLICT REPEAT          TELL          TELL
FORGOTTEN   REFUSE_FENCED   REFUSE_FENCED   REFUSE_FENCED   REFUSE_FENCED   REFUSE_FENCED   REFUSE_FENCED   REFUSE_FENCED   REFUSE_FENCED REFUSE_FENCED
"""  # noqa: E501
ROWS = {row.split()[0]: row.split()[1:] for row in EXPECTED.strip().splitlines()}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(TransactionState, TransactionEvent)))
def test_every_state_and_event_has_its_action(state: TransactionState, event: TransactionEvent) -> None:
    assert next_action(state, event) is Action[ROWS[state.name][list(TransactionEvent).index(event)]]


def test_the_table_has_no_other_entries() -> None:
    assert set(TRANSITIONS) == set(itertools.product(TransactionState, TransactionEvent))


def test_every_action_is_the_action_of_something() -> None:
    assert set(TRANSITIONS.values()) == set(Action)


def test_a_missing_entry_names_state_and_event(monkeypatch: pytest.MonkeyPatch) -> None:
    state, event = TransactionState.PREPARED, TransactionEvent.LOOKUP
    monkeypatch.setattr(module, "TRANSITIONS", {k: v for k, v in TRANSITIONS.items() if k != (state, event)})
    with pytest.raises(TransactionStateError, match=f"{state.value}.*{event.value}"):
        next_action(state, event)


def test_a_decision_is_final() -> None:
    moving = {Action.ADD_PART, Action.PREPARE, Action.DECIDE, Action.SETTLE, Action.ROLL_BACK, Action.FENCE}
    for state in (TransactionState.COMMITTED, TransactionState.ROLLED_BACK, TransactionState.FORGOTTEN):
        assert moving.isdisjoint(TRANSITIONS[state, event] for event in TransactionEvent)
