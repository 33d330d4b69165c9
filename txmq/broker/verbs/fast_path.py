"""Guards in front of ``commit`` and ``prepare``: an ordinary request is known by a few look-ups, without the table.

Ordinary are the commit of a local transaction that came whole, the prepare of a last-resource transaction that came
whole, and the commit of what is prepared, each asked for over the connection of its own session. A guard that lets a
request pass calls what the table's way calls, ``placing``; else it changes nothing and returns False, and the request
goes its way through ``transactions``. docs/benchmarks.md has the figures that pay for them.

Invariant: state, group and answer are what the table's way would have left, refusals included (tests compare them).
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, NamedTuple

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.broker.state.session import BrokerSession
from txmq.broker.state.transaction import TransactionState
from txmq.broker.verbs import placing
from txmq.model import TransactionKind, is_valid_name, is_valid_table
from txmq.protocol.parts import split_parts

Extensions = dict[bytes, bytes] | None
_COUNTER_SIZE_MAX, _FLOOR_SIZE_MAX = 16, 18  # digits that surely fit 64 bits
_KIND = TransactionKind.LAST_RESOURCE.value
_KIND_WORD = _KIND.encode()
_STATED = frozenset({b"resource", b"uuid", b"table", b"deadline"})
_STATED_WITH_FLOOR = _STATED | {b"floor"}
_PREPARED = TransactionState.PREPARED
_DECIDED_BY_ITS_DRIVER = TransactionKind.SPARK.value


def commit_new(
    context: Context,
    client: ClientConnection,
    arguments: list[bytes],
    extensions: Extensions,
    body: bytearray | None,
    opaque: bytes,
) -> bool:
    """Commit a local transaction, if it is an ordinary one.

    Raises:
        BrokerError: the body is malformed, or a part cannot be placed; nothing was changed.
    """
    session = client.session
    if session is None or not body:
        return False
    counter, floor = _counter_of(context, session, arguments[0]), _floor(extensions)
    if floor < 0 or not _is_new(context, session, counter, len(body)):
        return False
    parts, _ = placing.check_parts(context, split_parts(body))
    context.answer_relaxed(client, opaque, placing.commit(context, session.number, counter, floor, None, parts))
    return True


def commit_prepared(
    context: Context,
    client: ClientConnection,
    arguments: list[bytes],
    extensions: Extensions,
    body: bytearray | None,
    opaque: bytes,
) -> bool:
    """Commit this session's own prepared transaction in its turn, if nothing else is asked."""
    session = client.session
    if session is None or body:
        return False
    counter, floor = _counter_of(context, session, arguments[0]), _floor(extensions)
    transaction = context.state.transactions.get((session.number, counter))
    if (
        floor < 0
        or transaction is None
        or transaction.state is not _PREPARED
        or transaction.meta["kind"] == _DECIDED_BY_ITS_DRIVER
    ):
        return False
    placing.commit_in_order(context, transaction, client, opaque, floor)
    return True


def prepare(
    context: Context,
    client: ClientConnection,
    arguments: list[bytes],
    extensions: Extensions,
    body: bytearray | None,
    opaque: bytes,
) -> bool:
    """Prepare a last-resource transaction, if it is an ordinary one.

    Raises:
        BrokerError: the body is malformed, or a part cannot be placed; nothing was changed.
    """
    session = client.session
    if session is None or not body or extensions is None or arguments[1] != _KIND_WORD:
        return False
    if extensions.keys() != _STATED_WITH_FLOOR and extensions.keys() != _STATED:
        return False
    counter, deadline_ms = _counter_of(context, session, arguments[0]), int(extensions[b"deadline"])
    if (
        0 < deadline_ms <= context.now_ms
        or len(extensions.get(b"floor", b"")) > _FLOOR_SIZE_MAX
        or not _is_new(context, session, counter, len(body))
    ):
        return False
    who = _who(extensions[b"resource"], extensions[b"uuid"], extensions[b"table"], client.name)
    if who is None:
        return False
    parts, keys = placing.check_parts(context, split_parts(body))
    now_ms = context.now_ms
    meta: dict[str, Any] = {
        "kind": _KIND, "resource": who.resource, "uuid": who.uuid, "table": who.table, "deadline_ms": deadline_ms,
        "prepared_ms": now_ms, "client": client.name, "keys": keys,
    }  # fmt: skip
    # As json.dumps writes it, in a quarter of its time: only the numbers are new each time.
    text = (
        f'{who.head}, "deadline_ms": {deadline_ms}, "prepared_ms": {now_ms}, "client": {who.client_json}, '
        f'"keys": {_keys_json(keys)}}}'
    )
    placing.prepare(context, session.number, counter, parts, meta, text.encode())
    context.answer_when_forced(client, opaque)
    return True


def _is_new(context: Context, session: BrokerSession, counter: int, size: int) -> bool:
    """Whether a transaction was never seen, and no limit is near."""
    settings, state, key = context.settings, context.state, (session.number, counter)
    return not (
        counter <= session.floor
        or counter in session.outcomes
        or key in state.transactions
        or key in state.decisions.incomplete
        or context.disk_full
        or context.stopping
        or len(session.outcomes) > settings.outcomes_kept
        or state.unsettled >= settings.transactions_open_max
        or size > settings.transaction_size_bytes_max
        or size + state.payload_bytes > settings.prepared_bytes_max
    )


def _floor(extensions: Extensions) -> int:
    """The floor a request states, 0 if none; -1 if it states anything else."""
    if extensions is None:
        return 0
    text = extensions.get(b"floor", b"") if len(extensions) == 1 else b""
    return int(text) if 0 < len(text) <= _FLOOR_SIZE_MAX else -1


def _counter_of(context: Context, session: BrokerSession, txid: bytes) -> int:
    """The counter of one of this connection's own transactions; 0 if the id is anything else."""
    if context.state.sessions.get(session.number) is not session:
        return 0
    head = _txid_head(context.identity.cluster, context.identity.node, session.number)
    text = txid[len(head) :]
    if not txid.startswith(head) or not 0 < len(text) <= _COUNTER_SIZE_MAX:
        return 0
    try:
        counter = int(text, 16)
    except ValueError:
        return 0
    return counter if b"%x" % counter == text else 0  # the one form of an id


@lru_cache(maxsize=1024)
def _txid_head(cluster: int, home: int, session: int) -> bytes:
    return b"%016x-%016x-%x-" % (cluster, home, session)


class _Who(NamedTuple):
    """What all prepares of one resource by one client have in common; ``head`` and ``client_json`` are for the JSON."""

    resource: str
    uuid: str
    table: str
    head: str
    client_json: str


@lru_cache(maxsize=1024)
def _who(resource: bytes, uuid: bytes, table: bytes, client: str) -> _Who | None:
    name, number, marker_table = resource.decode(), uuid.decode(), table.decode()
    if not is_valid_name(name) or len(number) != 32 or not is_valid_table(marker_table):
        return None
    head = json.dumps({"kind": _KIND, "resource": name, "uuid": number, "table": marker_table})[:-1]
    return _Who(name, number, marker_table, head, json.dumps(client))


def _keys_json(keys: list[placing.Keys]) -> str:
    return str(keys).replace("'", '"')  # lists of integers, and "*"
