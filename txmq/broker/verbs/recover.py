"""The verbs ``recover`` (transactions in doubt, and heuristic outcomes) and ``parts`` (the messages of one).

``recover`` lists in order: prepared ones (order of preparation), decided ones whose branches have not all completed
(order of decision), parts of other homes' transactions that are placed and not reported (order of their places), then
heuristic outcomes. A page ends at ``limit`` rows or ROWS_SIZE_BYTES_MAX, or after LOOKS_MAX transactions that only
others may be told of, and says where the next one begins: a place in that order, which does not move if others are
settled meanwhile.

``parts`` answers the messages of a prepared transaction, for the operator who has to resolve it.

Invariants:
    * a walk over all pages lists every transaction that was there all the time, and none twice, unless it changed its
      state meanwhile. If the broker was restarted, the list begins anew;
    * a page costs what is on it: a row that is not shown is not made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.broker.state.decisions import BranchPart, Name, XADecision
from txmq.broker.state.session import CommittedParts
from txmq.broker.state.transaction import PreparedPart, Transaction, TransactionState
from txmq.broker.verbs.access.authorizer import READ, TOPIC, require
from txmq.broker.verbs.access.transaction_owners import is_owner, may_settle, refuse_others
from txmq.broker.verbs.transaction_checks import at_home, locate
from txmq.errors import BadRequestError, UnknownTransactionError
from txmq.model import TransactionKind
from txmq.protocol.answers import Records
from txmq.protocol.requests import Request
from txmq.protocol.transaction_bodies import encode_part
from txmq.xid import home_word

Row = dict[str, Any]
MakeRow = Callable[[], Row]
Found = tuple[int, Name, MakeRow]
_PREPARED, _DECIDED, _PLACED, _HEURISTIC = _IN_ORDER = ("prepared", "decided", "placed", "heuristic")
_PLACING = TransactionState.PLACING.value  # listed in the walk over prepared ones
_STATES = {
    **{state: (state,) for state in _IN_ORDER},
    _PLACING: (_PLACING,),
    "all": (*_IN_ORDER, _PLACING),
    "": (_PREPARED, _DECIDED, _PLACED, _PLACING),
}
_OVER_HOMES = ("of", "held", "homes")
_PAGE_START = re.compile(r"([0-9]{1,10})\.(prepared|decided|placed|heuristic)\.([0-9]{1,20})\Z", re.ASCII)
_NOBODY = (0, 0)  # a name that no transaction has
ROWS_MAX = 1000  # in an answer
ROWS_SIZE_BYTES_MAX = 1 << 20  # but at least one row
PARTS_SIZE_BYTES = 1 << 20
LOOKS_MAX = 5000  # transactions of others passed over in one page, each some 2 us


class PageStart(NamedTuple):
    """The row after which a page begins; numbers of an incarnation of the broker mean nothing in another one."""

    incarnation: int
    state: str
    number: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.state}.{self.number}"


class Wanted(NamedTuple):
    """What to list."""

    states: tuple[str, ...]
    uuid: str | None
    xid: str | None
    name: Name | None


def recover(context: Context, client: ClientConnection, request: Request) -> None:
    """List transactions in doubt, oldest first."""
    _, _arguments, extensions, _body, opaque = request
    given = {name.decode(): value.decode() for name, value in (extensions or {}).items()}
    state = given.get("state", "")
    if state not in _STATES:
        raise BadRequestError(f"state={state}: expected one of {', '.join(filter(None, _STATES))}")
    txid = given.get("txid")
    name = None if txid is None else at_home(context, txid.encode())[2:]
    wanted = Wanted(_STATES[state], given.get("uuid"), given.get("xid"), name)
    limit = min(int(given.get("limit", ROWS_MAX)), ROWS_MAX)
    context.answer_from_state(
        client, opaque, _page(context, client, wanted, _page_start(context, given.get("after")), limit)
    )


def _page_start(context: Context, text: str | None) -> PageStart:
    """Where the page begins: at the beginning if ``text`` is of another incarnation of the broker."""
    beginning = PageStart(context.state.epoch, _PREPARED, 0)
    if text is None:
        return beginning
    match = _PAGE_START.match(text)
    if match is None:
        raise BadRequestError(f"after={text[:40]}: expected what the page before said in next")
    start = PageStart(int(match[1]), match[2], int(match[3]))
    return start if start.incarnation == context.state.epoch else beginning


def _page(context: Context, client: ClientConnection, wanted: Wanted, start: PageStart, limit: int) -> bytes:
    """At most ``limit`` rows after a place, as JSON; those that the connection's user may settle."""
    rows: list[str] = []
    size, unseen, following = 0, 0, None
    for found, name, row in _rows(context, wanted, start):
        is_seen = client.permissions is None or may_settle(context, client, name)
        if unseen >= LOOKS_MAX or (is_seen and (len(rows) >= limit or size >= ROWS_SIZE_BYTES_MAX)):
            following = str(start)
            break
        if is_seen:
            rows.append(json.dumps(row()))
            size += len(rows[-1])
        else:
            unseen += 1
        start = found
    return f'{{"transactions": [{", ".join(rows)}], "next": {json.dumps(following)}}}'.encode()


