"""Offsets that a transaction saves for consumer groups: consume, process, produce as one step.

Theory of operation. ``commit``, ``prepare`` and ``decide`` bring offsets before their parts. The generation of
each is checked then, and never after: it must be the newest that was handed out. A local transaction's offsets are
saved by an entry SAVED in the record of its COMMITTED; a prepared one's are in its meta, and are saved by the record
that commits it; a decided one's are saved by the decision.

While a transaction that is prepared, or decided with a branch to come, *holds* a partition of a group, that partition
is handed to no other member: a member that loads the offset finds the outcome in it. No other request saves it
meanwhile, so that offsets do not go back when the transaction commits.

Invariants:
    * an offset that a transaction brought is saved exactly when its messages are placed, in the same record;
    * a transaction that brings an old generation is refused as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.broker.verbs.access.authorizer import GROUP, READ, require
from txmq.broker.verbs.partition_handover import place_of, refuse_over_bytes
from txmq.errors import TransactionConflictError
from txmq.protocol.group_rows import GroupOffsets, split_offsets
from txmq.redo import entries

Buffer = bytes | bytearray | memoryview
Offsets = list[Any]  # [[group, [[topic id, partition, offset, deferred], ...]], ...]: as in meta


def take_offsets(
    given: Mapping[bytes, bytes] | None, body: Buffer | None, start: int = 0
) -> tuple[list[GroupOffsets], Buffer]:
    """Take the offsets off a body; what is left are the parts.

    Raises:
        BadRequestError: they are malformed.
    """
    size = int(given.get(b"offsets", 0)) if given else 0
    if not size and not start:
        return [], body or b""
    found, end = split_offsets(body or b"", start, size)
    return found, memoryview(body or b"")[end:]


def check_offsets(context: Context, client: ClientConnection, stated: list[GroupOffsets]) -> Offsets:
    """Refuse what may not be saved; the last of a request's checks, because it notes what it lets pass.

    Raises:
        TransactionConflictError: a partition has been handed to another member, or another transaction holds it.
        OverloadedError: as much is kept of consumer groups as there may be.
        ForbiddenError: the connection's user may not read for a group.
    """
    for asked in stated:
        require(context, client, READ, GROUP, asked.group)
    rows: Offsets = [[group.group, [_checked(context, group.group, row) for row in group.rows]] for group in stated]
    growth_bytes = context.state.saved.growth_bytes
    refuse_over_bytes(context, sum(growth_bytes(name, offsets) for name, offsets in rows))
    for group in stated:
        membership = context.groups.get(group.group)
        for row in group.rows if membership is not None else ():
            owned = membership.owned.get(row[:2]) if membership is not None else None
            if owned is not None and owned.generation == row.generation:
                owned.order = max(owned.order, group.order)
    return rows


def _checked(context: Context, group: str, row: Any) -> list[Any]:
    place = place_of(context, (row.topic, row.partition))
    if place is None:
        raise TransactionConflictError(f"no partition {row.partition} of topic {row.topic[:80]!r} to save an offset of")
    saved = context.state.saved
    newest = saved.generation(group, place)
    if not row.generation or row.generation != newest:
        raise TransactionConflictError(
            f"group {group!r} has handed {row.topic}-{row.partition} on: generation {row.generation}, now {newest}"
        )
    if (group, *place) in saved.held:
        raise TransactionConflictError(
            f"another transaction, not settled yet, holds the offset of {row.topic}-{row.partition} in group {group!r}"
        )
    return [*place, row.offset, row.deferred]


def save_with_commit(context: Context, offsets: Offsets) -> None:
    """Save with the entry COMMITTED of a local transaction, in the same record."""
    for group, rows in offsets:
        fields = {"group": group, "offsets": rows, "time_ms": context.now_ms}
        context.group.add_entry(entries.json_entry(entries.SAVED, fields))
        context.state.saved.save(group, rows, context.now_ms)
