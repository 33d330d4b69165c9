"""The verbs of transactions: ``put tx=``, ``prepare``, ``commit``, ``rollback``, ``outcome``.

Every request becomes an event, and the table ``transaction.TRANSITIONS`` says what follows. Checks come first
(``transaction_checks``, ``appending``), then one or several entries go into the commit group, and the answer waits for
their record.
A refused request leaves no trace. ``fast_path`` tries ``prepare`` and ``commit`` first. ``decide`` and
``complete`` are in ``decide``, ``recover`` in ``recover``, ``checks`` in ``check_backs``.
"""

from __future__ import annotations

import re
from itertools import takewhile
from typing import Any

from txmq.broker.client_connection import ClientConnection
from txmq.broker.cluster.branch_asks import FIRST_LOOK_MS, Look
from txmq.broker.context import Context
from txmq.broker.state.decisions import Name
from txmq.broker.state.session import ROLLED_BACK, BrokerSession
from txmq.broker.state.transaction import (
    ANY_KEY,
    Action,
    Transaction,
    TransactionEvent,
    TransactionState,
    next_action,
)
from txmq.broker.verbs import appending, check_backs, ordered_commits, outbox, session_expiry
from txmq.broker.verbs.access.required_grants import acting_for, refuse_acts
from txmq.broker.verbs.access.transaction_owners import audit_fence, refuse_others
from txmq.broker.verbs.fencing import is_for_a_database, outcome_for_a_database, refuse_fenced
from txmq.broker.verbs.heuristic_outcomes import hazard_of, keep, record
from txmq.broker.verbs.transaction_checks import (
    branches_at_homes,
    check_streamed,
    decided_elsewhere,
    floor_of,
    locate,
    owner_line,
    refusal,
    refuse_over_limits,
    refuse_over_outcomes,
    require_owner,
    state_of,
)
from txmq.broker.verbs.transaction_offsets import check_offsets, save_with_commit, take_offsets
from txmq.errors import BadRequestError, TransactionConflictError
from txmq.log.batch import checksum
from txmq.model import TransactionKind, is_valid_name, is_valid_table
from txmq.protocol.requests import Request
from txmq.protocol.transaction_bodies import Buffer, WirePart, split_parts
from txmq.redo import entries
from txmq.runtime.crashpoints import crash_point
from txmq.xid import FORMAT_ID_MAX, TxId, home_word

_IN_ORDER = (TransactionKind.LAST_RESOURCE.value, TransactionKind.BRANCH.value)  # kinds whose keys are kept in order
_OF_ANOTHER = _IN_ORDER  # kinds of which another home's transaction may be said
_DECIDED_LATER = (TransactionKind.HALF.value, TransactionKind.FOREIGN.value, TransactionKind.SPARK.value)
_FOREIGN_XID = re.compile(r"(?:0|[1-9][0-9]{0,9})\.(?:[0-9a-f]{2}){1,64}\.(?:[0-9a-f]{2}){0,64}\Z")


def put_part(context: Context, client: ClientConnection, txid_text: bytes, stated: WirePart, opaque: bytes) -> None:
    """Stream one part of a large transaction: stored, invisible, until commit or prepare."""
    txid, session = locate(context, txid_text)
    require_owner(client, session)
    action = next_action(state_of(context, session, txid.counter), TransactionEvent.PART)
    if action is not Action.ADD_PART:
        raise refusal(action, txid_text)
    (part,), _ = appending.check_parts(context, client, [stated])
    transaction = context.state.transactions.get((session.number, txid.counter))
    refuse_over_limits(context, session, transaction, [part])
    refuse_over_outcomes(context, session, 0)
    transaction = appending.add_part(context, session.number, txid.counter, part)
    context.answer_when_durable(client, opaque, b"%d" % (len(transaction.parts) - 1))


