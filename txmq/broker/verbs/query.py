"""The verb ``query``: batches that many writers prepared in parts and one driver decides, each exactly once.

Theory of operation. Tasks of a query (Spark's, on any machine) prepare transactions of kind ``spark``: durable,
invisible, each under the names of its query, epoch, batch, task and attempt. Of a task that ran twice there are two
sets of them. The driver's one request ``query commit`` names the winners: one synced record places all their messages,
notes the batch as committed, with what the driver says of its rows (``digest``), and rolls back what else was prepared
for it. So

    * a repeat of the same batch finds that it is committed, after any crash, and of which rows;
    * ``query open`` with a later epoch fences former incarnations of the driver, and rolls back what they prepared;
    * a driver that dies in between leaves prepared transactions, listed by ``recover`` under their query.

*With a registry* that draws the epochs of drivers, and fixes one home of the cluster for each query, its anchor. A
query is in the state of its anchor alone, which decides its batches. The first ``query open`` of a name asks the
registry, which fixes the home that was asked. From then on every other home refuses, and names the anchor. The opening
of a query that is known here asks nothing. ``query delete`` releases the anchor (``anchors``), so that no home opens a
query whose batches another one still knows. A broker that is alone asks nobody.

Invariants:
    * a winner is prepared, of this query, epoch and batch, and of one attempt a task; else nothing happens;
    * messages of a batch become visible together (one barrier for all winners, if a barrier holds any of them back);
    * only ``query commit``, or an operator, commits a transaction of kind ``spark``;
    * only ``query open`` makes an anchor.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from txmq.broker.client_connection import ClientConnection
from txmq.broker.cluster.registry_asks import DrawQueryEpoch, Result, as_answer
from txmq.broker.context import Context
from txmq.broker.state.spark_queries import Query
from txmq.broker.state.transaction import Transaction, TransactionState, group_key
from txmq.broker.verbs import appending
from txmq.broker.verbs.access.audit_log import audit
from txmq.broker.verbs.access.authorizer import GROUP, SETTLE, require_any, sees
from txmq.broker.verbs.access.fair_share import QUERY_SHARE, note_made, refuse_over_half
from txmq.broker.verbs.anchors import Then, find_anchor, release_anchor
from txmq.broker.verbs.prepare_commit import roll_back
from txmq.broker.verbs.transaction_checks import locate
from txmq.errors import (
    BadRequestError,
    BrokerError,
    FencedError,
    InvalidNameError,
    NotOwnerError,
    OverloadedError,
    TooLargeError,
    TransactionConflictError,
    TxmqError,
)
from txmq.model import TransactionKind, is_valid_name
from txmq.protocol.requests import Request
from txmq.redo import entries

Given = dict[bytes, bytes]
ANY_QUERY = "*"
EPOCH_MAX = (1 << 62) - 1
DIGEST_LENGTH_MAX = 64


class Asked(NamedTuple):
    """A request, taken apart."""

    context: Context
    client: ClientConnection
    opaque: bytes
    name: str
    given: Given
    body: bytearray

    def answer(self, answer: dict[str, Any], *, is_new: bool) -> None:
        """Answer once all that was journaled, now or before, is durable."""
        text = json.dumps(answer).encode()
        if is_new:
            self.context.answer_when_durable(self.client, self.opaque, text)
        else:
            self.context.answer_from_state(self.client, self.opaque, text)


def query(context: Context, client: ClientConnection, request: Request) -> None:
    """Carry out one action."""
    _, arguments, extensions, body, opaque = request
    action, name = arguments[0].decode(), arguments[1].decode()
    carry_out = _ACTIONS.get(action)
    if carry_out is None:
        raise BadRequestError(f"query {action[:40]}: expected one of {', '.join(_ACTIONS)}")
    if name != ANY_QUERY and not is_valid_name(name):
        raise InvalidNameError(f"query {name[:80]!r}: 1 to 200 of A-Z a-z 0-9 . _ -")
    carry_out(Asked(context, client, opaque, name, extensions or {}, body or bytearray()))


def _when_answered(asked: Asked, go: Callable[[Asked, int], None]) -> Callable[[int | BrokerError], None]:
    """What carries a request out when the registry has answered."""

    def answered(value: int | BrokerError) -> None:
        if asked.client.gone:
            return
        try:
            if isinstance(value, BrokerError):
                raise value
            go(asked, value)
        except BrokerError as error:
            asked.context.counters.errors += 1
            asked.context.answer_from_state(asked.client, asked.opaque, error.with_traceback(None))

    return answered


def _epoch(asked: Asked) -> None:
    """An incarnation of a driver begins: draw its number."""
    if asked.name != ANY_QUERY:
        raise BadRequestError("query epoch takes *: a number is of no query before it opens one")
    require_any(asked.context, asked.client, SETTLE, GROUP)
    if asked.context.cluster is None:
        _drawn(asked, asked.context.state.queries.last_epoch + 1)
    else:
        _draw_epoch(asked.context, _when_answered(asked, _drawn))


def _drawn(asked: Asked, epoch: int) -> None:
    asked.context.group.add_entry(entries.json_entry(entries.EPOCH_DRAWN, {"epoch": epoch}))
    asked.context.state.queries.drawn(epoch)
    asked.answer({"epoch": epoch}, is_new=True)


def _open(asked: Asked) -> None:
    """An incarnation of a driver writes from now on, or does already: tell what is committed."""
    context, name = asked.context, asked.name
    if context.cluster is None or name in context.state.queries.named:
        _open_here(asked)
    else:
        _refuse_open(asked, None)
        find_anchor(context, "query", name, _when_answered(asked, _open_at))


def _open_at(asked: Asked, anchor: int) -> None:
    _refuse_elsewhere(asked.context, asked.name, anchor)
    _open_here(asked)


def _open_here(asked: Asked) -> None:
    context, name, epoch = asked.context, asked.name, _number_of(asked.given, b"epoch")
    queries = context.state.queries
    known = queries.named.get(name)
    if known is not None and epoch < known.epoch:
        raise known.fenced(epoch)
    if known is not None and epoch == known.epoch:
        asked.answer(_opened(asked, known), is_new=False)
        return
    _refuse_open(asked, known)
    if known is not None:
        _opened(asked, known)  # may refuse
    fields = {"query": name, "epoch": epoch, "time_ms": context.now_ms}
    context.group.add_entry(entries.json_entry(entries.QUERY_OPENED, fields))
    opened = queries.open(name, epoch, context.now_ms)
    if known is None:
        note_made(context, asked.client, QUERY_SHARE, name)
    _roll_back_all(context, prepared_of(context, name))
    asked.answer(_opened(asked, opened), is_new=True)


def _opened(asked: Asked, known: Query) -> dict[str, Any]:
    """The answer to ``open``; with ``batch=`` it says whether that one is committed, and of which rows."""
    told, batch = _described(known), asked.given.get(b"batch")
    if batch is not None:
        told |= {"committed": known.has(int(batch)), "digest": known.digests.get(int(batch))}
    return told


def _refuse_open(asked: Asked, known: Query | None) -> None:
    context, epoch = asked.context, _number_of(asked.given, b"epoch")
    # With a registry, another home may have drawn it.
    epoch_max = context.state.queries.last_epoch if context.cluster is None else EPOCH_MAX
    if asked.name == ANY_QUERY or not 0 < epoch <= epoch_max:
        raise BadRequestError("query open needs a query's name, and epoch=<number drawn with query epoch>")
    if known is None:
        refuse_over_half(context, asked.client, QUERY_SHARE, context.settings.queries_max, "queries_max")
    if known is None and len(context.state.queries.named) >= context.settings.queries_max:
        raise OverloadedError(
            f"queries_max {context.settings.queries_max} queries are kept: delete those that never write again"
        )


def _commit(asked: Asked) -> None:
    """Decide a batch: the winners' messages become visible, everything else prepared for it is rolled back."""
    context, name, given = asked.context, asked.name, asked.given
    epoch, batch = _number_of(given, b"epoch"), _number_of(given, b"batch")
    known = context.state.queries.at_epoch(name, epoch)
    told = {"query": name, "epoch": epoch, "batch": batch}
    digest = _digest(given)
    if known.has(batch):
        asked.answer({**told, "already_committed": True}, is_new=False)
        return
    winners = [_winner(context, known, batch, txid) for txid in _lines(asked.body)]
    _refuse_twins(winners)
    _refuse_too_many(context, winners)
    meta = {"query": name, "epoch": epoch, "batch": batch, "digest": digest, "time_ms": context.now_ms}
    appending.commit_batch(context, winners, meta)
    _roll_back_all(context, [t for t in prepared_of(context, name) if t.meta["batch"] <= batch])
    asked.answer({**told, "already_committed": False}, is_new=True)


