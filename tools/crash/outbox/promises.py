"""Two promises beside those of the checker: an order is not refused because the broker is away, and no block hangs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from tools.crash.outbox.cells import OutboxDeath
from tools.crash.worker import TIMEOUT_S
from txmq.testing.checkers.events import History, Operation

HUNG_S: Final = TIMEOUT_S + 5.0
# A body that did not want to go on, and locks that another one held.
_OWN_REASONS: Final = ("ChangedMindError", "1205", "1213", "database is locked")
_FINDINGS_MAX = 20


def broken(history: History, deaths: Sequence[OutboxDeath]) -> list[str]:
    """What was found, a line each.

    Args:
        deaths: that of ``fault-1`` first.
    """
    found = [*_refused(history, deaths), *_hung(history, deaths)]
    return found[:_FINDINGS_MAX]


def _refused(history: History, deaths: Sequence[OutboxDeath]) -> Iterator[str]:
    for operation in history.operations.values():
        error = operation.error or ""
        if operation.status == "fail" and not any(reason in error for reason in _OWN_REASONS):
            during = _during(history, deaths, operation)
            if all(death.spares_services for death in during):
                yield f"O1 refused: {operation.id}, while nobody suffered but the broker: {error}"


def _hung(history: History, deaths: Sequence[OutboxDeath]) -> Iterator[str]:
    for operation in history.operations.values():
        if operation.completed_ns is not None:
            took_s = (operation.completed_ns - operation.invoked_ns) / 1e9
            if took_s > HUNG_S and not any(death.stops_services for death in _during(history, deaths, operation)):
                yield f"O2 hung: {operation.id} took {took_s:.1f} s: {operation.status}, {operation.error}"


def _during(history: History, deaths: Sequence[OutboxDeath], operation: Operation) -> list[OutboxDeath]:
    return [
        death
        for number, death in enumerate(deaths, 1)
        if (fault := history.faults.get(f"fault-{number}")) is not None
        and (operation.completed_ns is None or fault.begun_ns <= operation.completed_ns)
        and (fault.ended_ns is None or fault.ended_ns >= operation.invoked_ns)
    ]