def prepare(context: Context, client: ClientConnection, request: Request) -> None:
    """Journal all parts and the prepare record. From then on the resource manager decides, not the client."""
    _, arguments, extensions, body, opaque = request
    txid, session = locate(context, arguments[0])
    require_owner(client, session)
    given = extensions or {}
    offsets, messages = take_offsets(extensions, body)
    action = next_action(state_of(context, session, txid.counter), TransactionEvent.PREPARE)
    if action is Action.REPEAT:
        _repeat_prepare(context, client, session, txid, messages, opaque)
        return
    if action is not Action.PREPARE:
        raise refusal(action, arguments[0])
    meta = _prepare_meta(context, client, arguments[1], given)
    refuse_fenced(session, txid, [meta["uuid"]])
    transaction = context.state.transactions.get((session.number, txid.counter))
    parts, keys = appending.check_parts(context, client, split_parts(messages))
    check_streamed(context, client, transaction, given)
    refuse_over_limits(context, session, transaction, parts)
    refuse_over_outcomes(context, session, floor_of(given, client, session))
    streamed = len(transaction.parts) if transaction else 0
    if meta["kind"] in _IN_ORDER:
        meta["keys"] = [ANY_KEY] * streamed + keys
    else:
        meta["keys"] = [[]] * (streamed + len(parts))
        # Those queue when they are decided. A batch of a query is in order with the query's other batches alone.
        if context.cluster is not None and meta["kind"] != TransactionKind.SPARK.value:
            meta["decided_keys"] = [ANY_KEY] * streamed + keys
    if offsets:
        meta["offsets"] = check_offsets(context, client, offsets)
    text = entries.json_body(meta)
    prepared = appending.prepare(context, session.number, txid.counter, parts, meta, text)
    check_backs.prepared(context, prepared)
    if "homes" in meta:
        crash_point("broker.decision.prepared")
    if prepared.is_branch:
        branch_prepared(context, prepared)
    context.answer_when_durable(client, opaque)


def branch_prepared(context: Context, branch: Transaction) -> None:
    """The home that decides is asked in a while, unless the client tells the outcome before."""
    crash_point("broker.branch.prepared")
    context.branch_asks.at(context.now_ms + FIRST_LOOK_MS, Look(branch.name, branch.meta["of"]))


def commit(context: Context, client: ClientConnection, request: Request) -> None:
    """Decide a local transaction, or settle a prepared one."""
    _, arguments, extensions, body, opaque = request
    txid, session = locate(context, arguments[0])
    given = extensions or {}
    refuse_others(context, client, (txid.session, txid.counter), is_end=True)
    is_whole = body or b"homes" in given or outbox.OUTBOX in given
    event = TransactionEvent.COMMIT_PARTS if is_whole else TransactionEvent.COMMIT
    action = next_action(state_of(context, session, txid.counter), event)
    floor = floor_of(given, client, session)
    if action is Action.REPEAT:
        context.answer_from_state(client, opaque, appending.kept_lines(context, session, txid.counter))
    elif action is Action.DECIDE:
        _decide(context, client, session, txid, given, body, opaque)
    elif action is Action.SETTLE:
        transaction = context.state.transactions[session.number, txid.counter]
        if b"heuristic" in given and transaction.state is TransactionState.PREPARED:
            record(context, client, transaction, "commit", given[b"heuristic"])
            ordered_commits.commit_now(context, transaction, client, opaque, floor)
        elif transaction.meta["kind"] == TransactionKind.SPARK.value:
            raise TransactionConflictError(f"transaction {txid} is part of a batch: query commit decides it")
        else:
            ordered_commits.commit_in_order(context, transaction, client, opaque, floor, b"delayable" in given)
    else:
        raise refusal(action, arguments[0])


