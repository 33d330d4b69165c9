"""Branch homes report to the home that decided, and readers of held parts (``complete branch=``, holds that end).

A report is journaled at once. It is answered when readers may see the transaction's messages here: every database has
committed, or the hold is over. So the answer lets the branch home show its part, too: rows before messages at each
home.

A home that is lost for ever reports nothing, and is told nothing. An operator gives it up (``heuristic=``): journaled,
kept as a heuristic outcome, and answered at once.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.broker.state.decisions import Name, XADecision
from txmq.broker.state.session import CommittedParts
from txmq.broker.verbs.access.transaction_owners import audit_fact
from txmq.broker.verbs.recover import placed_rows
from txmq.broker.verbs.transaction_checks import at_home, txid_of
from txmq.errors import BadRequestError, FencedError, TransactionConflictError, UnknownTransactionError
from txmq.model import TransactionKind
from txmq.redo import entries
from txmq.runtime.crashpoints import crash_point
from txmq.xid import home_word

_HEURISTICS = ("commit", "rollback", "mixed", "hazard")


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
        raise FencedError(f"the decision about {txid_of(context, name)} lists no branch {txid[:80]}")
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


def heuristic_fact(context: Context, kind: TransactionKind, given: dict[bytes, bytes]) -> dict[str, Any] | None:
    """What an operator or a database says of a branch (``heuristic=``); the caller adds the resource."""
    if b"heuristic" not in given:
        return None
    what = given[b"heuristic"].decode()
    if what not in _HEURISTICS:
        raise BadRequestError(f"heuristic={what[:40]}: expected one of {', '.join(_HEURISTICS)}")
    reason = unquote(given.get(b"reason", b"").decode(), errors="replace")
    return {
        "what": f"heuristic-{what}", "reason": reason, "time_ms": context.now_ms, "kind": kind.value,
        "outcome": "committed",
    }  # fmt: skip


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
                "txid": txid_of(context, part.name), "of": part.of,
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