def _rows(context: Context, wanted: Wanted, start: PageStart) -> Iterator[tuple[PageStart, Name, MakeRow]]:
    """Everything that is wanted after a place, in order; a row is made when it is called for."""
    begun = _IN_ORDER.index(start.state)
    for rank, state in enumerate(_IN_ORDER):
        if rank >= begun and (state in wanted.states or (state == _PREPARED and _PLACING in wanted.states)):
            number = start.number if rank == begun else 0
            for found, name, row in _WALKS[state](context, wanted, number):
                yield PageStart(start.incarnation, state, found), name, row


def _prepared(context: Context, wanted: Wanted, number: int) -> Iterator[Found]:
    # In order of preparation, not of the first part: a resolver that settles them one by one in this order must never
    # wait for the commit of a later one.
    name = wanted.name if wanted.xid is None else context.state.foreign.get(wanted.xid, _NOBODY)
    if name is None:
        found = context.state.prepared.behind(number, wanted.uuid)
    else:
        known = context.state.transactions.get(name)
        is_there = known is not None and known.state is not TransactionState.OPEN and known.order > number
        found = iter([(known.order, known)] if known is not None and is_there else [])
    for order, transaction in found:
        if transaction.state.value not in wanted.states or _is_listed_as_decided(context, wanted, transaction):
            continue
        if wanted.name in (None, transaction.name) and wanted.uuid in (None, transaction.meta["uuid"]):
            yield order, transaction.name, partial(_prepared_row, context, transaction)


def _is_listed_as_decided(context: Context, wanted: Wanted, transaction: Transaction) -> bool:
    return _DECIDED in wanted.states and transaction.name in context.state.decisions.incomplete


def _decided(context: Context, wanted: Wanted, number: int) -> Iterator[Found]:
    decisions = context.state.decisions
    if wanted.xid is not None:
        return  # foreign ones are decided elsewhere
    if wanted.name is None:
        found = decisions.index.behind(number, wanted.uuid)
    else:
        known = decisions.incomplete.get(wanted.name)
        found = iter([(known.number, known)] if known is not None and known.number > number else [])
    for at, decided in found:
        if wanted.uuid is None or wanted.uuid in decided.index_keys:
            yield at, decided.name, partial(_decided_row, context, decided)


def _placed(context: Context, wanted: Wanted, number: int) -> Iterator[Found]:
    parts = context.state.branch_parts
    if wanted.xid is not None or wanted.uuid is not None:
        return
    if wanted.name is None:
        found = parts.listed.behind(number)
    else:
        known = parts.unreported.get(wanted.name)
        found = iter([(known.number, known)] if known is not None and known.number > number else [])
    for at, part in found:
        yield at, part.name, partial(_placed_row, context, part)


def _heuristic(context: Context, wanted: Wanted, number: int) -> Iterator[Found]:
    decisions = context.state.decisions
    if wanted.name is None:
        found = decisions.recorded.behind(number)
    else:
        at = decisions.number_of(wanted.name)
        found = iter([(at, wanted.name)] if at > number else [])
    for at, name in found:
        facts = decisions.heuristics[name]
        # By its xid a transaction is listed as heuristic alone.
        is_listed = wanted.xid is None and (
            (_DECIDED in wanted.states and name in decisions.incomplete)
            or (_PLACED in wanted.states and wanted.uuid is None and name in context.state.branch_parts.unreported)
        )
        if not is_listed and _concerns(facts, "uuid", wanted.uuid) and _concerns(facts, "xid", wanted.xid):
            yield at, name, partial(_heuristic_row, context, name)


def _concerns(facts: list[dict[str, Any]], field: str, wanted: str | None) -> bool:
    return wanted is None or any(fact.get(field) == wanted for fact in facts)


_WALKS: dict[str, Callable[[Context, Wanted, int], Iterator[Found]]] = {
    _PREPARED: _prepared, _DECIDED: _decided, _PLACED: _placed, _HEURISTIC: _heuristic,
}  # fmt: skip


def _common(context: Context, name: Name, state: str, since_ms: int) -> Row:
    owner = context.state.sessions.get(name[0])
    connected = owner is not None and owner.bound is not None
    gone_since = owner.gone_ms if owner is not None else 0
    return {
        "txid": context.txid_of(name), "state": state, "age_ms": max(0, context.now_ms - since_ms),
        "owner_connected": connected, "owner_gone_ms": 0 if connected else max(0, context.now_ms - gone_since),
    }  # fmt: skip