def rollback(context: Context, client: ClientConnection, request: Request) -> None:
    """Force rolled-back, also for a transaction never seen (so that a delayed request for it is refused)."""
    _, arguments, extensions, _body, opaque = request
    txid, session = locate(context, arguments[0])
    refuse_others(context, client, (txid.session, txid.counter), is_end=True)
    action = next_action(state_of(context, session, txid.counter), TransactionEvent.ROLLBACK)
    given = extensions or {}
    floor = floor_of(given, client, session)
    hazard = hazard_of(context, (session.number, txid.counter), given)
    if action is Action.REPEAT:
        if hazard is None:
            context.answer_from_state(client, opaque, b"")
        else:
            keep(context, (session.number, txid.counter), hazard)
            context.answer_when_durable(client, opaque)
    elif action in (Action.ROLL_BACK, Action.FENCE):
        _refuse_if_committing(context, session.number, txid)
        if action is Action.FENCE:
            refuse_over_outcomes(context, session, floor, is_fence=True)
        transaction = context.state.transactions.get((session.number, txid.counter))
        if b"heuristic" in given and transaction is not None and transaction.state is TransactionState.PREPARED:
            record(context, client, transaction, "rollback", given[b"heuristic"])
        if hazard is not None:
            keep(context, (session.number, txid.counter), hazard)
        roll_back(context, session.number, txid.counter, floor)
        context.answer_when_durable(client, opaque)
    else:
        raise refusal(action, arguments[0])


def outcome(context: Context, client: ClientConnection, request: Request) -> None:
    """Tell what became of a transaction; with ``fence`` an absent one is rolled back first."""
    _, arguments, extensions, _body, opaque = request
    txid, session = locate(context, arguments[0])
    given = extensions or {}
    if b"uuid" in given and is_for_a_database(context, client, (txid.session, txid.counter)):
        outcome_for_a_database(context, client, (txid, session), given, opaque)
        return
    refuse_acts(context, client, (txid.session, txid.counter), given, b"outcome")
    state = state_of(context, session, txid.counter)
    # To an id that its client is through with, no decision comes any more: its branches need not wait for the owner.
    is_over = b"branch" in given and txid.counter <= session.finished
    is_fence = b"fence" in given or is_over
    action = next_action(state, TransactionEvent.FENCE if is_fence else TransactionEvent.LOOKUP)
    if action in (Action.FENCE, Action.ROLL_BACK):
        if action is Action.FENCE:
            refuse_over_outcomes(context, session, 0, is_fence=True)
        audit_fence(context, client, (session.number, txid.counter), **acting_for(given))
        roll_back(context, session.number, txid.counter, 0)
        if b"branch" in given:
            crash_point("broker.decision.fenced")
        context.answer_when_durable(client, opaque, b"rolled-back\n")
    elif action is Action.TELL:
        if b"branch" in given:
            told = _branch_outcome(context, state, (session.number, txid.counter), given[b"branch"].decode())
        else:
            told = _outcome_lines(context, state, session, txid.counter)
        if state is TransactionState.PREPARED:
            _look_at_branch(context, (session.number, txid.counter))
        if b"owner" in given and not told.startswith(b"committed"):
            told += owner_line(context, session)
        context.answer_from_state(client, opaque, told)
    else:
        raise refusal(action, arguments[0])


def _look_at_branch(context: Context, name: tuple[int, int]) -> None:
    """The home that decided may be the one that asks."""
    transaction = context.state.transactions[name]
    if transaction.is_branch and not transaction.is_committing:
        context.branch_asks.hurry([transaction], context.now_ms)


def roll_back(context: Context, session: int, counter: int, floor: int) -> None:
    """Journal and fold a rollback. Commits that waited only for this transaction go on."""
    context.group.add_entry(entries.encode_rolled_back(session, counter, floor))
    context.group.needs_sync = True
    transaction = context.state.settle(session, counter, floor, ROLLED_BACK)
    context.counters.rolled_back += 1
    if transaction is not None:
        homes = transaction.meta.get("homes", ())
        context.branch_asks.remind(homes, transaction.name, context.now_ms, is_committed=False)
        ordered_commits.wake(context, transaction)


def owner_gone(context: Context, session: BrokerSession) -> None:
    """The session's connection was lost: its streams are rolled back; its prepared transactions stay."""
    session_expiry.went_away(context, session)
    check_backs.owner_gone(context, session)
    streaming = [t for t in context.state.streams.values() if t.session == session.number]
    for transaction in streaming:
        roll_back(context, transaction.session, transaction.counter, 0)
        context.group_with_room()


