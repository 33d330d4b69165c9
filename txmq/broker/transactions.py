"""The verbs of transactions: ``put tx=``, ``prepare``, ``commit``, ``rollback``, ``outcome``, ``recover``.

Every request is turned into an event; ``transaction.TRANSITIONS`` says what to do. Checks come first, then one or
several entries go into the group commit, and the answer waits for their record. What a request was refused for leaves
no trace.
"""

from __future__ import annotations

import json
from typing import Any

from txmq.broker import settlement
from txmq.broker.context import Context
from txmq.broker.local_commit import commit_plain
from txmq.broker.peer import Peer
from txmq.broker.session import ROLLED_BACK, Session
from txmq.broker.transaction import ANY_KEY, Action, Event, Part, Transaction, TransactionState, next_action
from txmq.errors import (
    BadRequestError,
    DiskFullError,
    FencedError,
    ForbiddenError,
    InvalidBatchError,
    NotOwnerError,
    OverloadedError,
    TooLargeError,
    TopicClosedError,
    TransactionConflictError,
    UnavailableError,
    UnknownTopicError,
    UnknownTransactionError,
)
from txmq.log import records
from txmq.log.batch import check
from txmq.log.partition import Partition
from txmq.model import Storage, TransactionKind, is_valid_name
from txmq.protocol import parts as wire_parts
from txmq.redo import entries
from txmq.xid import TxId

Extensions = dict[bytes, bytes] | None
_KINDS = {TransactionKind.LAST_RESOURCE.value}  # kinds that can be prepared
_UNFINISHED_OUTCOMES_MAX = 65_536
_COUNTER_MAX = (1 << 64) - 1  # what the journal can hold; a decimal of 20 digits may be more


def put_part(
    context: Context, peer: Peer, partition: Partition, txid_text: bytes, batch: bytearray, opaque: bytes
) -> None:
    """Stream one part of a large transaction: stored, invisible, until commit or prepare."""
    txid, session = _locate(context, txid_text)
    _require_owner(peer, session)
    action = next_action(state_of(context, session, txid.counter), Event.PART)
    if action is not Action.ADD_PART:
        raise _refusal(action, txid_text)
    part = checked_part(context, partition, batch)
    transaction = context.state.transactions.get((session.number, txid.counter))
    _refuse_over_limits(context, transaction, len(batch))
    _refuse_over_outcomes(context, session, 0)
    transaction = _add_part(context, session, txid.counter, part)
    context.answer_when_forced(peer, opaque, b"%d" % (len(transaction.parts) - 1))


def prepare(
    context: Context, peer: Peer, arguments: list[bytes], extensions: Extensions, body: bytearray | None, opaque: bytes
) -> None:
    """Force all parts and the prepare record; somebody else decides from now on."""
    txid, session = _locate(context, arguments[0])
    _require_owner(peer, session)
    given = extensions or {}
    parts = wire_parts.parse_parts(body or b"")
    action = next_action(state_of(context, session, txid.counter), Event.PREPARE)
    if action is Action.REPEAT:
        _repeat_prepare(context, peer, session, txid, parts, opaque)
        return
    if action is not Action.PREPARE:
        raise _refusal(action, arguments[0])
    meta = _prepare_meta(context, peer, arguments[1], given, len(parts))
    transaction = context.state.transactions.get((session.number, txid.counter))
    checked = _checked_parts(context, parts)
    _check_streamed(transaction, given)
    _refuse_over_limits(context, transaction, sum(len(part.batch) for part in checked))
    _refuse_over_outcomes(context, session, _floor(given, peer, session))
    streamed = len(transaction.parts) if transaction else 0
    meta["keys"] = [ANY_KEY] * streamed + [ANY_KEY if part.keys is None else sorted(part.keys) for part in parts]
    for part in checked:
        _add_part(context, session, txid.counter, part)
    context.group.add_entry(entries.encode_prepared(session.number, txid.counter, json.dumps(meta).encode()))
    context.state.prepare(session.number, txid.counter, meta)
    context.counters.prepared += 1
    context.answer_when_forced(peer, opaque)