def _abort(asked: Asked) -> None:
    """Roll back what is prepared: of a query, of an epoch of any query, of a batch."""
    name, given = asked.name, asked.given
    if name == ANY_QUERY and b"epoch" not in given:
        raise BadRequestError("query abort * needs epoch=")
    count = _roll_back_all(asked.context, prepared_of(asked.context, name, given))
    if count:
        audit(asked.context, asked.client, "query aborted", query=name, transactions=count)
    asked.answer({"query": name, "rolled_back": count}, is_new=count > 0)


def _list(asked: Asked) -> None:
    """Every query, or one, and what is prepared for it."""
    context, name, rows = asked.context, asked.name, []
    for known in context.state.queries.named.values():
        if name in (ANY_QUERY, known.name) and sees(context, asked.client, GROUP, known.name):
            prepared = prepared_of(context, known.name)
            size = sum(t.size_bytes for t in prepared)
            rows.append({**_described(known), "prepared": len(prepared), "prepared_bytes": size})
    asked.answer({"queries": rows}, is_new=False)


def _delete(asked: Asked) -> None:
    """Forget a query, and roll back what is prepared for it."""
    context, name, given = asked.context, asked.name, asked.given
    queries = context.state.queries
    known = queries.at_epoch(name, _number_of(given, b"epoch")) if b"epoch" in given else queries.known(name)
    context.group.add_entry(entries.json_entry(entries.QUERY_DELETED, {"query": name}))
    queries.delete(name)
    context.state.principals.unmade(QUERY_SHARE, name)
    count = _roll_back_all(context, prepared_of(context, name))
    audit(context, asked.client, "query deleted", query=name, transactions=count)
    release_anchor(context, "query", name)
    asked.answer(_described(known), is_new=True)


