"""The verbs of decisions with branches and of heuristic decisions: ``decide``, ``complete``, ``forget``.

``decide`` comes when every branch is prepared in its database. Its synced record holds messages, decision and branches,
and is the decision; there is no other log. It assigns the offsets. The messages stay above the high watermark
(``visibility``) until each branch has been reported ``complete``, or ``visibility_hold_ms_max`` has passed: the
decision stands, and the rows follow.

Branch homes report to the home that decided (``complete branch=``). A report is journaled at once. It is answered when
readers may see the transaction's messages here: every database has committed, or the hold is over. So the answer lets
the branch home show its part, too: rows before messages at each home. A home that is lost for ever reports nothing, and
is told nothing. An operator gives it up (``heuristic=``): journaled, kept as a heuristic outcome, and answered at once.

A *heuristic* decision is one that a database or an operator made alone. It is journaled, and listed until ``forget``
(``heuristic_outcomes``).
"""

from __future__ import annotations

from typing import Any

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.broker.state.decisions import Name, XADecision
from txmq.broker.state.session import BrokerSession, CommittedParts
from txmq.broker.state.transaction import Action, TransactionEvent, TransactionState, next_action
from txmq.broker.verbs import appending, ordered_commits
from txmq.broker.verbs.access.audit_log import audit
from txmq.broker.verbs.access.authorizer import require_administrator
from txmq.broker.verbs.access.required_grants import FOR, refuse_acts
from txmq.broker.verbs.access.transaction_owners import audit_fact, refuse_others
from txmq.broker.verbs.fencing import refuse_fenced
from txmq.broker.verbs.heuristic_outcomes import heuristic_fact
from txmq.broker.verbs.recover import placed_rows
from txmq.broker.verbs.transaction_checks import (
    at_home,
    branches_at_homes,
    branches_in_databases,
    check_streamed,
    floor_of,
    locate,
    refusal,
    refuse_over_limits,
    refuse_over_outcomes,
    require_owner,
    state_of,
)
from txmq.broker.verbs.transaction_offsets import check_offsets, take_offsets
from txmq.errors import BadRequestError, FencedError, TransactionConflictError, UnknownTransactionError
from txmq.model import TransactionKind
from txmq.protocol.requests import Request
from txmq.protocol.transaction_bodies import split_parts
from txmq.redo import entries
from txmq.runtime.crashpoints import crash_point
from txmq.xid import TxId, home_word


def decide(context: Context, client: ClientConnection, request: Request) -> None:
    """Force messages, decision and branches in one record; the same txid again gets the same answer."""
    _, arguments, extensions, body, opaque = request
    txid, session = locate(context, arguments[0])
    refuse_others(context, client, (txid.session, txid.counter))
    action = next_action(state_of(context, session, txid.counter), TransactionEvent.DECIDE)
    if action is Action.REPEAT:
        context.answer_from_state(client, opaque, appending.kept_lines(context, session, txid.counter))
    elif action is Action.DECIDE_BRANCHES:
        _decide(context, client, session, txid, extensions or {}, body or bytearray(), opaque)
    else:
        raise refusal(action, arguments[0])


def _decide(
    context: Context,
    client: ClientConnection,
    session: BrokerSession,
    txid: TxId,
    given: dict[bytes, bytes],
    body: bytearray,
    opaque: bytes,
) -> None:
    require_owner(client, session)
    branches, start = branches_in_databases(context, client, body, given)
    refuse_fenced(session, txid, [branch["uuid"] for branch in branches])
    homes = branches_at_homes(context, given)
    offsets, messages = take_offsets(given, body, start)
    parts, keys = appending.check_parts(context, client, split_parts(messages))
    transaction = context.state.transactions.get((session.number, txid.counter))
    check_streamed(context, client, transaction, given)
    refuse_over_limits(context, session, transaction, parts)
    floor = floor_of(given, client, session)
    refuse_over_outcomes(context, session, floor)
    meta: dict[str, Any] = {"decided_ms": context.now_ms, "client": client.name, "branches": branches, **homes}
    if offsets:
        meta["offsets"] = check_offsets(context, client, offsets)
    name, kind = (session.number, txid.counter), TransactionKind.XA.value
    lines = ordered_commits.decide_in_turn(context, name, floor, transaction, parts, keys, meta, kind)
    context.answer_when_durable(client, opaque, lines)