def _prepared_row(context: Context, transaction: Transaction) -> Row:
    meta, name = transaction.meta, transaction.name
    row = _common(context, name, transaction.state.value, meta["prepared_ms"])
    row.update({key: meta[key] for key in ("kind", "resource", "uuid", "deadline_ms", "prepared_ms", "client")})
    if meta["kind"] == TransactionKind.HALF.value:
        row["group"], row["checks"] = meta["resource"], transaction.checks
    row.update({key: meta[key] for key in ("table", "xid", *_OVER_HOMES) if key in meta})
    if meta["kind"] == TransactionKind.SPARK.value:
        row.update(query=meta["resource"], **{key: meta[key] for key in ("epoch", "batch", "task", "attempt")})
    if "offsets" in meta:
        row["offsets"] = _offset_rows(context, meta["offsets"])
    if transaction.is_committing:
        row["is_decided"] = True
    row["parts"] = [_part_row(context, part.topic_id, part) for part in transaction.parts]
    return row


def _offset_rows(context: Context, offsets: list[Any]) -> list[Row]:
    """The consumer groups' offsets that it saves. Until it is resolved, their partitions are not handed over."""
    return [
        {"group": group, "topic": _topic_name(context, topic_id), "partition": partition, "offset": offset}
        for group, rows in offsets
        for topic_id, partition, offset, _ in rows
    ]


def _part_row(context: Context, topic_id: int, part: PreparedPart) -> Row:
    return {
        "topic": _topic_name(context, topic_id), "partition": part.partition, "count": part.count,
        "bytes": len(part.batch),
    }  # fmt: skip


def _topic_name(context: Context, topic_id: int) -> str | None:
    topic = context.state.topics.with_id(topic_id)
    return topic.config.name if topic else None


def _decided_row(context: Context, decided: XADecision) -> Row:
    meta = decided.meta
    row = _common(context, decided.name, "decided", meta["decided_ms"])
    first = decided.branches[0] if decided.branches else {"resource": "", "uuid": ""}
    row.update(
        kind=decided.kind.value, resource=first["resource"], uuid=first["uuid"], deadline_ms=0,
        prepared_ms=meta["decided_ms"], decided_ms=meta["decided_ms"], client=meta["client"],
        branches=decided.branches, is_held=bool(decided.barrier.places) and not decided.barrier.is_ended,
        heuristics=_facts(context, decided.name), parts=placed_rows(context, decided.parts),
    )  # fmt: skip
    if "offsets" in meta:
        row["offsets"] = _offset_rows(context, meta["offsets"])
    if decided.homes:
        row["homes"] = [{"txid": txid, "complete": is_complete} for txid, is_complete in decided.homes.items()]
    if not decided.is_placed:
        row["is_placed"] = False
    return row


def placed_rows(context: Context, parts: CommittedParts) -> list[Row]:
    """Where the messages of a transaction were placed."""
    return [
        {"topic": _topic_name(context, topic_id), "partition": partition, "offset": offset, "count": count}
        for topic_id, partition, offset, count in parts
    ]


def _facts(context: Context, name: Name) -> list[Row]:
    """The heuristic outcomes of a transaction; where its messages are is told of the row."""
    known = context.state.decisions.heuristics.get(name, ())
    return [{field: value for field, value in fact.items() if field != "parts"} for fact in known]


def _placed_row(context: Context, part: BranchPart) -> Row:
    since_ms = part.placed_ms or context.started_ms
    row = _common(context, part.name, _PLACED, since_ms)
    row.update(
        kind=TransactionKind.BRANCH.value, resource=home_word(part.of), uuid="", deadline_ms=0, prepared_ms=since_ms,
        client="", parts=[], of=part.of, is_held=part.is_held, heuristics=_facts(context, part.name),
    )  # fmt: skip
    return row


def _heuristic_row(context: Context, name: Name) -> Row:
    facts = context.state.decisions.heuristics[name]
    first = facts[0]
    row = _common(context, name, "heuristic", first["time_ms"])
    row.update(
        kind=first["kind"], resource=first["resource"], uuid=first["uuid"], outcome=first["outcome"],
        deadline_ms=0, prepared_ms=first["time_ms"], client="", heuristics=_facts(context, name),
        parts=max((fact.get("parts", []) for fact in facts), key=len),
    )  # fmt: skip
    if "xid" in first:
        row["xid"] = first["xid"]
    return row


def parts(context: Context, client: ClientConnection, request: Request) -> None:
    """Answer the parts after the first ``after`` ones, as they stand in a body: one at least, as many as fit 1 MiB."""
    _, arguments, extensions, _body, opaque = request
    txid, session = locate(context, arguments[0])
    refuse_others(context, client, (session.number, txid.counter))
    transaction = context.state.transactions.get((session.number, txid.counter))
    if transaction is None or transaction.state is not TransactionState.PREPARED:
        raise UnknownTransactionError(f"transaction {txid} is not prepared here")
    found, size = list[bytes](), 0
    for part in transaction.parts[int((extensions or {}).get(b"after", 0)) :]:
        topic = context.state.topics.with_id(part.topic_id)
        name = topic.config.name if topic else f"deleted-{part.topic_id}"
        if not is_owner(client, session):
            require(context, client, READ, TOPIC, name)
        piece = b"".join(encode_part(name, part.partition, part.batch))
        if found and size + len(piece) > PARTS_SIZE_BYTES:
            break
        found.append(piece)
        size += len(piece)
    context.answer_from_state(client, opaque, Records(b"".join(found)))