def commit(
    context: Context, peer: Peer, arguments: list[bytes], extensions: Extensions, body: bytearray | None, opaque: bytes
) -> None:
    """Decide a local transaction, or settle a prepared one."""
    if commit_plain(context, peer, arguments, extensions, body, opaque):
        return
    txid, session = _locate(context, arguments[0])
    event = Event.COMMIT_PARTS if body else Event.COMMIT
    action = next_action(state_of(context, session, txid.counter), event)
    given = extensions or {}
    floor = _floor(given, peer, session)
    if action is Action.REPEAT:
        outcome = session.outcomes[txid.counter]
        context.answer_settled(peer, opaque, settlement.committed_lines(context, outcome or ()))
    elif action is Action.DECIDE:
        _decide(context, peer, session, txid, given, body, opaque)
    elif action is Action.SETTLE:
        transaction = context.state.transactions[session.number, txid.counter]
        settlement.commit_in_order(context, transaction, peer, opaque, floor)
    else:
        raise _refusal(action, arguments[0])


def rollback(
    context: Context, peer: Peer, arguments: list[bytes], extensions: Extensions, _body: bytearray | None, opaque: bytes
) -> None:
    """Force rolled-back, also for a transaction never seen (so that a delayed request for it is refused)."""
    txid, session = _locate(context, arguments[0])
    action = next_action(state_of(context, session, txid.counter), Event.ROLLBACK)
    floor = _floor(extensions or {}, peer, session)
    if action is Action.REPEAT:
        context.answer_settled(peer, opaque, b"")
    elif action in (Action.ROLL_BACK, Action.FENCE):
        _refuse_if_committing(context, session.number, txid)
        roll_back(context, session.number, txid.counter, floor)
        context.answer_when_forced(peer, opaque)
    else:
        raise _refusal(action, arguments[0])


def outcome(
    context: Context, peer: Peer, arguments: list[bytes], extensions: Extensions, _body: bytearray | None, opaque: bytes
) -> None:
    """Tell what became of a transaction; with ``fence`` an absent one is rolled back first."""
    txid, session = _locate(context, arguments[0])
    state = state_of(context, session, txid.counter)
    action = next_action(state, Event.FENCE if extensions else Event.LOOKUP)
    if action in (Action.FENCE, Action.ROLL_BACK):
        roll_back(context, session.number, txid.counter, 0)
        context.answer_when_forced(peer, opaque, b"rolled-back\n")
    elif action is Action.TELL:
        context.answer_settled(peer, opaque, _told(context, state, session, txid.counter))
    else:
        raise _refusal(action, arguments[0])


def recover(
    context: Context,
    peer: Peer,
    _arguments: list[bytes],
    extensions: Extensions,
    _body: bytearray | None,
    opaque: bytes,
) -> None:
    """List prepared transactions, oldest first."""
    given = extensions or {}
    uuid = given[b"uuid"].decode() if b"uuid" in given else None
    after = given[b"after"].decode() if b"after" in given else None
    listed = settlement.prepared(context, uuid, after, int(given.get(b"limit", 1000)))
    context.answer_settled(peer, opaque, json.dumps({"transactions": listed}).encode())


def roll_back(context: Context, session: int, counter: int, floor: int) -> None:
    """Journal and fold a rollback; whoever waited behind it may go on."""
    context.group.add_entry(entries.encode_rolled_back(session, counter, floor))
    context.group.forced = True
    transaction = context.state.settle(session, counter, floor, ROLLED_BACK)
    context.counters.rolled_back += 1
    if transaction is not None:
        settlement.wake(context, transaction)


def owner_gone(context: Context, session: Session) -> None:
    """The session's connection was lost: what it was streaming is rolled back; what it prepared stays."""
    streaming = [t for t in context.state.streams.values() if t.session == session.number]
    for transaction in streaming:
        roll_back(context, transaction.session, transaction.counter, 0)


def expire_streams(context: Context) -> None:
    """Roll back streams that are older than ``transaction_timeout_ms_max``."""
    oldest = context.now_ms - context.settings.transaction_timeout_ms_max
    for transaction in list(context.state.streams.values()):
        if transaction.opened_ms < oldest:
            roll_back(context, transaction.session, transaction.counter, 0)


def state_of(context: Context, session: Session, counter: int) -> TransactionState:
    """Where a transaction stands, on the assigned side."""
    transaction = context.state.transactions.get((session.number, counter))
    if transaction is not None:
        return transaction.state  # whatever floor was stated: what is undecided stays open to its decision
    if counter <= session.floor:
        return TransactionState.FORGOTTEN
    if counter in session.outcomes:
        return TransactionState.ROLLED_BACK if session.outcomes[counter] is None else TransactionState.COMMITTED
    return TransactionState.NONE