_ACTIONS: dict[str, Callable[[Asked], None]] = {
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


def _number_of(given: Given, word: bytes) -> int:
    number = given.get(word)
    if number is None:
        raise BadRequestError(f"{word.decode()}=<number> is missing")
    return int(number)


def _digest(given: Given) -> str | None:
    text = given.get(b"digest")
    if text is not None and len(text) > DIGEST_LENGTH_MAX:
        raise BadRequestError(f"digest= has {len(text)} characters: at most {DIGEST_LENGTH_MAX}")
    return None if text is None else text.decode()


def _described(known: Query) -> dict[str, Any]:
    return {"query": known.name, "epoch": known.epoch, "batch": known.newest, "time_ms": known.time_ms}


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
    """The decision must fit a journal record with what else is in the group."""
    size = entries.batch_committed_size(len(winners), sum(len(transaction.parts) for transaction in winners))
    if size > context.settings.request_size_bytes_max:
        raise TooLargeError(f"the decision about {len(winners)} transactions takes {size} bytes: write larger parts")


def _draw_epoch(context: Context, then: Then) -> None:
    """Draw an epoch from the registry."""
    above = context.state.queries.last_epoch

    def answered(result: Result) -> None:
        then(as_answer(result) if isinstance(result, TxmqError) else result.value)

    context.joined_cluster().ask(lambda number: DrawQueryEpoch(number, above), answered)


def _refuse_elsewhere(context: Context, name: str, anchor: int) -> None:
    """Refuse to open a query here whose home is another one.

    Raises:
        NotOwnerError: names the home, and its leader.
    """
    if anchor != context.state.home:
        leader = context.joined_cluster().leader(anchor) or "-"
        raise NotOwnerError(f"leader={leader} home={anchor:016x} is the anchor of query {name}")
