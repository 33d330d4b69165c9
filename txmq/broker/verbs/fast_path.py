"""The fast path of ``commit``, ``prepare``, ``decide`` and ``complete``: look-ups instead of the table of transitions.

It serves the commit of a local transaction that came whole, with and without branches at other homes; the prepare of a
last resource's transaction and of a branch, which came whole; the commit of a prepared transaction; the decision of an
XA transaction that came whole, and the completion of its branches; each over the connection of its own session. Such a
request is checked and placed like any other, in ``appending``. Every other request goes on to ``prepare_commit`` or
``decide``, with nothing changed. docs/benchmarks.md has the figures that pay for it.

Invariant: state, group and answer are those of these two, refusals included (tests compare them).
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, NamedTuple

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.broker.state.session import BrokerSession
from txmq.broker.state.transaction import TransactionState
from txmq.broker.verbs import appending, ordered_commits, prepare_commit
from txmq.broker.verbs import decide as decide_verbs
from txmq.broker.verbs.appending import check_parts
from txmq.broker.verbs.transaction_checks import (
    branches_at_homes,
    branches_in_databases,
    decided_elsewhere,
    is_over_own,
    is_over_own_bytes,
)
from txmq.model import TransactionKind, is_valid_name, is_valid_table
from txmq.protocol.requests import Request
from txmq.protocol.transaction_bodies import branches_json, split_parts
from txmq.redo.entries import json_body
from txmq.xid import home_word

_COUNTER_SIZE_MAX, _FLOOR_SIZE_MAX = 16, 18  # digits that surely fit 64 bits
_LAST_RESOURCE, _BRANCH = TransactionKind.LAST_RESOURCE.value, TransactionKind.BRANCH.value
_BRANCH_WORD = _BRANCH.encode()
_STATED = {
    _LAST_RESOURCE.encode(): {b"resource", b"uuid", b"table", b"deadline"},
    _BRANCH_WORD: {b"of", b"deadline"},
}
_HOMES, _BRANCHES, _UUID = {b"homes"}, {b"branches"}, {b"uuid"}
_NOTHING: dict[bytes, bytes] = {}
_PREPARED = TransactionState.PREPARED
_DECIDED_BY_ITS_DRIVER = TransactionKind.SPARK.value


def commit(context: Context, client: ClientConnection, request: Request) -> None:
    """The verb ``commit``: of a local transaction whose messages came with it, or of a prepared one in its turn."""
    _, arguments, extensions, body, opaque = request
    session = client.session
    given = extensions or _NOTHING
    floor_text, is_delayable = given.get(b"floor", b"0"), b"delayable" in given
    is_plain = len(given) == (b"floor" in given) + is_delayable and len(floor_text) <= _FLOOR_SIZE_MAX
    if session is not None and not session.is_ended and is_plain:
        counter = _counter_of(client, arguments[0])
        if body:
            if _is_new(context, session, counter, len(body)):
                parts, keys = check_parts(context, client, split_parts(body))
                if not context.state.order.in_common or not ordered_commits.must_queue(context, None, parts, keys):
                    lines = appending.commit(context, session.number, counter, int(floor_text), None, parts)
                    context.answer_as_configured(client, opaque, lines)
                    return
        else:
            transaction = context.state.transactions.get((session.number, counter))
            if (
                transaction is not None
                and transaction.state is _PREPARED
                and transaction.meta["kind"] != _DECIDED_BY_ITS_DRIVER
            ):
                ordered_commits.commit_in_order(context, transaction, client, opaque, int(floor_text), is_delayable)
                return
    elif (
        session is not None and body and not session.is_ended and _decide_over_homes(context, client, session, request)
    ):
        return
    prepare_commit.commit(context, client, request)


def _decide_over_homes(context: Context, client: ClientConnection, session: BrokerSession, request: Request) -> bool:
    """Decide a local transaction with branches at other homes. False: nothing was done."""
    _, arguments, extensions, body, opaque = request
    if extensions is None or body is None or not _are(extensions, _HOMES):
        return False
    counter, floor_text = _counter_of(client, arguments[0]), extensions.get(b"floor", b"0")
    if not _is_new(context, session, counter, len(body)):
        return False
    homes = branches_at_homes(context, extensions)
    parts, keys = check_parts(context, client, split_parts(body))
    if ordered_commits.must_queue(context, None, parts, keys):
        return False
    meta = {"decided_ms": context.now_ms, "client": client.name, "branches": [], **homes}
    lines = appending.decide(context, (session.number, counter), int(floor_text), None, parts, meta)
    context.answer_when_durable(client, opaque, lines)
    return True


def prepare(context: Context, client: ClientConnection, request: Request) -> None:
    """The verb ``prepare``: of a last resource or of a branch, whose messages came with it."""
    _, arguments, extensions, body, opaque = request
    session, kind = client.session, arguments[1]
    words = _STATED.get(kind)
    if (
        session is None
        or session.is_ended
        or not body
        or extensions is None
        or words is None
        or not _are(extensions, words)
        or 0 < int(extensions[b"deadline"]) <= context.now_ms
    ):
        prepare_commit.prepare(context, client, request)
        return
    counter, of, who = _counter_of(client, arguments[0]), "", None
    if _is_new(context, session, counter, len(body)):
        if kind == _BRANCH_WORD:
            of = decided_elsewhere(context, extensions)["of"]
            who = _home(home_word(of), client.name)
        else:
            who = _resource(extensions[b"resource"], extensions[b"uuid"], extensions[b"table"], client.name)
    if who is None:
        prepare_commit.prepare(context, client, request)
        return
    parts, keys = check_parts(context, client, split_parts(body))
    deadline_ms, now_ms = int(extensions[b"deadline"]), context.now_ms
    meta: dict[str, Any] = {**who.fields, "deadline_ms": deadline_ms, "prepared_ms": now_ms, "client": client.name}
    # As json.dumps writes it, in a quarter of its time: only the numbers are new each time.
    text = f'{who.head}, "deadline_ms": {deadline_ms}, "prepared_ms": {now_ms}, "client": {who.client_json}'
    if of:
        meta["of"] = of
        text += f', "of": "{of}"'
    meta["keys"] = keys
    text += f', "keys": {_keys_json(keys)}}}'
    prepared = appending.prepare(context, session.number, counter, parts, meta, text.encode())
    if of:
        prepare_commit.branch_prepared(context, prepared)
    context.answer_when_durable(client, opaque)


def decide(context: Context, client: ClientConnection, request: Request) -> None:
    """The verb ``decide``: messages came with it, and nothing of the transaction came before."""
    _, arguments, extensions, body, opaque = request
    session = client.session
    if session is None or session.is_ended or not body or not extensions or not _are(extensions, _BRANCHES):
        decide_verbs.decide(context, client, request)
        return
    counter, floor_text = _counter_of(client, arguments[0]), extensions.get(b"floor", b"0")
    if _is_new(context, session, counter, len(body)):
        branches, start = branches_in_databases(context, client, body, extensions)
        parts, keys = check_parts(context, client, split_parts(memoryview(body)[start:]))
        if not context.state.order.in_common or not ordered_commits.must_queue(context, None, parts, keys):
            now_ms = context.now_ms
            meta = {"decided_ms": now_ms, "client": client.name, "branches": branches}
            head = f'{{"decided_ms": {now_ms}, "client": {_client_json(client.name)}, "branches": '
            text = f"{head}{branches_json(branches)}}}".encode()
            name = session.number, counter
            lines = appending.decide(context, name, int(floor_text), None, parts, meta, text)
            context.answer_when_durable(client, opaque, lines)
            return
    decide_verbs.decide(context, client, request)


def complete(context: Context, client: ClientConnection, request: Request) -> None:
    """The verb ``complete``: a branch in a database has committed, as its owner says."""
    _, arguments, extensions, _, opaque = request
    session = client.session
    if session is not None and not session.is_ended and extensions is not None and extensions.keys() == _UUID:
        name = session.number, _counter_of(client, arguments[0])
        decided = context.state.decisions.incomplete.get(name)
        if decided is not None and name not in context.state.transactions:
            decide_verbs.complete_branch(context, client, decided, extensions, opaque)
            return
    decide_verbs.complete(context, client, request)


def _are(extensions: dict[bytes, bytes], words: set[bytes]) -> bool:
    """Whether a request has these words, and perhaps a floor, and no others."""
    floor = extensions.get(b"floor")
    if floor is None:
        return extensions.keys() == words
    return len(floor) <= _FLOOR_SIZE_MAX and len(extensions) == len(words) + 1 and extensions.keys() >= words


@lru_cache(maxsize=1024)
def _client_json(client: str) -> str:
    return json_body(client).decode()


def _is_new(context: Context, session: BrokerSession, counter: int, size: int) -> bool:
    """Whether a transaction was never seen, and no limit is near."""
    settings, state, key = context.settings, context.state, (session.number, counter)
    outcomes, transactions, incomplete = session.outcomes, state.transactions, state.decisions.incomplete
    return not (
        counter <= session.floor
        or counter in outcomes
        or counter in session.fences
        or key in transactions
        or key in incomplete
        or context.disk_full
        or context.stopping
        or len(outcomes) > settings.outcomes_kept
        or state.unsettled >= settings.transactions_open_max
        or size > settings.transaction_size_bytes_max
        or size + state.payload_bytes > settings.prepared_bytes_max
        or (session.user and (is_over_own(context, session) or is_over_own_bytes(context, session, size)))
    )


def _counter_of(client: ClientConnection, txid: bytes) -> int:
    """The counter of one of this connection's own transactions; 0 if the id is anything else."""
    head = client.txid_head
    text = txid[len(head) :]
    if not txid.startswith(head) or not 0 < len(text) <= _COUNTER_SIZE_MAX:
        return 0
    try:
        counter = int(text, 16)
    except ValueError:
        return 0
    return counter if b"%x" % counter == text else 0  # the one form of an id


class _Who(NamedTuple):
    """The constant part of one client's prepares for a resource or a home.

    Attributes:
        fields: the first of the meta; ``head`` is their JSON without its end.
    """

    fields: dict[str, str]
    head: str
    client_json: str


@lru_cache(maxsize=1024)
def _resource(resource: bytes, uuid: bytes, table: bytes, client: str) -> _Who | None:
    name, number, marker_table = resource.decode(), uuid.decode(), table.decode()
    if not is_valid_name(name) or len(number) != 32 or not is_valid_table(marker_table):
        return None
    return _who({"kind": _LAST_RESOURCE, "resource": name, "uuid": number, "table": marker_table}, client)


@lru_cache(maxsize=1024)
def _home(home: str, client: str) -> _Who:
    return _who({"kind": _BRANCH, "resource": home, "uuid": ""}, client)


def _who(fields: dict[str, str], client: str) -> _Who:
    return _Who(fields, json.dumps(fields)[:-1], json.dumps(client))


def _keys_json(keys: list[appending.Keys]) -> str:
    return str(keys).replace("'", '"')  # lists of integers, and "*"