def complete(context: Context, client: ClientConnection, request: Request) -> None:
    """A branch has committed in its database, or was found to have decided alone; or it is placed at another home."""
    _, arguments, extensions, _body, opaque = request
    given = extensions or {}
    if b"of" in given:
        require_administrator(context, client, "complete of=")
        give_up_deciding(context, client, arguments[0], given, opaque)
        return
    txid, session = locate(context, arguments[0])
    if b"branch" in given:
        _refuse_reporters(context, client, (txid.session, txid.counter), given)
    else:
        refuse_others(context, client, (txid.session, txid.counter), given.get(b"uuid", b"").decode())
    state = state_of(context, session, txid.counter)
    decided = context.state.decisions.incomplete.get((session.number, txid.counter))
    action = next_action(state, TransactionEvent.COMPLETE)
    if action is Action.REPEAT:
        context.answer_from_state(client, opaque, b"")
    elif state is TransactionState.ROLLED_BACK and b"branch" in given:
        raise FencedError(f"transaction {txid} is rolled back: nothing waits for its branches")
    elif action is not Action.COMPLETE or decided is None:
        raise refusal(action, arguments[0])
    elif b"branch" in given:
        complete_home(context, client, decided, given, opaque)
    else:
        complete_branch(context, client, decided, given, opaque)


def _refuse_reporters(context: Context, client: ClientConnection, name: Name, given: dict[bytes, bytes]) -> None:
    """Other homes report their parts, and administrators give one up."""
    if b"heuristic" in given or FOR not in given:
        require_administrator(context, client, "complete branch=")
    else:
        refuse_acts(context, client, name, given, b"complete")


def complete_branch(
    context: Context, client: ClientConnection, decided: XADecision, given: dict[bytes, bytes], opaque: bytes
) -> None:
    """A branch in a database has completed; once is enough."""
    uuid, name = given.get(b"uuid", b"").decode(), decided.name
    branch = decided.branch(uuid)
    if branch is None:
        raise BadRequestError(f"complete needs uuid=<32 hex> of one of the branches; none has {uuid!r}")
    if branch["complete"]:
        context.answer_from_state(client, opaque, b"")
        return
    fact = heuristic_fact(context, decided.kind, given)
    if fact is None:
        context.group.add_entry(entries.encode_completed(*name, uuid))
    else:
        fact.update(resource=branch["resource"], uuid=uuid)
        audit_fact(context, client, name, fact)
        context.counters.heuristics += 1
        fields = {"session": name[0], "counter": name[1], "uuid": uuid, "fact": fact}
        context.group.add_entry(entries.json_entry(entries.COMPLETED, fields))
    over = context.state.complete(name, uuid, fact)
    if over is not None:
        context.group.ended_barriers.append(over.barrier)
        may_show(context, over)
    context.group.delayable += fact is None
    context.answer_when_durable(client, opaque)


def forget(context: Context, client: ClientConnection, request: Request) -> None:
    """Drop what is kept of a heuristic decision, also if its session has ended."""
    _, arguments, _extensions, _body, opaque = request
    txid = at_home(context, arguments[0])
    name = (txid.session, txid.counter)
    refuse_others(context, client, name)
    if name not in context.state.decisions.heuristics:
        raise UnknownTransactionError(f"no heuristic outcome of transaction {txid} is kept")
    fields = {"session": name[0], "counter": name[1]}
    context.group.add_entry(entries.json_entry(entries.FORGOTTEN, fields))
    context.state.decisions.forget(name)
    audit(context, client, "heuristic outcome forgotten", txid=str(txid))
    context.answer_when_durable(client, opaque)


def make_overdue_visible(context: Context) -> None:
    """Let readers see what has waited for its branches longer than ``visibility_hold_ms_max``, in this incarnation."""
    latest = context.now_ms - context.settings.visibility_hold_ms_max
    if context.started_ms > latest:
        return  # how long the broker was away is not known: its machine's clock may have been set meanwhile
    show_overdue_parts(context, latest)
    for decided in context.state.decisions.overdue(latest):
        fields = {"session": decided.name[0], "counter": decided.name[1]}
        context.group.add_entry(entries.json_entry(entries.SHOWN, fields))
        context.group.needs_sync = True
        decided.barrier.is_ended = True
        context.group.ended_barriers.append(decided.barrier)
        context.state.may_load(decided)
        may_show(context, decided)
        context.counters.shown_before_rows += 1
        waiting = [branch["resource"] for branch in decided.branches if not branch["complete"]]
        context.alarms.append(
            {
                "event": "messages are shown before their rows: a database has not committed yet",
                "txid": context.txid_of(decided.name), "resources": waiting,
                "held_ms": context.now_ms - decided.meta["decided_ms"],
            }
        )  # fmt: skip


