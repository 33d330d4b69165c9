"""The verb ``cluster``: homes, leaders, topics and branches, as this broker knows them; homes that are given up.

``cluster retire``: an operator gives another home up as lost for ever, with no copy of its directory. The registry
keeps that nobody leads it any more (``Registry.retire_home``); every other home journals it when it hears of it, this
one before it answers. What is prepared or decided over that home is not touched: each transaction is settled by an
operator (``complete heuristic=``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final
from urllib.parse import unquote

from txmq.broker.client_connection import ClientConnection
from txmq.broker.cluster.registry_asks import Result, RetireHome, as_answer
from txmq.broker.context import Context
from txmq.broker.state.transaction import TransactionState
from txmq.broker.verbs.access.audit_log import audit
from txmq.broker.verbs.access.authorizer import TOPIC, is_administrator, sees
from txmq.broker.verbs.partition_lookup import known_homes
from txmq.errors import BadRequestError, TxmqError, UnavailableError
from txmq.protocol.requests import Request
from txmq.registry.cluster_metadata import parse_home
from txmq.xid import TxId

REASON_LENGTH_MAX: Final = 1000
ROWS_MAX = 100  # of each state
_BEFORE = "transactions before it, of the same keys"


def cluster(context: Context, client: ClientConnection, request: Request) -> None:
    """Dispatch by action: ``describe`` tells everything, ``homes`` only who leads which home; ``retire`` changes it."""
    _, arguments, extensions, _body, opaque = request
    if arguments[0] == b"retire":
        retire(context, client, extensions or {}, opaque)
        return
    if arguments[0] not in (b"describe", b"homes"):
        action = arguments[0].decode("ascii", "replace")
        raise BadRequestError(f"unknown action {action[:40]!r}; known: describe, homes, retire")
    fields = known_homes(context)
    if arguments[0] == b"describe":
        fields |= {"home": f"{context.identity.node:016x}", "registry": registry_fields(context)}
        fields["topics"] = [
            _topic(context, topic.topic_id)
            for topic in context.state.topics
            if sees(context, client, TOPIC, topic.config.name)
        ]
        fields["branches"] = waiting(context) if is_administrator(context, client) else []
    context.answer_from_state(client, opaque, json.dumps(fields).encode())


def registry_fields(context: Context) -> dict[str, Any] | None:
    """The session with the registry; None for a broker that is alone."""
    view = context.cluster
    if view is None:
        return None
    return {
        "address": view.address, "state": view.state.value, "since_ms": max(0, context.now_ms - view.since_ms),
        "asked": view.asked, "refused": sorted(view.refused.values()),
        "users_version": context.state.principals.registry_version,
    }  # fmt: skip


def _topic(context: Context, topic_id: int) -> dict[str, Any]:
    state, view = context.state, context.cluster
    topic, placed = state.topics.with_id(topic_id), state.placed.get(topic_id)
    assert topic is not None
    homes = () if placed is None else placed.homes
    away = {home for home in homes if home != state.home and (view is None or view.leader(home) is None)}
    return {
        "topic": topic.config.name,
        "partitions": topic.config.partitions,
        "unavailable": [number for number, home in enumerate(homes) if home in away],
    }


def retire(context: Context, client: ClientConnection, given: dict[bytes, bytes], opaque: bytes) -> None:
    """Give a home up. Idempotent."""
    view, word = context.cluster, given.get(b"home", b"").decode("ascii", "replace")
    reason = unquote(given.get(b"reason", b"").decode(), errors="replace")
    if not reason.strip() or len(reason) > REASON_LENGTH_MAX:
        raise BadRequestError(
            f"cluster retire home= needs reason=: why it is lost and who says so, at most {REASON_LENGTH_MAX} letters"
        )
    try:
        home = parse_home(word)
    except ValueError:
        raise BadRequestError(f"home={word[:40]}: expected 16 hexadecimal digits") from None
    if view is None:
        raise BadRequestError("this broker is alone: it has no other home")
    if not context.is_serving:
        raise UnavailableError("the broker waits for the registry to say that it leads its home")

    def answered(result: Result) -> None:
        if isinstance(result, TxmqError):
            context.answer_from_state(client, opaque, as_answer(result).with_traceback(None))
        else:
            context.answer_when_durable(client, opaque, b"{}")

    audit(context, client, "home retired", home=word, reason=reason)
    view.ask(lambda number: RetireHome(number, home, reason), answered)


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
    return {"txid": context.txid_of(name), "state": state, "waits_for": waits_for, "age_ms": age_ms}


def _home(txid: str) -> str:
    return f"home {TxId.parse(txid).home:016x}"
