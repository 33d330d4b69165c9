"""The verb ``query``: batches that many writers prepared in parts and one driver decides, each exactly once.

Theory of operation. Tasks of a query (Spark's, on any machine) prepare transactions of kind ``spark``: durable,
invisible, each under the names of its query, epoch, batch, task and attempt. Of a task that ran twice there are two
sets of them. The driver's one request ``query commit`` names the winners: one synced record places all their messages,
moves the query's newest batch, and rolls back what else was prepared for it. So

    * a repeat of the same batch finds that it is committed, after any crash;
    * ``query open`` with a later epoch fences former incarnations of the driver, and rolls back what they prepared;
    * a driver that dies in between leaves prepared transactions, listed by ``recover`` under their query.

Invariants:
    * a winner is prepared, of this query, epoch and batch, and of one attempt a task; else nothing happens;
    * messages of a batch become visible together (one barrier for all winners, if a barrier holds any of them back);
    * only ``query commit``, or an operator, commits a transaction of kind ``spark``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.broker.state.spark_queries import Query
from txmq.broker.state.transaction import Transaction, TransactionState, group_key
from txmq.broker.verbs import placing
from txmq.broker.verbs.prepare_commit import roll_back
from txmq.broker.verbs.transaction_checks import locate
from txmq.errors import (
    BadRequestError,
    FencedError,
    InvalidNameError,
    OverloadedError,
    TooLargeError,
    TransactionConflictError,
)
from txmq.model import TransactionKind, is_valid_name
from txmq.protocol.requests import Request
from txmq.redo import entries

Given = dict[bytes, bytes]
ANY_QUERY = "*"


def query(context: Context, client: ClientConnection, request: Request) -> None:
    """Carry out one action."""
    _, arguments, extensions, body, opaque = request
    action, name = arguments[0].decode(), arguments[1].decode()
    carry_out = _ACTIONS.get(action)
    if carry_out is None:
        raise BadRequestError(f"query {action[:40]}: expected one of {', '.join(_ACTIONS)}")
    if name != ANY_QUERY and not is_valid_name(name):
        raise InvalidNameError(f"query {name[:80]!r}: 1 to 200 of A-Z a-z 0-9 . _ -")
    answer, is_new = carry_out(context, name, extensions or {}, body or bytearray())
    text = json.dumps(answer).encode()
    if is_new:
        context.answer_when_durable(client, opaque, text)
    else:
        context.answer_from_state(client, opaque, text)


def _epoch(context: Context, name: str, _given: Given, _body: bytearray) -> tuple[dict[str, Any], bool]:
    """An incarnation of a driver begins: draw its number."""
    if name != ANY_QUERY:
        raise BadRequestError("query epoch takes *: a number is of no query before it opens one")
    queries = context.state.queries
    epoch = queries.last_epoch + 1
    context.group.add_entry(entries.json_entry(entries.EPOCH_DRAWN, {"epoch": epoch}))
    queries.drawn(epoch)
    return {"epoch": epoch}, True


def _open(context: Context, name: str, given: Given, _body: bytearray) -> tuple[dict[str, Any], bool]:
    """An incarnation of a driver writes from now on, or does already: tell the newest committed batch."""
    epoch = _stated(given, b"epoch")
    queries = context.state.queries
    known = queries.named.get(name)
    if known is not None and epoch < known.epoch:
        raise known.fenced(epoch)
    if known is not None and epoch == known.epoch:
        return _described(known), False
    if name == ANY_QUERY or not 0 < epoch <= queries.last_epoch:
        raise BadRequestError("query open needs a query's name, and epoch=<number drawn with query epoch>")
    if known is None and len(queries.named) >= context.settings.queries_max:
        raise OverloadedError(
            f"queries_max {context.settings.queries_max} queries are kept: delete those that never write again"
        )
    fields = {"query": name, "epoch": epoch, "time_ms": context.now_ms}
    context.group.add_entry(entries.json_entry(entries.QUERY_OPENED, fields))
    opened = queries.open(name, epoch, context.now_ms)
    _roll_back_all(context, prepared_of(context, name))
    return _described(opened), True


def _commit(context: Context, name: str, given: Given, body: bytearray) -> tuple[dict[str, Any], bool]:
    """Decide a batch: the winners' messages become visible, everything else prepared for it is rolled back."""
    epoch, batch = _stated(given, b"epoch"), _stated(given, b"batch")
    known = context.state.queries.at_epoch(name, epoch)
    told = {"query": name, "epoch": epoch, "batch": batch}
    if batch <= known.batch:
        return {**told, "already_committed": True}, False
    winners = [_winner(context, known, batch, txid) for txid in _lines(body)]
    _refuse_twins(winners)
    _refuse_too_many(context, winners)
    meta = {"query": name, "epoch": epoch, "batch": batch, "time_ms": context.now_ms}
    placing.commit_batch(context, winners, meta)
    _roll_back_all(context, [t for t in prepared_of(context, name) if t.meta["batch"] <= batch])
    return {**told, "already_committed": False}, True


