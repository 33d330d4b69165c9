"""Branch homes report to the home that decided, and readers of held parts (``complete branch=``, holds that end).

A report is journaled at once. It is answered when readers may see the transaction's messages here: every database has
committed, or the hold is over. So the answer lets the branch home show its part, too: rows before messages at each
home.

A home that is lost for ever reports nothing. An operator gives it up (``heuristic=``): journaled, kept as a heuristic
outcome, and answered at once.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.broker.state.decisions import Name, XADecision
from txmq.broker.verbs.recover import txid_of
from txmq.errors import BadRequestError, TransactionConflictError
from txmq.redo import entries
from txmq.runtime.crashpoints import crash_point
from txmq.xid import home_word

_HEURISTICS = ("commit", "rollback", "mixed", "hazard")


def complete_home(
    context: Context, client: ClientConnection, decided: XADecision, given: dict[bytes, bytes], opaque: bytes
) -> None:
    """Another home has placed its part, or an operator has given it up. Idempotent."""
    name, txid = decided.name, given[b"branch"].decode("ascii", "replace")
    fact = stated_fact(context, decided, given)
    if txid not in decided.homes:
        raise TransactionConflictError(f"the decision about {txid_of(context, name)} lists no branch {txid[:80]}")
    if not decided.homes[txid]:
        fields: dict[str, Any] = {"session": name[0], "counter": name[1], "branch": txid}
        if fact is not None:
            fact.update(resource=home_word(txid), uuid="", branch=txid)
            fields["fact"] = fact
            context.counters.heuristics += 1
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


def stated_fact(context: Context, decided: XADecision, given: dict[bytes, bytes]) -> dict[str, Any] | None:
    """What an operator or a database says of a branch (``heuristic=``); the caller adds the resource."""
    if b"heuristic" not in given:
        return None
    what = given[b"heuristic"].decode()
    if what not in _HEURISTICS:
        raise BadRequestError(f"heuristic={what[:40]}: expected one of {', '.join(_HEURISTICS)}")
    reason = unquote(given.get(b"reason", b"").decode(), errors="replace")
    return {
        "what": f"heuristic-{what}", "reason": reason, "time_ms": context.now_ms, "kind": decided.kind.value,
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


def reported(context: Context, name: Name) -> None:
    """The home that decided knows that a part is placed here, and readers may see it."""
    fields = {"session": name[0], "counter": name[1]}
    context.group.add_entry(entries.json_entry(entries.REPORTED, fields))
    crash_point("broker.branch.reported")
    part = context.state.report_part(name)
    if part is not None and part.barrier is not None:
        context.group.needs_sync = True  # readers wait for it
        context.group.ended_barriers.append(part.barrier)
