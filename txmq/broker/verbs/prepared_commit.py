"""The plain prepare of a last-resource transaction, and the plain commit of what is prepared.

Both stand on the way of every row that commits together with a message, one request at a time, so each microsecond is
the caller's. They do in one go what ``transactions`` and ``settlement`` do by their table (NONE, PREPARE -> PREPARE;
PREPARED, COMMIT -> SETTLE); wherever anything is not as usual they change nothing and return False, and the request
goes its way through the table. Prepare 17 us against 38, commit 17 against 28, in a loop; double where the broker has
slept before each request.

Invariant: state, group and answer are what the table would have left (a test compares them).
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, NamedTuple

from txmq.broker.client_connection import ClientConnection
from txmq.broker.commit.commit_group import Run
from txmq.broker.context import Context
from txmq.broker.state.session import BrokerSession
from txmq.broker.state.transaction import ANY_KEY, PreparedPart, Transaction, TransactionState
from txmq.broker.verbs import placing
from txmq.broker.verbs.local_commit import FLOOR_SIZE_MAX, counter_of
from txmq.errors import InvalidBatchError
from txmq.log.batch import check, stamp
from txmq.model import Storage, TransactionKind, is_valid_name, is_valid_table
from txmq.protocol.parts import parse_keys, split_parts
from txmq.redo import entries

Extensions = dict[bytes, bytes] | None
_KIND = TransactionKind.LAST_RESOURCE.value
_KIND_WORD = _KIND.encode()
_STATED = frozenset({b"resource", b"uuid", b"table", b"deadline"})
_STATED_WITH_FLOOR = _STATED | {b"floor"}
_PREPARED = TransactionState.PREPARED
_DECIDED_BY_ITS_DRIVER = TransactionKind.SPARK.value


class _Who(NamedTuple):
    """What all prepares of one resource by one client have in common; ``head`` and ``client_json`` are for the JSON."""

    resource: str
    uuid: str
    table: str
    head: str
    client_json: str


@lru_cache(maxsize=1024)
def _who(resource: bytes, uuid: bytes, table: bytes, client: str) -> _Who | None:
    name, number, marker_table = resource.decode(), uuid.decode(), table.decode()
    if not is_valid_name(name) or len(number) != 32 or not is_valid_table(marker_table):
        return None
    head = json.dumps({"kind": _KIND, "resource": name, "uuid": number, "table": marker_table})[:-1]
    return _Who(name, number, marker_table, head, json.dumps(client))


def prepare_plain(
    context: Context,
    client: ClientConnection,
    arguments: list[bytes],
    extensions: Extensions,
    body: bytearray | None,
    opaque: bytes,
) -> bool:
    """Prepare, where everything is as usual; else change nothing and return False.

    Raises:
        BadRequestError: the body is malformed; nothing was changed.
    """
    session, settings, state = client.session, context.settings, context.state
    if session is None or not body or extensions is None or arguments[1] != _KIND_WORD:
        return False
    if extensions.keys() != _STATED_WITH_FLOOR and extensions.keys() != _STATED:
        return False
    counter, deadline_ms = counter_of(context, session, arguments[0]), int(extensions[b"deadline"])
    if (
        counter <= session.floor
        or counter in session.outcomes
        or (session.number, counter) in state.transactions
        or context.disk_full
        or context.stopping
        or settings.validate_records
        or 0 < deadline_ms <= context.now_ms
        or len(extensions.get(b"floor", b"")) > FLOOR_SIZE_MAX
        or len(session.outcomes) > settings.outcomes_kept
        or state.decisions.incomplete
        or state.unsettled >= settings.transactions_open_max
        or len(body) > settings.transaction_size_bytes_max
        or len(body) + state.payload_bytes > settings.prepared_bytes_max
    ):
        return False
    who = _who(extensions[b"resource"], extensions[b"uuid"], extensions[b"table"], client.name)
    if who is None:
        return False
    checked = _checked(context, body)
    if not checked:
        return False
    _prepare(context, session, counter, who, deadline_ms, checked, client)
    context.answer_when_forced(client, opaque)
    return True


def _checked(context: Context, body: bytearray) -> list[tuple[PreparedPart, str | list[int]]]:
    """The parts and their keys, each fit to be prepared; empty where one is not."""
    partitions, size_max = context.state.partitions, context.settings.batch_size_bytes_max
    checked: list[tuple[PreparedPart, str | list[int]]] = []
    for topic, number, batch, key_words in split_parts(body):
        keys = parse_keys(key_words)
        partition = partitions.get((topic, number))
        if partition is None or len(batch) > size_max:
            return []
        config = partition.config
        if config.storage is not Storage.DISK or not config.accept_publish:
            return []
        try:
            count, max_timestamp_ms, _, _, sequence, _ = check(batch)
        except InvalidBatchError:
            return []
        if sequence != -1:
            return []
        part = PreparedPart(partition.topic_id, partition.number, batch, count, max_timestamp_ms)
        checked.append((part, ANY_KEY if keys is None else sorted(keys)))
    return checked


def _prepare(
    context: Context, session: BrokerSession, counter: int, who: _Who, deadline_ms: int,
    checked: list[tuple[PreparedPart, str | list[int]]], client: ClientConnection,
) -> None:  # fmt: skip
    group, state, now_ms, session_number = context.group, context.state, context.now_ms, session.number
    transaction, keys = Transaction(session_number, counter, now_ms), [keys for _, keys in checked]
    for number, (part, _) in enumerate(checked):
        group.add_entry(
            entries.encode_payload(
                session_number, counter, number, part.topic_id, part.partition, part.count, part.max_timestamp_ms,
                part.batch,
            )
        )  # fmt: skip
        transaction.add(part)
    meta: dict[str, Any] = {
        "kind": _KIND, "resource": who.resource, "uuid": who.uuid, "table": who.table, "deadline_ms": deadline_ms,
        "prepared_ms": now_ms, "client": client.name, "keys": keys,
    }  # fmt: skip
    # As json.dumps writes it, in 2 us against 9: only the numbers are new each time.
    text = (
        f'{who.head}, "deadline_ms": {deadline_ms}, "prepared_ms": {now_ms}, "client": {who.client_json}, '
        f'"keys": {_keys_json(keys)}}}'
    )
    group.add_entry(entries.encode_prepared(session_number, counter, text.encode()))
    state.transactions[session_number, counter] = transaction
    state.payload_bytes += transaction.size_bytes
    state.prepare(session_number, counter, meta)
    context.counters.prepared += 1


def _keys_json(keys: list[str | list[int]]) -> str:
    return str(keys).replace("'", '"')  # lists of integers, and "*"


def commit_prepared_plain(
    context: Context,
    client: ClientConnection,
    arguments: list[bytes],
    extensions: Extensions,
    body: bytearray | None,
    opaque: bytes,
) -> bool:
    """Settle this session's own prepared transaction where nothing is in its way; else change nothing, return False."""
    session, state = client.session, context.state
    if session is None or body:
        return False
    floor_text = b"0" if extensions is None else extensions.get(b"floor", b"") if len(extensions) == 1 else b""
    counter = counter_of(context, session, arguments[0])
    transaction = state.transactions.get((session.number, counter))
    if (
        transaction is None
        or transaction.state is not _PREPARED
        or transaction.meta["kind"] == _DECIDED_BY_ITS_DRIVER
        or state.decisions.holds
        or state.decisions.incomplete
        or not 0 < len(floor_text) <= FLOOR_SIZE_MAX
        or state.order.must_wait(transaction)
    ):
        return False
    lines = _commit(context, session, counter, int(floor_text), transaction)
    if lines is None:
        return False
    context.answer_when_forced(client, opaque, lines)
    placing.wake(context, transaction)
    return True


