"""Heuristic outcomes: what is kept of decisions that a database, an operator or the body of a block made alone.

Each is a *fact*, one journal entry, which ``recover`` lists until ``forget``.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.broker.state.decisions import Name
from txmq.broker.state.transaction import Transaction
from txmq.broker.verbs.access.transaction_owners import audit_fact
from txmq.errors import BadRequestError, OverloadedError
from txmq.model import TransactionKind, is_valid_name
from txmq.redo import entries

HEURISTICS_MAX = 100_000  # kept of bodies that ended their transactions by themselves; each some 500 bytes
_HEURISTICS = ("commit", "rollback", "mixed", "hazard")
_WITH_ROWS = (TransactionKind.LAST_RESOURCE.value, TransactionKind.XA.value)


def record(context: Context, client: ClientConnection, transaction: Transaction, what: str, reason: bytes) -> None:
    """Keep that an operator decided alone, without proof."""
    meta = transaction.meta
    fact = {
        "what": f"heuristic-{what}", "reason": unquote(reason.decode(), errors="replace"), "time_ms": context.now_ms,
        "kind": meta["kind"], "resource": meta["resource"], "uuid": meta["uuid"],
        "outcome": "committed" if what == "commit" else "rolled-back",
    }  # fmt: skip
    if "xid" in meta:
        fact["xid"] = meta["xid"]  # its transaction manager asks by that
    keep(context, transaction.name, fact)
    audit_fact(context, client, transaction.name, fact)


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


def hazard_of(context: Context, name: Name, given: dict[bytes, bytes]) -> dict[str, Any] | None:
    """The fact that the body ended a database's transaction by itself; None if it is kept already."""
    if b"hazard" not in given:
        return None
    resource, uuid, kind = (given.get(word, b"").decode() for word in (b"resource", b"uuid", b"kind"))
    if not is_valid_name(resource) or len(uuid) != 32 or kind not in _WITH_ROWS:
        raise BadRequestError(f"hazard= needs resource=<name>, uuid=<32 hex> and kind= {' or '.join(_WITH_ROWS)}")
    known = context.state.decisions.heuristics
    if any(fact["what"] == "heuristic-hazard" and fact["uuid"] == uuid for fact in known.get(name, ())):
        return None
    if len(known) >= HEURISTICS_MAX:
        raise OverloadedError(f"{HEURISTICS_MAX} heuristic outcomes are kept: txmq tx list --state heuristic")
    return {
        "what": "heuristic-hazard", "reason": unquote(given[b"hazard"].decode(), errors="replace"),
        "time_ms": context.now_ms, "kind": kind, "resource": resource, "uuid": uuid, "outcome": "rolled-back",
    }  # fmt: skip


def keep(context: Context, name: Name, fact: dict[str, Any]) -> None:
    """Journal and fold a fact."""
    fields = {"session": name[0], "counter": name[1], "fact": fact}
    context.group.add_entry(entries.json_entry(entries.HEURISTIC, fields))
    context.state.decisions.record(name, fact)
    context.counters.heuristics += 1