def checked_part(context: Context, partition: Partition, batch: bytearray) -> Part:
    """Check a batch that will be part of a transaction."""
    count, max_timestamp_ms, _, _, sequence, _ = check(batch)
    if sequence != -1:
        raise InvalidBatchError("a transaction's batches have base sequence -1: the txid removes duplicates")
    if context.settings.validate_records:
        records.decode(batch, partition.topic, partition.number)
    if partition.config.storage is Storage.MEMORY:
        raise BadRequestError(f"topic {partition.topic!r} is in memory: it cannot take part in transactions")
    if not partition.config.accept_publish:
        raise TopicClosedError(f"topic {partition.topic!r} is closed for publishing")
    if len(batch) > context.settings.batch_size_bytes_max:
        raise TooLargeError(f"a batch of {len(batch)} bytes is over {context.settings.batch_size_bytes_max}")
    return Part(partition.topic_id, partition.number, batch, count, max_timestamp_ms)


def _refuse_if_committing(context: Context, session: int, txid: TxId) -> None:
    transaction = context.state.transactions.get((session, txid.counter))
    if transaction is not None and transaction.waiting:
        # Somebody proved that the database committed; the commit waits only for its turn.
        raise TransactionConflictError(f"transaction {txid} is committing")


def _locate(context: Context, text: bytes) -> tuple[TxId, Session]:
    try:
        txid = TxId.parse(text.decode("ascii", "replace"))
    except ValueError as error:
        raise BadRequestError(str(error)) from None
    identity = context.identity
    if txid.cluster != identity.cluster or txid.home != identity.node:
        raise NotOwnerError(f"transaction {txid} is not at home here")
    session = context.state.sessions.get(txid.session)
    if session is None:
        raise FencedError(f"session {txid.session:x} of transaction {txid} is unknown or ended")
    if txid.counter < 1:
        raise BadRequestError("transaction counters start at 1")
    return txid, session


def _floor(given: dict[bytes, bytes], peer: Peer, session: Session) -> int:
    """The floor a request states. Only the session's own client knows what it has seen: from others it is ignored."""
    floor = int(given.get(b"floor", 0))
    if floor > _COUNTER_MAX:
        raise BadRequestError(f"floor is at most {_COUNTER_MAX}")
    return floor if peer.session is session else 0


def _require_owner(peer: Peer, session: Session) -> None:
    if peer.session is not session:
        raise ForbiddenError("the transaction belongs to another session than this connection's; send hello first")


def _refusal(action: Action, txid: bytes) -> Exception:
    name = txid.decode("ascii", "replace")
    if action is Action.REFUSE_FENCED:
        return FencedError(f"the outcome of transaction {name} is no longer kept")
    if action is Action.REFUSE_UNKNOWN:
        return UnknownTransactionError(f"transaction {name} was neither prepared nor streamed here")
    return TransactionConflictError(f"transaction {name} is already decided or prepared otherwise")


def _refuse_over_limits(context: Context, transaction: Transaction | None, added: int) -> None:
    settings = context.settings
    if context.disk_full:
        context.counters.refused_disk_full += 1
        raise DiskFullError("free disk space is under the limit: new transactions are refused until space is freed")
    if context.stopping:
        raise UnavailableError("the broker is stopping")
    if transaction is None and len(context.state.transactions) >= settings.transactions_open_max:
        raise OverloadedError(f"transactions_open_max {settings.transactions_open_max} transactions are unsettled")
    size = added + (transaction.size_bytes if transaction else 0)
    if size > settings.transaction_size_bytes_max:
        raise TooLargeError(f"the transaction is over transaction_size_bytes_max {settings.transaction_size_bytes_max}")
    if context.state.payload_bytes + added > settings.prepared_bytes_max:
        raise OverloadedError(f"unsettled transactions hold prepared_bytes_max {settings.prepared_bytes_max} bytes")


def _refuse_over_outcomes(context: Context, session: Session, floor: int) -> None:
    """Refuse where a client never says what it has seen the end of; the floor this request states counts already."""
    limit = max(_UNFINISHED_OUTCOMES_MAX, context.settings.outcomes_kept)
    if len(session.outcomes) > limit and sum(counter > floor for counter in session.outcomes) > limit:
        raise OverloadedError("too many outcomes are kept for this session: state floor= with your requests")


