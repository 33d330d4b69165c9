"""Rules of the relay's core, each taken away. Those of the database and the broker are broken in ``driver``."""
# ruff: noqa: SLF001 - it replaces parts of the core

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from txmq.outbox import relay_core
from txmq.outbox.page import BEHIND, UNKNOWN_TOPIC, OutboxRow, Page, Waiting, build
from txmq.outbox.relay_core import Answer, Locked, RelayCore, RelayRow, Send, Turns


def _ended_is_rolled_back(core: RelayCore, row: RelayRow) -> Turns:
    core._known = str(row.claim), False
    return
    yield


def _refused_is_rolled_back(core: RelayCore, row: RelayRow, rows: tuple[OutboxRow, ...]) -> Turns:
    sending = SEND(core, row, rows)
    answer, step = None, next(sending)
    while True:
        answer = yield step
        if isinstance(step, Send) and answer is Answer.REFUSED:
            core._known = str(row.claim), False
        try:
            step = sending.send(answer)
        except StopIteration:
            return


def _own_rows_are_deleted(core: RelayCore, locked: Locked) -> Turns:
    """The page that it sent last, whatever the relay row says."""
    sent: RelayRow | None = getattr(core, "sent", None)
    if sent is not None and core._known == (sent.claim, True):
        locked = locked._replace(row=locked.row._replace(claim=sent.claim, ids=sent.ids))
    for_claim = CLAIM_AND_SEND(core, locked)
    step = next(for_claim)
    while True:
        if isinstance(step, Send):
            core.sent = step.row  # type: ignore[attr-defined]
        try:
            step = for_claim.send((yield step))
        except StopIteration:
            return


def _row_parked_alone(waiting: Waiting, known_topics: Any, **given: Any) -> Page:
    page = build(waiting, known_topics, **given)
    parked = [(row, why) for row, why in page.parked if why != UNKNOWN_TOPIC or row.topic not in known_topics]
    first = min((row.id for row, _ in parked), default=0)
    units = {row.group for row, why in page.parked if why != BEHIND}
    rows = [row for row in waiting.rows if row.id < first and row.group not in units] if units else page.rows
    return Page(rows, parked)


SEND, CLAIM_AND_SEND = RelayCore._send, RelayCore._claim_and_send
_CORE: dict[str, tuple[object, str, Callable[..., object]]] = {
    "claim_overwritten": (RelayCore, "_must_settle", lambda _core, _row: False),
    "outcome_alone": (RelayCore, "_ask_chain", _ended_is_rolled_back),
    "refusal_not_fenced": (RelayCore, "_send", _refused_is_rolled_back),
    "claim_not_compared": (RelayCore, "_claim_and_send", _own_rows_are_deleted),
    "row_parked_alone": (relay_core, "build", _row_parked_alone),
    "topics_not_asked": (RelayCore, "_may_topics_be_old", lambda _core, _row: False),
}


@contextmanager
def broken(mutation: str) -> Iterator[None]:
    """With that rule taken away, if it is one of the core."""
    if mutation in _CORE:
        owner, name, instead = _CORE[mutation]
        with patch.object(owner, name, instead):
            yield
    else:
        yield
