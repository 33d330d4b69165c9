"""Appending messages: the checks of a batch, its place in the partition, and the places of a transaction's parts.

``put`` and the verbs of transactions check their batches here, and each batch gets its offset in ``place`` (or, many
plain puts at once, in ``place_run``). A decision places all parts of its transaction in one record. Which
of them wait for their turn is in ``ordered_commits``.

Invariants:
    * a batch is placed only after every check of its request: placing cannot refuse;
    * the parts of a transaction are contiguous in each partition, those that the journal has already come first.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import repeat
from typing import Any, Final

from txmq.broker.client_connection import ClientConnection
from txmq.broker.commit.commit_group import Run
from txmq.broker.context import Context
from txmq.broker.state.decisions import BranchPart, Name, XADecision
from txmq.broker.state.session import BrokerSession, CommittedParts
from txmq.broker.state.state import Places, State
from txmq.broker.state.transaction import ANY_KEY, PreparedPart, Transaction
from txmq.broker.verbs.partition_lookup import refuse_stale, writable
from txmq.errors import (
    BadRequestError,
    DiskFullError,
    InvalidBatchError,
    TooLargeError,
    TopicClosedError,
    UnavailableError,
)
from txmq.log import records
from txmq.log.batch import check, stamp, stamp_run
from txmq.log.partition import Partition
from txmq.model import Storage
from txmq.protocol import transaction_bodies as wire_parts
from txmq.redo import entries
from txmq.redo.entries import IN_JOURNAL
from txmq.runtime.crashpoints import crash_point

Part = tuple[int, Partition, bytearray, int, int, int]
"""A checked part of a transaction: its number if the journal has it already, else IN_JOURNAL; partition, batch, count,
max timestamp ms, CRC."""
Keys = str | list[int]
"""The keys of a part, as a prepared transaction's meta lists them: CRCs, or ANY_KEY."""
PlainPut = tuple[bytearray, int, int, int, bytes]
"""A checked batch without producer id: batch, count, max timestamp ms, CRC, opaque."""
USERS_SIZE_BYTES_MAX = 256 << 10
_MEMORY: Final = Storage.MEMORY  # Python 3.11 looks a member up three times as long as a global name


# --- checks ----------------------------------------------------------------------------------------------------------


def check_parts(
    context: Context, client: ClientConnection, stated: list[wire_parts.WirePart]
) -> tuple[list[Part], list[Keys]]:
    """Check the messages of a transaction. Hot (once a transaction): one loop, no call that only a refusal needs.

    Args:
        stated: the parts as a request brought them (``protocol.transaction_bodies.split_parts``).

    Returns:
        The parts, and the keys of each.

    Raises:
        BrokerError: a part cannot be placed; the text says why.
    """
    size_max = context.settings.batch_size_bytes_max
    is_looked_into = context.settings.validate_records or client.user
    parts: list[Part] = []
    keys: list[Keys] = []
    for topic, number, batch, key_words, topic_id in stated:
        partition = writable(context, client, topic, number, topic_id)
        if topic_id is not None:
            refuse_stale(partition, int(topic_id))
        count, max_timestamp_ms, _, _, sequence, crc = check(batch)
        config = partition.config
        if sequence != -1:
            raise InvalidBatchError("a transaction's batches have base sequence -1: the txid removes duplicates")
        if config.storage is _MEMORY:
            raise BadRequestError(f"topic {partition.topic!r} is in memory: it cannot take part in transactions")
        if not config.accept_publish or len(batch) > size_max:
            refuse_batch(context, partition, len(batch))
        if is_looked_into:
            refuse_unreadable(context, client, batch)
        listed = wire_parts.list_keys(key_words) if key_words is not None else []
        keys.append(ANY_KEY if listed is None else listed)
        parts.append((IN_JOURNAL, partition, batch, count, max_timestamp_ms, crc))
    return parts, keys


def refuse_batch(context: Context, partition: Partition, size: int) -> None:
    """Refuse a new batch if its topic is closed or it is too large."""
    if not partition.config.accept_publish:
        raise TopicClosedError(f"topic {partition.topic!r} is closed for publishing")
    if size > context.settings.batch_size_bytes_max:
        raise TooLargeError(
            f"a batch of {size} bytes is over batch_size_bytes_max {context.settings.batch_size_bytes_max}"
        )


def refuse_unreadable(context: Context, client: ClientConnection, batch: bytearray) -> None:
    """Look into a batch of a user, or any if the broker is set so: what no consumer could read is refused.

    Of a user's larger ones than the client makes by default nothing is looked at: each costs the loop 0.3 ms at
    ``USERS_SIZE_BYTES_MAX``, and 14 ms if it is made of headers alone.
    """
    if context.settings.validate_records:
        records.look_into(batch)
    elif client.user:
        records.look_into(batch, USERS_SIZE_BYTES_MAX)