def _commit(
    context: Context, session: BrokerSession, counter: int, floor: int, transaction: Transaction
) -> bytes | None:
    """Place, journal and fold; the answer's lines. None, and nothing changed, where a topic was deleted meanwhile."""
    group, state, now_ms = context.group, context.state, context.now_ms
    partitions = [state.partition(part.topic_id, part.partition) for part in transaction.parts]
    if None in partitions:
        return None
    placements, outcome, lines = [], [], []
    for part_number, (part, partition) in enumerate(zip(transaction.parts, partitions, strict=True)):
        assert partition is not None
        topic_id, number, count = part.topic_id, part.partition, part.count
        segment_base, position, base_offset = partition.place(count, len(part.batch), part.max_timestamp_ms, now_ms)
        stamp(part.batch, topic_id, number, base_offset, part.crc)
        run = Run(partition, segment_base, position, base_offset)
        run.add(part.batch, count, part.max_timestamp_ms)
        group.place_journaled(run)
        group.message_count += count
        placements.append((topic_id, number, segment_base, position, base_offset, count, part_number))
        outcome.append((topic_id, number, base_offset, count))
        lines.append(f"{partition.topic} {number} {base_offset} {count}\n")
    group.add_entry(entries.encode_committed(session.number, counter, floor, placements))
    state.settle(session.number, counter, floor, tuple(outcome))
    context.counters.committed += 1
    return "".join(lines).encode("ascii")