def expire_streams(context: Context) -> None:
    """Roll back streams that are older than ``transaction_timeout_ms_max``."""
    oldest = context.now_ms - context.settings.transaction_timeout_ms_max
    overdue = takewhile(lambda stream: stream.opened_ms < oldest, context.state.streams.values())  # in that order
    for transaction in list(overdue):
        roll_back(context, transaction.session, transaction.counter, 0)
        context.group_with_room()


def _refuse_if_committing(context: Context, session: int, txid: TxId) -> None:
    transaction = context.state.transactions.get((session, txid.counter))
    if transaction is not None and transaction.is_committing:
        # A client proved that the database committed, or a home that it decided so: the commit waits for its turn.
        raise TransactionConflictError(f"transaction {txid} is committing")


def _prepare_meta(context: Context, client: ClientConnection, kind: bytes, given: dict[bytes, bytes]) -> dict[str, Any]:
    describe = _KINDS.get(kind.decode())
    if describe is None:
        raise BadRequestError(f"kind {kind.decode()[:40]!r} cannot be prepared; known: {', '.join(sorted(_KINDS))}")
    deadline_ms = int(given.get(b"deadline", 0))
    if deadline_ms and deadline_ms <= context.now_ms:
        raise TransactionConflictError("the deadline has passed")
    return {
        "kind": kind.decode(), **describe(context, given), "deadline_ms": deadline_ms, "prepared_ms": context.now_ms,
        "client": client.name, **_over_homes(context, kind.decode(), given),
    }  # fmt: skip


def _over_homes(context: Context, kind: str, given: dict[bytes, bytes]) -> dict[str, Any]:
    of, homes = decided_elsewhere(context, given), branches_at_homes(context, given)
    if of and kind not in _OF_ANOTHER:
        raise BadRequestError(f"of= is said of kinds {' and '.join(_OF_ANOTHER)}, not of {kind}")
    if homes and kind not in _DECIDED_LATER:
        raise BadRequestError(f"homes= is said of kinds {', '.join(_DECIDED_LATER)}, not of {kind}")
    return {**of, **homes}


def _branch(_context: Context, given: dict[bytes, bytes]) -> dict[str, str]:
    if b"of" not in given:
        raise BadRequestError("prepare of a branch needs of=<txid of the transaction at the home that decides>")
    return {"resource": home_word(given[b"of"].decode()), "uuid": ""}  # ``_over_homes`` checks it


def _last_resource(_context: Context, given: dict[bytes, bytes]) -> dict[str, str]:
    resource, uuid, table = (given.get(word, b"").decode() for word in (b"resource", b"uuid", b"table"))
    if not is_valid_name(resource) or len(uuid) != 32 or not is_valid_table(table):
        raise BadRequestError("prepare needs resource=<name>, uuid=<32 hex> and table=<marker table>")
    return {"resource": resource, "uuid": uuid, "table": table}


def _half(_context: Context, given: dict[bytes, bytes]) -> dict[str, str]:
    group = given.get(b"group", b"").decode()
    if not is_valid_name(group):
        raise BadRequestError("prepare of a half message needs group=<producer group>")
    return {"resource": group, "uuid": ""}


def _spark(context: Context, given: dict[bytes, bytes]) -> dict[str, Any]:
    words = (b"epoch", b"batch", b"task", b"attempt")
    if any(word not in given for word in (b"query", *words)):
        raise BadRequestError("prepare of kind spark needs query= epoch= batch= task= attempt=")
    numbers = {word.decode(): int(given[word]) for word in words}
    name = given[b"query"].decode()
    known = context.state.queries.at_epoch(name, numbers["epoch"])
    if known.has(numbers["batch"]):
        raise TransactionConflictError(f"batch {numbers['batch']} of query {name} is committed: it is over")
    return {"resource": name, "uuid": "", **numbers}