def refuse_unready(context: Context, *, in_memory: bool = False) -> None:
    """Refuse what is new while the disk is full (not for a topic in memory), or while the broker stops."""
    if context.disk_full and not in_memory:
        context.counters.refused_disk_full += 1
        raise DiskFullError(
            "free disk space is under the limit, or partition files or the journal's next file cannot be written (the "
            "broker's log says why): new messages and transactions are refused until then"
        )
    if context.stopping:
        raise UnavailableError("the broker is stopping")


# --- places ----------------------------------------------------------------------------------------------------------


def place(
    context: Context, partition: Partition, batch: bytearray, count: int, max_timestamp_ms: int, crc: int
) -> tuple[Run, int]:
    """Give a checked batch the next place in its partition, and add it to the group.

    Returns:
        The run that holds the batch, and its base offset.
    """
    group, size = context.group, len(batch)
    segment_base, position, base_offset = group.place(partition, count, size, max_timestamp_ms, context.now_ms)
    stamp(batch, partition.topic_id, partition.number, base_offset, crc)
    run = group.run_at(partition, segment_base, position, base_offset)
    run.add(batch, count, max_timestamp_ms)
    group.size_bytes += size
    group.message_count += count
    return run, base_offset


def place_run(context: Context, client: ClientConnection, partition: Partition, puts: list[PlainPut]) -> None:
    """``place`` for many plain puts at once: the partition's assigned side moves once, not once a batch."""
    batches, counts, timestamps_ms, crcs, opaques = zip(*puts, strict=True)
    size, group = sum(map(len, batches)), context.group
    context.counters.put_requests += len(batches)
    context.counters.put_bytes += size
    if not partition.has_room(size):
        for batch, own_count, own_ms, crc, opaque in puts:
            _, offset = place(context, partition, batch, own_count, own_ms, crc)
            group.puts.append((client, opaque, offset))
        return
    count, newest_ms = sum(counts), max(timestamps_ms)
    segment_base, position, base_offset = group.place(partition, count, size, newest_ms, context.now_ms)
    run = group.run_at(partition, segment_base, position, base_offset)
    run.buffers += batches
    run.next_offset = base_offset + count
    run.max_timestamp_ms = max(run.max_timestamp_ms, newest_ms)
    group.size_bytes += size
    group.message_count += count
    offsets = stamp_run(batches, counts, crcs, (partition.topic_id, partition.number, base_offset))
    group.puts += zip(repeat(client), opaques, offsets)


Assigned = tuple[int, list[tuple[int, ...]], CommittedParts, bytes]
"""Where in the group the decision must stand, the fields of each ``entries.Placement``, the outcome, the answer."""


def _assign(
    context: Context, transaction: Transaction | None, fresh: list[Part], places: Places | None = None
) -> Assigned:
    """Place the parts that are in the journal, then those that came with the decision. Hot: ``place``, in the loop.

    A part whose topic was deleted meanwhile is left out: its messages went with the topic. The decision stands before
    the runs of the fresh parts: redo places the journaled ones when it reads the decision, so that they come first.

    Args:
        places: gets where the messages begin in each partition; None if nobody asks.
    """
    group, now_ms = context.group, context.now_ms
    at = len(group.items)
    placements: list[tuple[int, ...]] = []
    outcome: list[tuple[int, int, int, int]] = []
    lines: list[str] = []
    parts = fresh if transaction is None else _journaled(context.state, transaction) + fresh
    for part_number, partition, batch, count, max_timestamp_ms, crc in parts:
        size, topic_id, number = len(batch), partition.topic_id, partition.number
        segment_base, position, base_offset = group.place(partition, count, size, max_timestamp_ms, now_ms)
        if places is not None and partition not in places:
            places[partition] = base_offset, segment_base, position
        stamp(batch, topic_id, number, base_offset, crc)
        if part_number == IN_JOURNAL:
            run = group.run_at(partition, segment_base, position, base_offset)
            group.size_bytes += size
        else:
            run = group.journaled_run_at(partition, segment_base, position, base_offset, size)
        run.add(batch, count, max_timestamp_ms)
        group.message_count += count
        placements.append((topic_id, number, segment_base, position, base_offset, count, part_number))
        outcome.append((topic_id, number, base_offset, count))
        lines.append(f"{partition.topic} {number} {base_offset} {count}\n")
    return at, placements, tuple(outcome), "".join(lines).encode("ascii")


def _journaled(state: State, transaction: Transaction) -> list[Part]:
    found: list[Part] = []
    for number, part in enumerate(transaction.parts):
        partition = state.partition(part.topic_id, part.partition)
        if partition is not None:
            found.append((number, partition, part.batch, part.count, part.max_timestamp_ms, part.crc))
    return found


# --- transactions ----------------------------------------------------------------------------------------------------