def complete_home(
    context: Context, client: ClientConnection, decided: XADecision, given: dict[bytes, bytes], opaque: bytes
) -> None:
    """Another home has placed its part, or an operator has given it up. Idempotent.

    Raises:
        FencedError: the decision lists no such branch, and never will: for a branch that is over.
    """
    name, txid = decided.name, given[b"branch"].decode("ascii", "replace")
    fact = heuristic_fact(context, decided.kind, given)
    if txid not in decided.homes:
        raise FencedError(f"the decision about {context.txid_of(name)} lists no branch {txid[:80]}")
    if not decided.homes[txid]:
        fields: dict[str, Any] = {"session": name[0], "counter": name[1], "branch": txid}
        if fact is not None:
            fields["fact"] = fact = _home_given_up(context, fact, txid, decided.parts)
            audit_fact(context, client, name, fact)
        context.group.add_entry(entries.json_entry(entries.COMPLETED, fields))
        context.group.needs_sync = True
        crash_point("broker.decision.reported")
        context.state.complete_home(name, txid, fact)
    if fact is not None:
        context.answer_when_durable(client, opaque)
    elif decided.barrier.is_ended:
        context.answer_from_state(client, opaque, b"")
    else:
        still_there = [request for request in decided.waiting if not request[0].gone]
        decided.waiting = [*still_there, (client, opaque)]


def _home_given_up(context: Context, fact: dict[str, Any], txid: str, parts: CommittedParts) -> dict[str, Any]:
    context.counters.heuristics += 1
    runs: dict[tuple[int, int], tuple[int, int]] = {}  # a transaction's messages are contiguous in each partition
    for topic_id, partition, offset, count in parts:
        first, before = runs.get((topic_id, partition), (offset, 0))
        runs[topic_id, partition] = (min(first, offset), before + count)
    rows = placed_rows(context, tuple((*where, *run) for where, run in runs.items()))
    return {**fact, "resource": home_word(txid), "uuid": "", "branch": txid, "parts": rows}


def give_up_deciding(
    context: Context, client: ClientConnection, txid: bytes, given: dict[bytes, bytes], opaque: bytes
) -> None:
    """An operator gives up the home that decided about a part, which is placed here. Idempotent.

    Raises:
        TransactionConflictError: it is not decided here what becomes of the part.
        UnknownTransactionError: no such part waits for that home.
    """
    parsed, of = at_home(context, txid), given[b"of"].decode("ascii", "replace")
    name = (parsed.session, parsed.counter)
    fact = heuristic_fact(context, TransactionKind.BRANCH, given)
    if fact is None or b"uuid" in given:
        raise BadRequestError("complete of= is an operator's word: it needs heuristic= and reason=, and no uuid=")
    part, prepared = context.state.branch_parts.unreported.get(name), context.state.transactions.get(name)
    if prepared is not None and prepared.meta.get("of") == of:
        raise TransactionConflictError(f"transaction {parsed} is prepared: it is to be committed or rolled back first")
    if part is not None and part.of == of:
        session = context.state.sessions.get(part.name[0])
        kept = None if session is None else session.outcomes.get(part.name[1])
        reported(context, part.name, _home_given_up(context, fact, of, kept if isinstance(kept, tuple) else ()))
        audit_fact(context, client, part.name, fact)
    elif not any(known.get("branch") == of for known in context.state.decisions.heuristics.get(name, ())):
        raise UnknownTransactionError(f"no part {parsed} of transaction {of[:80]} waits for the home that decided")
    context.answer_when_durable(client, opaque)


def may_show(context: Context, decided: XADecision) -> None:
    """Readers may see the messages: so they may at the homes that wait for it."""
    waiting, decided.waiting = decided.waiting, []
    if waiting:
        crash_point("broker.decision.shows")
    for client, opaque in waiting:
        context.answer_when_durable(client, opaque)


def show_overdue_parts(context: Context, latest_ms: int) -> None:
    """Let readers see parts that are held since that time: the home that decided is away, or its databases are."""
    for part in context.state.branch_parts.overdue(latest_ms):
        fields = {"session": part.name[0], "counter": part.name[1]}
        context.group.add_entry(entries.json_entry(entries.SHOWN, fields))
        context.group.needs_sync = True
        context.state.show_part(part.name)
        if part.barrier is not None:
            context.group.ended_barriers.append(part.barrier)
        context.counters.shown_before_rows += 1
        context.alarms.append(
            {
                "event": "a branch's messages are shown before their rows: the deciding home has not said that they "
                "are there",
                "txid": context.txid_of(part.name), "of": part.of,
            }
        )  # fmt: skip


def reported(context: Context, name: Name, fact: dict[str, Any] | None = None) -> None:
    """The home that decided knows that a part is placed here, or is given up (``fact``), and readers may see it."""
    fields: dict[str, Any] = {"session": name[0], "counter": name[1]}
    if fact is not None:
        fields["fact"] = fact
    context.group.add_entry(entries.json_entry(entries.REPORTED, fields))
    crash_point("broker.branch.reported")
    part = context.state.report_part(name, fact)
    if part is not None and part.barrier is not None:
        context.group.needs_sync = True  # readers wait for it
        context.group.ended_barriers.append(part.barrier)
