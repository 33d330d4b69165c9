"""``commit`` with ``drained=``, which takes the next number of an outbox series, and the verb ``drained``.

The database has committed the row, so nothing is in doubt: number and decision are one record. The messages wait behind
transactions of the same resource, partition and key that were prepared before. The number is taken all the same, and
the next one may be; only the answer waits. A drainer removes the row when it is answered. Until then whichever
transaction was prepared before sees the row when it inserts its marker, and so cannot commit behind it unseen.

A drainer sends many numbers before the first answer. It may have read the rows long ago. Meanwhile an operator has kept
one of them back, and another drainer has used up its number by a void. The row's number is refused then; the next one
may be free, but its row has to stay behind the one that is kept back. So a connection is given numbers one behind the
other, and a refused one ends that until it asks ``drained`` again.

Invariants:
    * of a number that is not the next one, nothing is journaled;
    * a connection is given a number only behind the one before, which it was told is taken by the row that it sent, or
      by what ``drained`` says;
    * whether a number is taken is told when its record is durable, that its messages are placed when that is.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any, NamedTuple

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.broker.state.outboxes import SERIES_MAX, DrainedRow, OutboxSeries
from txmq.broker.state.transaction import Action, TransactionEvent, next_action
from txmq.broker.verbs import placing, turns
from txmq.broker.verbs.access.asking import INSTALL, RESOURCE, is_administrator, require, require_any, sees
from txmq.broker.verbs.access.shares import SERIES_SHARE, note_made, refuse_over_half
from txmq.broker.verbs.transaction_checks import (
    check_streamed,
    floor_of,
    locate,
    refusal,
    refuse_over_limits,
    refuse_over_outcomes,
    require_owner,
    state_of,
)
from txmq.errors import BadRequestError, OutOfTurnError, OverloadedError
from txmq.model import TransactionKind
from txmq.protocol.grammar import is_hex32
from txmq.protocol.parts import split_parts
from txmq.protocol.requests import Request
from txmq.redo import entries
from txmq.runtime.crashpoints import crash_point

WORDS = frozenset({b"drained", b"number", b"row", b"uuid"})
_WITH_THEM = WORDS | {b"floor"}
_ROW = re.compile(r"[0-9a-z-]{1,64}\Z")


class StatedRow(NamedTuple):
    """A row, as a request brings it: its place in a series, its id, and the resource's."""

    series: str
    number: int
    row: str
    uuid: str


def commit(context: Context, client: ClientConnection, request: Request) -> None:
    """Take the messages of an outbox's row, if its number is the next one; or tell what became of them."""
    _, arguments, extensions, body, opaque = request
    given = extensions or {}
    stated = stated_row(given)
    txid, session = locate(context, arguments[0])
    require_owner(client, session)
    series, last = _begun(context, client, stated)
    is_told = _is_told(client, stated)
    if series is not None and stated.number <= last:
        _answer_again(context, client, opaque, series, stated)
        if is_told:
            client.drained[stated.series] = stated.number
        return
    if stated.number != last + 1 or not is_told:
        raise _out_of_turn(stated, last)
    if series is None:
        refuse_over_half(context, client, SERIES_SHARE, SERIES_MAX, "outbox series")
    if series is None and len(context.state.outboxes.series) >= SERIES_MAX:
        raise OverloadedError(f"{SERIES_MAX} outbox series are known: one is begun only behind a restored database")
    action = next_action(state_of(context, session, txid.counter), TransactionEvent.COMMIT_PARTS)
    name = session.number, txid.counter
    if action is not Action.DECIDE:
        raise refusal(Action.REFUSE_CONFLICT if action is Action.REPEAT else action, arguments[0])
    check_streamed(context, client, context.state.transactions.get(name), {})
    parts, keys = placing.check_parts(context, client, split_parts(body or b""))
    refuse_over_limits(context, session, None, parts)
    floor = floor_of(given, client, session)
    refuse_over_outcomes(context, session, floor)
    if series is None:
        note_made(context, client, SERIES_SHARE, stated.series)
    take(context, client, opaque, name, floor, stated, parts, keys)


def drained(context: Context, client: ClientConnection, request: Request) -> None:
    """Tell how far a series is taken: its last number, and the rows of the newest ones."""
    _, arguments, extensions, _body, opaque = request
    if not is_hex32(arguments[0]):
        raise BadRequestError("drained needs a series: 32 hex")
    name = arguments[0].decode()
    series = context.state.outboxes.series.get(name) or OutboxSeries()
    if series.uuid:
        require(context, client, INSTALL, RESOURCE, series.uuid)
    else:
        require_any(context, client, INSTALL, RESOURCE)
    _refuse_over_series(client, name)
    client.drained[name] = series.last
    start = int((extensions or {}).get(b"from", 0))
    rows = {str(number): taken.row for number, taken in series.behind(start)}
    context.answer_from_state(client, opaque, json.dumps({"last": series.last, "rows": rows}).encode())


