"""Commits in order: which transactions wait for earlier ones of their keys, and what goes on when one is settled.

The order itself is ``state/commit_order``: of the prepared transactions of a resource, and in a cluster of all. A
commit of what is prepared waits with its answer. A decision is journaled and answered at once; only its messages wait.
"""

from __future__ import annotations

from typing import Any

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.broker.state.decisions import Name
from txmq.broker.state.transaction import ANY_KEY, Transaction, TransactionState
from txmq.broker.verbs.appending import Keys, Part, add_part, awaited_lines, commit, decide
from txmq.redo import entries
from txmq.runtime.crashpoints import crash_point


def must_queue(context: Context, transaction: Transaction | None, fresh: list[Part], keys: list[Keys]) -> bool:
    """Whether a decision's messages wait for earlier transactions of their keys (``commit_order``)."""
    if not context.state.order.in_common:
        return False
    streamed = transaction.parts if transaction is not None else []
    places = [(part.topic_id, part.partition) for part in streamed]
    places += [(partition.topic_id, partition.number) for _, partition, *_ in fresh]
    stated: list[Keys] = [*[ANY_KEY] * len(streamed), *keys]
    return _must_queue(context, places, stated)


def _must_queue(context: Context, places: list[tuple[int, int]], keys: list[Keys]) -> bool:
    collisions = (
        (*place, key)
        for place, listed in zip(places, keys, strict=True)
        for key in ([ANY_KEY] if isinstance(listed, str) else listed)
    )
    return context.state.order.must_queue(collisions)


def decide_in_turn(
    context: Context, name: Name, floor: int, transaction: Transaction | None, fresh: list[Part], keys: list[Keys],
    meta: dict[str, Any], kind: str,
) -> bytes:  # fmt: skip
    """Journal and fold a decision at once; its messages are placed with it, unless they wait for their turn."""
    if must_queue(context, transaction, fresh, keys):
        return await_place(context, name, transaction, fresh, keys, {"kind": kind, "floor": floor, **meta})
    return decide(context, name, floor, transaction, fresh, meta)


def await_place(
    context: Context,
    name: Name,
    transaction: Transaction | None,
    fresh: list[Part],
    keys: list[Keys],
    meta: dict[str, Any],
) -> bytes:
    """Journal and fold a decision whose messages wait for their place. Nothing here can refuse.

    Args:
        meta: kind, floor, decided_ms, client; branches and homes if there are any; offsets.

    Returns:
        The answer: what waits.
    """
    streamed = len(transaction.parts) if transaction is not None else 0
    for part in fresh:
        add_part(context, *name, part)
    meta = {
        "resource": "", "uuid": "", "deadline_ms": 0, "prepared_ms": meta["decided_ms"],
        "keys": [ANY_KEY] * streamed + keys, **meta,
    }  # fmt: skip
    return _awaits_place(context, name, meta)


def _awaits_place(context: Context, name: Name, meta: dict[str, Any]) -> bytes:
    context.group.add_entry(entries.encode_place_awaited(*name, entries.json_body(meta)))
    crash_point("broker.decision.awaits_place")
    awaiting = context.state.await_place(*name, meta)
    context.branch_asks.hurry(context.state.order.blockers(awaiting), context.now_ms)
    return awaited_lines(context, awaiting)


def commit_in_order(
    context: Context, transaction: Transaction, client: ClientConnection, opaque: bytes, floor: int, is_delayable: bool
) -> None:
    """Commit a prepared transaction, or let the request wait for an earlier one it collides with.

    What is decided here, and held nobody up before, is answered at once; its messages queue from now on.

    Args:
        is_delayable: no caller waits for it: it need not be forced alone (``commit/journal_schedule``).
    """
    if context.state.order.in_common and _takes_its_turn_now(context, transaction):
        meta = {**transaction.meta, "floor": floor, "decided_ms": context.now_ms}
        meta["keys"] = meta.pop("decided_keys")
        meta.pop("xid", None)  # its transaction manager has nothing more to resolve
        if "homes" in meta:
            meta["branches"] = []
        context.answer_when_durable(client, opaque, _awaits_place(context, transaction.name, meta))
        return
    if transaction.waiting:  # one that was asked again and again: by owners that are gone, too
        transaction.waiting = [request for request in transaction.waiting if not request[0].gone]
    transaction.waiting.append((client, opaque, floor, is_delayable))
    _commit_in_turn(context, transaction)


def _takes_its_turn_now(context: Context, transaction: Transaction) -> bool:
    if transaction.state is not TransactionState.PREPARED:
        return False
    keys = transaction.meta.get("decided_keys")
    places = [(part.topic_id, part.partition) for part in transaction.parts]
    return keys is not None and _must_queue(context, places, keys)


def commit_decided(context: Context, transaction: Transaction) -> None:
    """The home that decides about a part has said that it is committed."""
    transaction.is_decided = True
    _commit_in_turn(context, transaction)


def _commit_in_turn(context: Context, transaction: Transaction) -> None:
    if context.state.order.must_wait(transaction):
        context.branch_asks.hurry(context.state.order.blockers(transaction), context.now_ms)
    else:
        _commit_all(context, _commit_one(context, transaction))


def commit_now(context: Context, transaction: Transaction, client: ClientConnection, opaque: bytes, floor: int) -> None:
    """Commit a prepared transaction out of its turn: an operator says so."""
    transaction.waiting.append((client, opaque, floor, False))
    _commit_all(context, [transaction])


def wake(context: Context, transaction: Transaction) -> None:
    """A prepared transaction was rolled back: those that waited only for it go on."""
    if transaction.state is TransactionState.PREPARED:
        _commit_all(context, context.state.order.behind(transaction))


def place_what_waited(context: Context) -> None:
    """The broker has started: decisions go on whose turn came just before the former one ended."""
    waited = [t for _, t in context.state.prepared.behind(0) if t.state is TransactionState.PLACING]
    _commit_all(context, [t for t in reversed(waited) if not context.state.order.must_wait(t)])


def _commit_all(context: Context, due: list[Transaction]) -> None:
    while due:
        transaction = due.pop()
        if (transaction.session, transaction.counter) in context.state.transactions:
            due.extend(_commit_one(context, transaction))


def _commit_one(context: Context, transaction: Transaction) -> list[Transaction]:
    """Commit one whose turn it is; returns those whose turn comes by that."""
    _commit_prepared(context, transaction)
    context.group_with_room()  # thousands may have waited for one
    return context.state.order.behind(transaction)


def _commit_prepared(context: Context, transaction: Transaction) -> None:
    meta, floor = transaction.meta, 0
    for _, _, stated, _ in transaction.waiting:
        if stated > floor:
            floor = stated
    if transaction.state is TransactionState.PREPARED and "homes" in meta:
        decided = {"decided_ms": context.now_ms, "client": meta["client"], "branches": [], "homes": meta["homes"]}
        lines = decide(context, transaction.name, floor, transaction, [], decided)
        context.branch_asks.remind(meta["homes"], transaction.name, context.now_ms, is_committed=True)
    else:
        floor = max(floor, meta.get("floor", 0))
        lines = commit(context, *transaction.name, floor, transaction, [])
    if len(transaction.waiting) == 1 and transaction.waiting[0][3]:
        context.group.delayable += 1
    for client, opaque, _, _ in transaction.waiting:
        context.answer_when_durable(client, opaque, lines)