def add_part(context: Context, session: int, counter: int, part: Part) -> Transaction:
    """Journal and fold a part of an undecided transaction: stored, invisible, without a place."""
    _, partition, batch, count, max_timestamp_ms, _ = part
    topic_id, number = partition.topic_id, partition.number
    known = context.state.transactions.get((session, counter))
    context.group.add_entry(
        entries.encode_payload(
            session, counter, len(known.parts) if known else 0, topic_id, number, count, max_timestamp_ms, batch
        )
    )
    prepared = PreparedPart(topic_id, number, batch, count, max_timestamp_ms)
    return context.state.add_part(session, counter, prepared, context.now_ms)


def prepare(
    context: Context, session: int, counter: int, parts: list[Part], meta: dict[str, Any], text: bytes
) -> Transaction:
    """Journal and fold the parts and the prepare. Nothing here can refuse.

    Args:
        text: ``meta`` as JSON.
    """
    for part in parts:
        add_part(context, session, counter, part)
    context.group.add_entry(entries.encode_prepared(session, counter, text))
    context.counters.prepared += 1
    return context.state.prepare(session, counter, meta)


def commit(
    context: Context, session: int, counter: int, floor: int, transaction: Transaction | None, fresh: list[Part]
) -> bytes:
    """Place all parts, journal and fold the decision. Nothing here can refuse.

    Returns:
        The answer: where every part went.
    """
    state, name = context.state, (session, counter)
    is_awaited = transaction is not None and (transaction.is_branch or name in state.decisions.incomplete)
    places: Places | None = {} if is_awaited or state.decisions.barriers else None
    at, placements, outcome, lines = _assign(context, transaction, fresh, places)
    context.group.insert_entry(at, entries.encode_committed(session, counter, floor, placements))
    context.counters.committed += 1
    if places is not None:
        _committed(context, state.commit(session, counter, floor, outcome, places))
    else:  # hot: as ``state.commit`` of what no reader and no other home waits for
        state.settle(session, counter, floor, outcome)
    return lines


def _committed(context: Context, placed: BranchPart | XADecision | None) -> None:
    """What readers or other homes must wait for, or hear of, when the messages of a transaction are placed."""
    if isinstance(placed, BranchPart):
        placed.placed_ms = context.now_ms
        context.group.branch_parts.append(placed)
        crash_point("broker.branch.placed")


def decide(
    context: Context,
    name: Name,
    floor: int,
    transaction: Transaction | None,
    fresh: list[Part],
    meta: dict[str, Any],
    text: bytes | None = None,
) -> bytes:
    """As ``commit``, with branches that must hear of it, those in databases before readers may see the messages.

    Args:
        text: ``meta`` as JSON, if the caller has it.
    """
    places: Places = {}
    at, placements, outcome, lines = _assign(context, transaction, fresh, places)
    entry = entries.encode_decided(*name, floor, placements, entries.json_body(meta) if text is None else text)
    context.group.insert_entry(at, entry)
    if "homes" in meta:
        crash_point("broker.decision.decided")
    context.state.decide(*name, floor, outcome, meta, places)
    context.counters.committed += 1
    return lines


def commit_batch(context: Context, transactions: list[Transaction], meta: dict[str, Any]) -> None:
    """Place all messages of a query's batch, journal and fold its decision. Nothing here can refuse."""
    packed, placed = [], []
    for transaction in transactions:
        places: Places = {}
        _, placements, outcome, _ = _assign(context, transaction, [], places)
        packed.append((*transaction.name, placements))
        placed.append((*transaction.name, outcome, places))
    context.group.add_entry(entries.encode_batch_committed(packed, json.dumps(meta).encode()))
    context.state.commit_batch(placed, meta)
    for transaction in transactions:
        homes = transaction.meta.get("homes", ())
        context.branch_asks.remind(homes, transaction.name, context.now_ms, is_committed=True)
    context.counters.committed += len(transactions)


def kept_lines(context: Context, session: BrokerSession, counter: int) -> bytes:
    """The answer to a commit again, from what is kept of it."""
    placing = context.state.transactions.get((session.number, counter))
    if placing is not None:
        return awaited_lines(context, placing)
    decided = context.state.decisions.incomplete.get((session.number, counter))
    parts = decided.parts if decided else session.outcomes[counter]
    return _lines(context, parts if isinstance(parts, tuple) else ())


def awaited_lines(context: Context, transaction: Transaction) -> bytes:
    """The answer to a decision whose messages wait for their place."""
    return _lines(context, [(part.topic_id, part.partition, None, part.count) for part in transaction.parts])


def _lines(context: Context, parts: Iterable[tuple[int, int, int | None, int]]) -> bytes:
    lines = []
    for topic_id, partition, base_offset, count in parts:
        topic = context.state.topics.with_id(topic_id)
        name = topic.config.name if topic else f"deleted-{topic_id}"
        lines.append(wire_parts.encode_result_line(name, partition, base_offset, count))
    return b"".join(lines)