def _abort(context: Context, name: str, given: Given, _body: bytearray) -> tuple[dict[str, Any], bool]:
    """Roll back what is prepared: of a query, of an epoch of any query, of a batch."""
    if name == ANY_QUERY and b"epoch" not in given:
        raise BadRequestError("query abort * needs epoch=")
    count = _roll_back_all(context, prepared_of(context, name, given))
    return {"query": name, "rolled_back": count}, count > 0


def _list(context: Context, name: str, _given: Given, _body: bytearray) -> tuple[dict[str, Any], bool]:
    """Every query, or one, and what is prepared for it."""
    rows = []
    for known in context.state.queries.named.values():
        if name in (ANY_QUERY, known.name):
            prepared = prepared_of(context, known.name)
            size = sum(t.size_bytes for t in prepared)
            rows.append({**_described(known), "prepared": len(prepared), "prepared_bytes": size})
    return {"queries": rows}, False


def _delete(context: Context, name: str, given: Given, _body: bytearray) -> tuple[dict[str, Any], bool]:
    """Forget a query, and roll back what is prepared for it."""
    queries = context.state.queries
    known = queries.at_epoch(name, _stated(given, b"epoch")) if b"epoch" in given else queries.known(name)
    context.group.add_entry(entries.json_entry(entries.QUERY_DELETED, {"query": name}))
    queries.delete(name)
    _roll_back_all(context, prepared_of(context, name))
    return _described(known), True


_Action = Callable[[Context, str, Given, bytearray], tuple[dict[str, Any], bool]]
_ACTIONS: dict[str, _Action] = {
    "epoch": _epoch, "open": _open, "commit": _commit, "abort": _abort, "list": _list, "delete": _delete,
}  # fmt: skip


# --- what the actions have in common ---------------------------------------------------------------------


def prepared_of(context: Context, name: str, given: Given | None = None) -> list[Transaction]:
    """Transactions of kind ``spark`` that are prepared: of a query, of an epoch, of a batch."""
    wanted = {word.decode(): int((given or {})[word]) for word in (b"epoch", b"batch") if word in (given or {})}
    key = None if name == ANY_QUERY else group_key(TransactionKind.SPARK.value, name)
    return [
        transaction
        for _, transaction in context.state.prepared.behind(0, key)
        if is_spark(transaction) and all(transaction.meta[word] == number for word, number in wanted.items())
    ]


def is_spark(transaction: Transaction) -> bool:
    """Whether it is prepared, and a driver decides it."""
    return transaction.state is TransactionState.PREPARED and transaction.meta["kind"] == TransactionKind.SPARK.value


def _stated(given: Given, word: bytes) -> int:
    number = given.get(word)
    if number is None:
        raise BadRequestError(f"{word.decode()}=<number> is missing")
    return int(number)


def _described(known: Query) -> dict[str, Any]:
    return {"query": known.name, "epoch": known.epoch, "batch": known.committed_batch, "time_ms": known.time_ms}


def _roll_back_all(context: Context, doomed: list[Transaction]) -> int:
    for transaction in doomed:
        roll_back(context, transaction.session, transaction.counter, 0)
    return len(doomed)


# --- winners ---------------------------------------------------------------------------------------------------------


def _lines(body: bytearray) -> list[bytes]:
    if body and not body.endswith(b"\n"):
        raise BadRequestError("the body of query commit holds txids, each with a line end")
    return bytes(body).split(b"\n")[:-1]


def _winner(context: Context, known: Query, batch: int, text: bytes) -> Transaction:
    try:
        txid, session = locate(context, text)
    except FencedError as error:
        raise TransactionConflictError(str(error)) from None
    transaction = context.state.transactions.get((session.number, txid.counter))
    if transaction is None or not is_spark(transaction):
        raise TransactionConflictError(f"transaction {txid} is not prepared for query {known.name} (any more)")
    meta = transaction.meta
    if (meta["resource"], meta["epoch"], meta["batch"]) != (known.name, known.epoch, batch):
        raise TransactionConflictError(
            f"transaction {txid} is of query {meta['resource']}, epoch {meta['epoch']}, batch {meta['batch']}, "
            f"not of {known.name}, {known.epoch}, {batch}"
        )
    return transaction


def _refuse_twins(winners: list[Transaction]) -> None:
    """Two attempts of one task wrote the same rows."""
    attempts: dict[int, int] = {}
    for transaction in winners:
        task, attempt = transaction.meta["task"], transaction.meta["attempt"]
        if attempts.setdefault(task, attempt) != attempt:
            raise TransactionConflictError(f"attempts {attempts[task]} and {attempt} of task {task} cannot both win")
    if len({id(transaction) for transaction in winners}) != len(winners):
        raise TransactionConflictError("a transaction is named twice")


def _refuse_too_many(context: Context, winners: list[Transaction]) -> None:
    """The decision must fit a journal record beside what else is in the group."""
    size = entries.batch_committed_size(len(winners), sum(len(transaction.parts) for transaction in winners))
    if size > context.settings.request_size_bytes_max:
        raise TooLargeError(f"the decision about {len(winners)} transactions takes {size} bytes: write larger parts")
