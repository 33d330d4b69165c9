"""The verb ``recover``: transactions that somebody may have to settle, and those that somebody decided alone.

In order: prepared ones (order of preparation), decided ones whose branches have not all completed (order of decision),
then heuristic outcomes; each transaction once, so that paging by ``after`` comes to an end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from txmq.broker.context import Context
from txmq.broker.decided import Decided, Name
from txmq.broker.peer import Peer
from txmq.broker.transaction import Part, Transaction, TransactionState
from txmq.errors import BadRequestError
from txmq.model import TransactionKind
from txmq.xid import TxId

Extensions = dict[bytes, bytes] | None
Row = dict[str, Any]
_STATES = {
    "prepared": ("prepared",),
    "decided": ("decided",),
    "heuristic": ("heuristic",),
    "all": ("prepared", "decided", "heuristic"),
    "": ("prepared", "decided"),
}
_ROWS_MAX = 1000


def recover(
    context: Context, peer: Peer, _arguments: list[bytes], extensions: Extensions, _body: bytearray | None,
    opaque: bytes,
) -> None:  # fmt: skip
    """List transactions in doubt, oldest first."""
    given = {name.decode(): value.decode() for name, value in (extensions or {}).items()}
    state = given.get("state", "")
    if state not in _STATES:
        raise BadRequestError(f"state={state}: expected one of {', '.join(filter(None, _STATES))}")
    after = given.get("after")
    if after is not None:
        _check_txid(after)
    rows = _rows(context, _STATES[state], given.get("uuid"), given.get("xid"))
    listed = _page(rows, after, int(given.get("limit", _ROWS_MAX)))
    context.answer_settled(peer, opaque, json.dumps({"transactions": listed}).encode())


def _check_txid(text: str) -> None:
    try:
        TxId.parse(text)
    except ValueError as error:
        raise BadRequestError(str(error)) from None


def _page(rows: list[tuple[str, Any]], after: str | None, limit: int) -> list[Row]:
    """At most ``limit`` rows behind ``after``; from the beginning, where that one was settled meanwhile."""
    start = next((number for number, (txid, _) in enumerate(rows, 1) if txid == after), 0)
    return [describe() for _, describe in rows[start : start + max(0, limit)]]


def _rows(context: Context, states: tuple[str, ...], uuid: str | None, xid: str | None) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    if "prepared" in states:
        for transaction in _prepared(context, uuid, xid):
            name = (transaction.session, transaction.counter)
            rows.append((txid_of(context, name), lambda t=transaction: _prepared_row(context, t)))
    undone = context.state.decisions.undone
    if "decided" in states and xid is None:
        for decided in undone.values():
            if uuid is None or any(b["uuid"] == uuid and not b["complete"] for b in decided.branches):
                rows.append((txid_of(context, decided.name), lambda d=decided: _decided_row(context, d)))
    if "heuristic" in states:
        for name, facts in context.state.decisions.heuristics.items():
            is_listed = "decided" in states and name in undone
            if not is_listed and _concerns(facts, "uuid", uuid) and _concerns(facts, "xid", xid):
                rows.append((txid_of(context, name), lambda n=name: _heuristic_row(context, n)))
    return rows


def _concerns(facts: list[dict[str, Any]], field: str, wanted: str | None) -> bool:
    return wanted is None or any(fact.get(field) == wanted for fact in facts)


def _prepared(context: Context, uuid: str | None, xid: str | None) -> Iterator[Transaction]:
    # One that streamed long before it prepared is younger than its first part: who settles them one by one, in this
    # order, must never wait for the commit of one that is listed behind.
    known = (t for t in context.state.transactions.values() if t.state is TransactionState.PREPARED)
    for transaction in sorted(known, key=lambda t: t.order):
        if uuid in (None, transaction.meta["uuid"]) and xid in (None, transaction.meta.get("xid")):
            yield transaction


def txid_of(context: Context, name: Name) -> str:
    """The transaction's id as text."""
    return str(TxId(context.identity.cluster, context.identity.node, *name))


def _common(context: Context, name: Name, state: str, since_ms: int) -> Row:
    owner = context.state.sessions.get(name[0])
    connected = owner is not None and owner.bound is not None
    gone_since = owner.gone_ms if owner is not None else 0
    return {
        "txid": txid_of(context, name), "state": state, "age_ms": max(0, context.now_ms - since_ms),
        "owner_connected": connected, "owner_gone_ms": 0 if connected else max(0, context.now_ms - gone_since),
    }  # fmt: skip


def _prepared_row(context: Context, transaction: Transaction) -> Row:
    meta, name = transaction.meta, (transaction.session, transaction.counter)
    row = _common(context, name, transaction.state.value, meta["prepared_ms"])
    row.update({key: meta[key] for key in ("kind", "resource", "uuid", "deadline_ms", "prepared_ms", "client")})
    if meta["kind"] == TransactionKind.HALF.value:
        row["group"], row["checks"] = meta["resource"], context.checks.attempts(name)
    row.update({key: meta[key] for key in ("table", "xid") if key in meta})
    if meta["kind"] == TransactionKind.SPARK.value:
        row.update(query=meta["resource"], **{key: meta[key] for key in ("epoch", "batch", "task", "attempt")})
    if "offsets" in meta:
        row["offsets"] = _offset_rows(context, meta["offsets"])
    row["parts"] = [_part_row(context, part.topic_id, part) for part in transaction.parts]
    return row


def _offset_rows(context: Context, offsets: list[Any]) -> list[Row]:
    """What it saves of consumer groups' offsets; until it is settled their partitions are handed to nobody else."""
    return [
        {"group": group, "topic": _topic_name(context, topic_id), "partition": partition, "offset": offset}
        for group, rows in offsets
        for topic_id, partition, offset, _ in rows
    ]


def _part_row(context: Context, topic_id: int, part: Part) -> Row:
    return {
        "topic": _topic_name(context, topic_id), "partition": part.partition, "count": part.count,
        "bytes": len(part.batch),
    }  # fmt: skip


def _topic_name(context: Context, topic_id: int) -> str | None:
    topic = context.state.topics.with_id(topic_id)
    return topic.config.name if topic else None


def _decided_row(context: Context, decided: Decided) -> Row:
    meta = decided.meta
    row = _common(context, decided.name, "decided", meta["decided_ms"])
    first = decided.branches[0]
    row.update(
        kind=TransactionKind.XA.value, resource=first["resource"], uuid=first["uuid"], deadline_ms=0,
        prepared_ms=meta["decided_ms"], decided_ms=meta["decided_ms"], client=meta["client"],
        branches=decided.branches, is_held=bool(decided.hold.places) and not decided.hold.is_settled,
        heuristics=context.state.decisions.heuristics.get(decided.name, []),
        parts=[
            {"topic": _topic_name(context, topic_id), "partition": partition, "offset": offset, "count": count}
            for topic_id, partition, offset, count in decided.parts
        ],
    )  # fmt: skip
    if "offsets" in meta:
        row["offsets"] = _offset_rows(context, meta["offsets"])
    return row


def _heuristic_row(context: Context, name: Name) -> Row:
    facts = context.state.decisions.heuristics[name]
    first = facts[0]
    row = _common(context, name, "heuristic", first["time_ms"])
    row.update(
        kind=first["kind"], resource=first["resource"], uuid=first["uuid"], outcome=first["outcome"],
        deadline_ms=0, prepared_ms=first["time_ms"], client="", parts=[], heuristics=facts,
    )  # fmt: skip
    if "xid" in first:
        row["xid"] = first["xid"]
    return row
