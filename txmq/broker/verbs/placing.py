"""How transactions end: their messages get their places, and prepared ones commit in order (``ordering``)."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from txmq.broker.client_connection import ClientConnection
from txmq.broker.commit.commit_group import Run
from txmq.broker.context import Context
from txmq.broker.state.decisions import Name
from txmq.broker.state.session import BrokerSession, CommittedParts
from txmq.broker.state.state import IN_JOURNAL, Places
from txmq.broker.state.transaction import PreparedPart, Transaction, TransactionState
from txmq.log.batch import stamp
from txmq.protocol import parts as wire_parts
from txmq.redo import entries


class Placed(NamedTuple):
    """One part with the place the decision assigned."""

    part: PreparedPart
    number: int  # of the journaled part, or IN_JOURNAL where the bytes are in a run of the same record
    segment_base: int
    position: int
    base_offset: int


def place_parts(context: Context, transaction: Transaction | None, fresh: list[PreparedPart]) -> list[Placed]:
    """Assign offsets to all parts of a decided transaction: contiguous per partition, in one record.

    Args:
        transaction: what was streamed or prepared before (its bytes are in the journal already).
        fresh: parts that came with the decision; their bytes go into this record.

    Returns:
        The parts with their places; one whose topic was deleted meanwhile is left out, its messages went with the
        topic.
    """
    journaled = [(number, part) for number, part in enumerate(transaction.parts if transaction else ())]
    placed = [_place(context, number, part) for number, part in [*journaled, *((IN_JOURNAL, part) for part in fresh)]]
    return [item for item in placed if item is not None]


def _place(context: Context, number: int, part: PreparedPart) -> Placed | None:
    partition = context.state.partition(part.topic_id, part.partition)
    if partition is None:
        return None
    segment_base, position, base_offset = partition.place(
        part.count, len(part.batch), part.max_timestamp_ms, context.now_ms
    )
    stamp(part.batch, part.topic_id, part.partition, base_offset, part.crc)
    group = context.group
    if number == IN_JOURNAL:
        run = group.run_at(partition, segment_base, position, base_offset)
        group.size_bytes += len(part.batch)
    else:
        run = Run(partition, segment_base, position, base_offset)
        group.place_journaled(run)
    run.add(part.batch, part.count, part.max_timestamp_ms)
    return Placed(part, number, segment_base, position, base_offset)


class _Assigned(NamedTuple):
    """All parts of a transaction with their places; ``at`` is where in the group the decision must stand.

    The decision stands before the runs of the fresh parts: redo places what was journaled before when it reads the
    decision, and those messages come first in their partitions.
    """

    at: int
    placements: list[entries.Placement]
    outcome: CommittedParts
    places: Places


def _assign(context: Context, transaction: Transaction | None, fresh: list[PreparedPart]) -> _Assigned:
    at = len(context.group.items)
    placements: list[entries.Placement] = []
    places: Places = {}
    for part, number, segment_base, position, base_offset in place_parts(context, transaction, fresh):
        placements.append(
            entries.Placement(part.topic_id, part.partition, segment_base, position, base_offset, part.count, number)
        )
        partition = context.state.partition(part.topic_id, part.partition)
        if partition is not None:
            places.setdefault(partition, (base_offset, segment_base, position))
        context.group.message_count += part.count
    outcome = tuple((p.topic_id, p.partition, p.base_offset, p.count) for p in placements)
    return _Assigned(at, placements, outcome, places)


def commit(
    context: Context, session: int, counter: int, floor: int, transaction: Transaction | None, fresh: list[PreparedPart]
) -> CommittedParts:
    """Place all parts, journal and fold the decision. Nothing here can refuse."""
    assigned = _assign(context, transaction, fresh)
    context.group.insert_entry(assigned.at, entries.encode_committed(session, counter, floor, assigned.placements))
    context.state.settle(session, counter, floor, assigned.outcome)
    context.state.decisions.holds.add_behind((session, counter), assigned.places)
    context.counters.committed += 1
    return assigned.outcome


def decide(
    context: Context,
    name: Name,
    floor: int,
    transaction: Transaction | None,
    fresh: list[PreparedPart],
    meta: dict[str, Any],
) -> CommittedParts:
    """The same, with branches that must complete before readers may see the messages."""
    assigned = _assign(context, transaction, fresh)
    entry = entries.encode_decided(*name, floor, assigned.placements, entries.json_body(meta))
    context.group.insert_entry(assigned.at, entry)
    context.state.decide(*name, floor, assigned.outcome, meta, assigned.places)
    context.counters.committed += 1
    return assigned.outcome


def commit_batch(context: Context, transactions: list[Transaction], meta: dict[str, Any]) -> None:
    """Place all messages of a query's batch, journal and fold its decision. Nothing here can refuse."""
    packed, placed = [], []
    for transaction in transactions:
        assigned = _assign(context, transaction, [])
        packed.append((transaction.session, transaction.counter, assigned.placements))
        placed.append((transaction.session, transaction.counter, assigned.outcome, assigned.places))
    context.group.add_entry(entries.encode_batch_committed(packed, json.dumps(meta).encode()))
    context.state.commit_batch(placed, meta)
    context.counters.committed += len(transactions)


def committed_lines(context: Context, parts: CommittedParts) -> bytes:
    """The answer to commit: where every part went."""
    lines = []
    for topic_id, partition, base_offset, count in parts:
        topic = context.state.topics.with_id(topic_id)
        name = topic.config.name if topic else f"deleted-{topic_id}"
        lines.append(wire_parts.encode_result_line(name, partition, base_offset, count))
    return b"".join(lines)


def kept_lines(context: Context, session: BrokerSession, counter: int) -> bytes:
    """The same answer again, from what is kept of a commit."""
    decided = context.state.decisions.incomplete.get((session.number, counter))
    parts = decided.parts if decided is not None else session.outcomes[counter]
    return committed_lines(context, parts or ())


def commit_in_order(
    context: Context, transaction: Transaction, client: ClientConnection, opaque: bytes, floor: int
) -> None:
    """Commit a prepared transaction, or let the request wait for an earlier one it collides with."""
    transaction.waiting.append((client, opaque, floor))
    if not context.state.order.must_wait(transaction):
        _commit_all(context, [transaction])


def commit_now(context: Context, transaction: Transaction, client: ClientConnection, opaque: bytes, floor: int) -> None:
    """Commit a prepared transaction out of its turn: an operator says so."""
    transaction.waiting.append((client, opaque, floor))
    _commit_all(context, [transaction])


def wake(context: Context, transaction: Transaction) -> None:
    """A prepared transaction was rolled back: commits that waited only for it go on."""
    if transaction.state is TransactionState.PREPARED:
        _commit_all(context, context.state.order.behind(transaction))


def _commit_all(context: Context, due: list[Transaction]) -> None:
    while due:
        transaction = due.pop()
        if (transaction.session, transaction.counter) in context.state.transactions:
            _commit_prepared(context, transaction)
            context.group_with_room()  # thousands may have waited for one
            due.extend(context.state.order.behind(transaction))


def _commit_prepared(context: Context, transaction: Transaction) -> None:
    floor = max(stated for _, _, stated in transaction.waiting)
    outcome = commit(context, transaction.session, transaction.counter, floor, transaction, [])
    lines = committed_lines(context, outcome)
    for client, opaque, _ in transaction.waiting:
        context.answer_when_forced(client, opaque, lines)
