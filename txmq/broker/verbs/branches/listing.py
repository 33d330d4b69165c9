"""What of transactions over homes waits here, and for which home: for ``cluster describe`` and ``stats``."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from txmq.broker.context import Context
from txmq.broker.state.transaction import TransactionState
from txmq.broker.verbs.transaction_checks import txid_of
from txmq.xid import TxId

ROWS_MAX = 100  # of each state
_BEFORE = "transactions before it, of the same keys"


def waiting(context: Context) -> list[dict[str, Any]]:
    """Branches in doubt, placed parts that are not reported, decisions that other homes or earlier ones hold up."""
    return [
        *islice(_in_doubt(context), ROWS_MAX),
        *islice(_unreported(context), ROWS_MAX),
        *islice(_decided(context), ROWS_MAX),
    ]


def figures(context: Context) -> dict[str, int]:
    """How many there are."""
    state = context.state
    in_doubt = [transaction for _, transaction in state.prepared.behind(0)]
    return {
        "in_doubt_branch": sum(transaction.is_branch for transaction in in_doubt),
        "branches_unreported": len(state.branch_parts.unreported),
        "branches_held": len(state.branch_parts.held),
        "decisions_with_homes": sum(not all(d.homes.values()) for d in state.decisions.incomplete.values()),
        "placing": sum(transaction.state is TransactionState.PLACING for transaction in in_doubt),
    }


def _in_doubt(context: Context) -> Iterator[dict[str, Any]]:
    for _, transaction in context.state.prepared.behind(0):
        since_ms = transaction.meta["prepared_ms"]
        if transaction.state is TransactionState.PLACING:
            yield _row(context, transaction.name, "placing", _BEFORE, since_ms)
        elif transaction.is_branch:
            waits_for = _BEFORE if transaction.is_committing else _home(transaction.meta["of"])
            yield _row(context, transaction.name, "prepared", waits_for, since_ms)


def _unreported(context: Context) -> Iterator[dict[str, Any]]:
    for part in context.state.branch_parts.unreported.values():
        yield _row(context, part.name, "placed", _home(part.of), part.placed_ms or context.started_ms)


def _decided(context: Context) -> Iterator[dict[str, Any]]:
    for decided in context.state.decisions.incomplete.values():
        homes = [_home(txid) for txid, is_complete in decided.homes.items() if not is_complete]
        if homes:
            yield _row(context, decided.name, "decided", ", ".join(homes), decided.meta["decided_ms"])


def _row(context: Context, name: tuple[int, int], state: str, waits_for: str, since_ms: int) -> dict[str, Any]:
    age_ms = max(0, context.now_ms - since_ms)
    return {"txid": txid_of(context, name), "state": state, "waits_for": waits_for, "age_ms": age_ms}


def _home(txid: str) -> str:
    return f"home {TxId.parse(txid).home:016x}"