def _prepare_meta(
    context: Context, peer: Peer, kind: bytes, given: dict[bytes, bytes], part_count: int
) -> dict[str, Any]:
    if kind.decode() not in _KINDS:
        raise BadRequestError(f"kind {kind.decode()!r} cannot be prepared; known: {', '.join(sorted(_KINDS))}")
    resource, uuid = given.get(b"resource", b"").decode(), given.get(b"uuid", b"").decode()
    if not is_valid_name(resource) or len(uuid) != 32:
        raise BadRequestError("prepare needs resource=<name> and uuid=<32 hex>")
    deadline_ms = int(given.get(b"deadline", 0))
    if deadline_ms and deadline_ms <= context.now_ms:
        raise TransactionConflictError("the deadline has passed")
    return {
        "kind": kind.decode(), "resource": resource, "uuid": uuid, "deadline_ms": deadline_ms,
        "prepared_ms": context.now_ms, "client": peer.name,
    }  # fmt: skip


def _checked_parts(context: Context, parts: list[wire_parts.Part]) -> list[Part]:
    checked = []
    for part in parts:
        partition = context.state.partitions.get((part.topic.encode(), b"%d" % part.partition))
        if partition is None:
            raise UnknownTopicError(f"no partition {part.partition} of topic {part.topic!r}")
        checked.append(checked_part(context, partition, part.batch))
    return checked


def _check_streamed(transaction: Transaction | None, given: dict[bytes, bytes]) -> None:
    streamed = (len(transaction.parts), transaction.size_bytes, transaction.checksum) if transaction else (0, 0, 0)
    stated = tuple(int(given.get(name, 0)) for name in (b"parts", b"bytes", b"crc"))
    if streamed != stated:
        raise TransactionConflictError(f"(parts, bytes, crc) streamed {streamed} but stated {stated}")


def _add_part(context: Context, session: Session, counter: int, part: Part) -> Transaction:
    known = context.state.transactions.get((session.number, counter))
    number = len(known.parts) if known else 0
    context.group.add_entry(
        entries.encode_payload(
            session.number,
            counter,
            number,
            part.topic_id,
            part.partition,
            part.count,
            part.max_timestamp_ms,
            part.batch,
        )
    )
    return context.state.add_part(session.number, counter, part, context.now_ms)


def _repeat_prepare(
    context: Context, peer: Peer, session: Session, txid: TxId, parts: list[wire_parts.Part], opaque: bytes
) -> None:
    transaction = context.state.transactions[session.number, txid.counter]
    fresh = Transaction(session.number, txid.counter, 0)
    for part in _checked_parts(context, parts):
        fresh.add(part)
    if parts and (fresh.size_bytes, fresh.checksum) != (transaction.size_bytes, transaction.checksum):
        raise TransactionConflictError(f"transaction {txid} is prepared with other messages")
    context.answer_settled(peer, opaque, b"")


def _decide(
    context: Context,
    peer: Peer,
    session: Session,
    txid: TxId,
    given: dict[bytes, bytes],
    body: bytearray | None,
    opaque: bytes,
) -> None:
    _require_owner(peer, session)
    transaction = context.state.transactions.get((session.number, txid.counter))
    parts = wire_parts.parse_parts(body) if body else []
    checked = _checked_parts(context, parts)
    _check_streamed(transaction, given)
    _refuse_over_limits(context, transaction, sum(len(part.batch) for part in checked))
    _refuse_over_outcomes(context, session, _floor(given, peer, session))
    floor = _floor(given, peer, session)
    outcome = settlement.commit(context, session.number, txid.counter, floor, transaction, checked)
    lines = settlement.committed_lines(context, outcome)
    if transaction is None:
        context.answer_relaxed(peer, opaque, lines)
    else:
        context.answer_when_forced(peer, opaque, lines)


def _told(context: Context, state: TransactionState, session: Session, counter: int) -> bytes:
    if state is TransactionState.COMMITTED:
        return b"committed\n" + settlement.committed_lines(context, session.outcomes[counter] or ())
    if state is TransactionState.ROLLED_BACK:
        return b"rolled-back\n"
    return b"prepared\n" if state is TransactionState.PREPARED else b"unknown\n"