def series_rows(context: Context, client: ClientConnection) -> list[dict[str, str | int | None]]:
    """Each series that an operator may see; ``waiting`` rows have a number and no place yet."""
    waiting = Counter(t.meta.get("drained") for t in context.state.transactions.values() if t.meta)
    names = {row["uuid"]: row["resource"] for row in context.resources.rows(context.now_ms)}
    return [
        {
            "series": name, "resource": names.get(series.uuid), "uuid": series.uuid or None, "drained": series.last,
            "waiting": waiting[name],
            "last_ms_ago": None if series.taken_ms is None else max(0, context.now_ms - series.taken_ms),
        }
        for name, series in context.state.outboxes.series.items()
        if (sees(context, client, RESOURCE, series.uuid) if series.uuid else is_administrator(context, client))
    ]  # fmt: skip


def _begun(context: Context, client: ClientConnection, stated: StatedRow) -> tuple[OutboxSeries | None, int]:
    """The row's series, if it has begun, and its last number.

    Raises:
        ForbiddenError: the connection's user may not have transactions with its database.
    """
    series = context.state.outboxes.series.get(stated.series)
    if series is None:
        return None, 0
    if series.uuid:
        require(context, client, INSTALL, RESOURCE, series.uuid)
    return series, series.last


def is_next(context: Context, client: ClientConnection, stated: StatedRow) -> bool:
    """Whether a row has the next number of a series that has begun.

    Raises:
        ForbiddenError: as for any row.
    """
    series, last = _begun(context, client, stated)
    return series is not None and stated.number == last + 1 and _is_told(client, stated)


def _is_told(client: ClientConnection, stated: StatedRow) -> bool:
    """Whether the connection has what it sent under the number before, and nothing of it was refused since it asked."""
    told = client.drained.get(stated.series)
    if told is None:  # it has not asked: from its first number on
        _refuse_over_series(client, stated.series)
        told = client.drained[stated.series] = stated.number - 1
    return told == stated.number - 1


def _refuse_over_series(client: ClientConnection, name: str) -> None:
    if len(client.drained) >= SERIES_MAX and name not in client.drained:
        raise OverloadedError(f"{SERIES_MAX} outbox series were drained over this connection: use another one")


def stated_row(given: dict[bytes, bytes]) -> StatedRow:
    """What a request says of its row.

    Raises:
        BadRequestError: something is missing, or malformed, or does not belong there.
    """
    if not given.keys() >= WORDS or given.keys() - _WITH_THEM:
        raise BadRequestError("commit of an outbox's row has drained=, number=, row=, uuid=, perhaps floor=, no more")
    row, number = given[b"row"].decode(), int(given[b"number"])
    if _ROW.match(row) is None or not number:
        raise BadRequestError("number= is from 1, and row= has 1 to 64 of 0-9 a-z -")
    return StatedRow(given[b"drained"].decode(), number, row, given[b"uuid"].decode())


def _out_of_turn(stated: StatedRow, last: int) -> OutOfTurnError:
    where = f"number {stated.number} of outbox series {stated.series}"
    if stated.number == last + 1:
        return OutOfTurnError(f"{where}: an earlier one was refused over this connection, or never sent: ask drained")
    return OutOfTurnError(f"{where}: the next is {last + 1}")


def _answer_again(
    context: Context, client: ClientConnection, opaque: bytes, series: OutboxSeries, stated: StatedRow
) -> None:
    taken = series.at(stated.number)
    if taken is None or taken.row != stated.row:
        raise _out_of_turn(stated, series.last)
    name = (taken.session, taken.counter)
    waiting, session = context.state.transactions.get(name), context.state.sessions.get(taken.session)
    if waiting is not None:
        turns.commit_in_order(context, waiting, client, opaque, 0, is_delayable=False)
    elif session is not None and session.outcomes.get(taken.counter) is not None:
        context.answer_from_state(client, opaque, placing.kept_lines(context, session, taken.counter))
    else:
        context.answer_from_state(client, opaque, b"")


def take(
    context: Context, client: ClientConnection, opaque: bytes, name: tuple[int, int], floor: int, stated: StatedRow,
    parts: list[placing.Part], keys: list[placing.Keys],
) -> None:  # fmt: skip
    """Journal and fold number and messages, which have their place in the same record or wait for their turn.

    Nothing here can refuse.
    """
    name_of_series, number, row, uuid = stated
    context.group.add_entry(entries.encode_drained(name_of_series, number, row, *name))
    series = context.state.outboxes.take(name_of_series, number, DrainedRow(row, *name))
    series.uuid, series.taken_ms = uuid, context.now_ms
    client.drained[name_of_series] = number
    context.counters.drained += 1
    crash_point("broker.outbox.taken")
    if not turns.must_queue(context, None, parts, keys, stated.uuid):
        context.answer_when_durable(client, opaque, placing.commit(context, *name, floor, None, parts))
        return
    meta: dict[str, Any] = {
        "kind": TransactionKind.LOCAL.value, "floor": floor, "decided_ms": context.now_ms, "client": client.name,
        "uuid": stated.uuid, "drained": stated.series, "number": stated.number, "row": stated.row,
    }  # fmt: skip
    turns.await_place(context, name, None, parts, keys, meta)
    context.group.needs_sync = True
    turns.commit_in_order(context, context.state.transactions[name], client, opaque, floor, is_delayable=False)
