"""How transactions end: their messages get their places, and prepared ones commit in order (``ordering``)."""

from __future__ import annotations

from typing import Any, NamedTuple

from txmq.broker.context import Context
from txmq.broker.group import Run
from txmq.broker.peer import Peer
from txmq.broker.session import CommittedParts
from txmq.broker.state import IN_JOURNAL
from txmq.broker.transaction import Part, Transaction, TransactionState
from txmq.errors import BadRequestError
from txmq.log.batch import stamp
from txmq.protocol import parts as wire_parts
from txmq.redo import entries
from txmq.xid import TxId


class Placed(NamedTuple):
    """One part with the place the decision assigned."""

    part: Part
    number: int  # of the journaled part, or IN_JOURNAL where the bytes are in a run of the same record
    segment_base: int
    position: int
    base_offset: int


def place_parts(context: Context, transaction: Transaction | None, fresh: list[Part]) -> list[Placed]:
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


def _place(context: Context, number: int, part: Part) -> Placed | None:
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


def commit(
    context: Context, session: int, counter: int, floor: int, transaction: Transaction | None, fresh: list[Part]
) -> CommittedParts:
    """Place all parts, journal and fold the decision. Nothing here can refuse.

    The decision stands before the runs of the fresh parts: redo places what was journaled before when it reads the
    decision, and those messages come first in their partitions.
    """
    at = len(context.group.items)
    placed = place_parts(context, transaction, fresh)
    placements = [
        entries.Placement(
            p.part.topic_id, p.part.partition, p.segment_base, p.position, p.base_offset, p.part.count, p.number
        )
        for p in placed
    ]
    context.group.insert_entry(at, entries.encode_committed(session, counter, floor, placements))
    context.group.message_count += sum(p.part.count for p in placed)
    outcome = tuple((p.part.topic_id, p.part.partition, p.base_offset, p.part.count) for p in placed)
    context.state.settle(session, counter, floor, outcome)
    context.counters.committed += 1
    return outcome


def committed_lines(context: Context, parts: CommittedParts) -> bytes:
    """The answer to commit: where every part went."""
    lines = []
    for topic_id, partition, base_offset, count in parts:
        topic = context.state.topics.with_id(topic_id)
        name = topic.config.name if topic else f"deleted-{topic_id}"
        lines.append(wire_parts.encode_result_line(name, partition, base_offset, count))
    return b"".join(lines)


def commit_in_order(context: Context, transaction: Transaction, peer: Peer, opaque: bytes, floor: int) -> None:
    """Commit a prepared transaction, or let the request wait for an earlier one it collides with."""
    transaction.waiting.append((peer, opaque, floor))
    if not context.state.order.must_wait(transaction):
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
            due.extend(context.state.order.behind(transaction))


def _commit_prepared(context: Context, transaction: Transaction) -> None:
    floor = max(stated for _, _, stated in transaction.waiting)
    outcome = commit(context, transaction.session, transaction.counter, floor, transaction, [])
    lines = committed_lines(context, outcome)
    for peer, opaque, _ in transaction.waiting:
        context.answer_when_forced(peer, opaque, lines)


def prepared(context: Context, uuid: str | None, after: str | None, limit: int) -> list[dict[str, Any]]:
    """Prepared transactions, oldest first, as ``recover`` tells them.

    Args:
        uuid: only those of this resource.
        after: only those behind this txid (paging); all, where it was settled meanwhile.
        limit: at most so many.
    """
    found: list[dict[str, Any]] = []
    passed = after is None or not _is_unsettled(context, after)
    known = (t for t in context.state.transactions.values() if t.state is TransactionState.PREPARED)
    # One that streamed long before it prepared is younger than its first part: who settles them one by one, in this
    # order, must never wait for the commit of one that is listed behind.
    for transaction in sorted(known, key=lambda t: t.order):
        if uuid not in (None, transaction.meta["uuid"]):
            continue
        txid = txid_of(context, transaction)
        if passed:
            found.append(_described(context, transaction, txid))
            if len(found) >= limit:
                break
        elif txid == after:
            passed = True
    return found


def _is_unsettled(context: Context, text: str) -> bool:
    try:
        txid = TxId.parse(text)
    except ValueError as error:
        raise BadRequestError(str(error)) from None
    return (txid.session, txid.counter) in context.state.transactions and text == str(
        TxId(context.identity.cluster, context.identity.node, txid.session, txid.counter)
    )


def txid_of(context: Context, transaction: Transaction) -> str:
    """The transaction's id as text."""
    return str(TxId(context.identity.cluster, context.identity.node, transaction.session, transaction.counter))


def _described(context: Context, transaction: Transaction, txid: str) -> dict[str, Any]:
    owner = context.state.sessions.get(transaction.session)
    connected = owner is not None and owner.bound is not None
    gone_since = owner.gone_ms if owner is not None else 0
    meta = transaction.meta
    return {
        "txid": txid, "state": transaction.state.value, "kind": meta["kind"], "resource": meta["resource"],
        "uuid": meta["uuid"], "deadline_ms": meta["deadline_ms"], "prepared_ms": meta["prepared_ms"],
        "age_ms": max(0, context.now_ms - meta["prepared_ms"]), "owner_connected": connected,
        "owner_gone_ms": 0 if connected else max(0, context.now_ms - gone_since), "client": meta["client"],
        "parts": [_part_described(context, part) for part in transaction.parts],
    }  # fmt: skip


def _part_described(context: Context, part: Part) -> dict[str, Any]:
    topic = context.state.topics.with_id(part.topic_id)
    name = topic.config.name if topic else None
    return {"topic": name, "partition": part.partition, "count": part.count, "bytes": len(part.batch)}