def _foreign(context: Context, given: dict[bytes, bytes]) -> dict[str, str]:
    xid = given.get(b"xid", b"").decode()
    if _FOREIGN_XID.match(xid) is None or int(xid.partition(".")[0]) > FORMAT_ID_MAX:
        raise BadRequestError("prepare needs xid=<format id, below 2^31>.<gtrid, hex>.<bqual, hex>")
    if xid in context.state.foreign:
        raise TransactionConflictError(f"xid {xid} is prepared already")
    return {"resource": "", "uuid": "", "xid": xid}


_KINDS = {
    TransactionKind.LAST_RESOURCE.value: _last_resource,
    TransactionKind.HALF.value: _half,
    TransactionKind.FOREIGN.value: _foreign,
    TransactionKind.SPARK.value: _spark,
    TransactionKind.BRANCH.value: _branch,
}


def _repeat_prepare(
    context: Context,
    client: ClientConnection,
    session: BrokerSession,
    txid: TxId,
    messages: Buffer,
    opaque: bytes,
) -> None:
    transaction = context.state.transactions[session.number, txid.counter]
    parts, _ = appending.check_parts(context, client, split_parts(messages))
    size = crc = 0
    for _, _, batch, *_ in parts:
        size, crc = size + len(batch), checksum(batch, crc)
    if parts and (size, crc) != (transaction.size_bytes, transaction.checksum):
        raise TransactionConflictError(f"transaction {txid} is prepared with other messages")
    context.answer_from_state(client, opaque, b"")


def _decide(
    context: Context,
    client: ClientConnection,
    session: BrokerSession,
    txid: TxId,
    given: dict[bytes, bytes],
    body: bytearray | None,
    opaque: bytes,
) -> None:
    require_owner(client, session)
    page = outbox.page_of(context, client, given)  # a copy's rows are refused as a copy's, whatever is in them
    transaction = context.state.transactions.get((session.number, txid.counter))
    homes = branches_at_homes(context, given)
    offsets, messages = take_offsets(given, body)
    parts, keys = appending.check_parts(context, client, split_parts(messages))
    check_streamed(context, client, transaction, given)
    refuse_over_limits(context, session, transaction, parts)
    floor = floor_of(given, client, session)
    refuse_over_outcomes(context, session, floor)
    saved = check_offsets(context, client, offsets)
    if page is not None:
        outbox.take(context, client, page, txid)
    if homes or ordered_commits.must_queue(context, transaction, parts, keys):
        meta: dict[str, Any] = {"decided_ms": context.now_ms, "client": client.name}
        if homes:
            meta.update(branches=[], **homes)
        if saved:
            meta["offsets"] = saved
        name, kind = (session.number, txid.counter), TransactionKind.LOCAL.value
        lines = ordered_commits.decide_in_turn(context, name, floor, transaction, parts, keys, meta, kind)
        context.answer_when_durable(client, opaque, lines)
        return
    lines = appending.commit(context, session.number, txid.counter, floor, transaction, parts)
    save_with_commit(context, saved)
    if transaction is None and not saved and page is None:
        context.answer_as_configured(client, opaque, lines)
    else:
        context.answer_when_durable(client, opaque, lines)


def _outcome_lines(context: Context, state: TransactionState, session: BrokerSession, counter: int) -> bytes:
    if state in (TransactionState.COMMITTED, TransactionState.DECIDED, TransactionState.PLACING):
        return b"committed\n" + appending.kept_lines(context, session, counter)
    if state is TransactionState.ROLLED_BACK:
        return b"rolled-back\n"
    return b"prepared\n" if state is TransactionState.PREPARED else b"unknown\n"


def _branch_outcome(context: Context, state: TransactionState, name: Name, branch: str) -> bytes:
    """What became of a branch at another home. One that is not listed is rolled back, whatever became of the others."""
    crash_point("broker.decision.asked")
    if state in (TransactionState.NONE, TransactionState.OPEN):
        return b"unknown\n"
    decided, transaction = context.state.decisions.incomplete.get(name), context.state.transactions.get(name)
    if decided is not None and branch in decided.homes:
        return b"committed\n"
    if transaction is not None and branch in transaction.meta.get("homes", ()):
        return b"prepared\n"
    return b"rolled-back\n"
