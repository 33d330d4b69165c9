"""The verb ``stats``: the broker's figures, as ``key value`` lines for people and as JSON for programs."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Mapping

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.broker.state.transaction import TransactionState
from txmq.broker.verbs import outbox
from txmq.broker.verbs.access.authorizer import (
    DESCRIBE,
    TOPIC,
    is_administrator,
    require,
    require_administrator,
    sees,
    watches,
)
from txmq.broker.verbs.cluster import figures as branch_figures
from txmq.broker.verbs.resource import shown_rows
from txmq.errors import BadRequestError
from txmq.model import TransactionKind
from txmq.protocol.grants import BROKER, WHOLE
from txmq.protocol.requests import Request
from txmq.registry.topics import Topic
from txmq.runtime.build import VERSION

Value = int | float | str | bool
HELP = """stats               the broker as a whole
stats topics        one line a topic
stats offsets       start and end of every partition
stats transactions  open, prepared and kept outcomes; age of the oldest in-doubt one
stats resources     one line a database: who reaches it, branches that are prepared there
stats chains        one line an outbox: its newest page, and when that was taken
stats registry      the session with the registry, and what it told
stats replication   replicas that follow this home and how far they lag, or how far this one does
stats config        the settings in force
stats json          all of it as JSON
"""


def stats(context: Context, client: ClientConnection, request: Request) -> None:
    """Answer one item."""
    _, arguments, _extensions, _body, opaque = request
    item = arguments[0].decode("ascii", "replace") if arguments else ""
    text = _TEXTS.get(item)
    if text is None and item in {topic.config.name for topic in _shown(context, client)}:
        body = _topic_lines(context, item)
    elif text is None:
        raise BadRequestError(
            f"unknown item {item[:40]!r}; known: {', '.join(filter(None, _TEXTS))}, or a topic's name"
        )
    else:
        body = text(context, client)
    context.answer(client, opaque, body.encode())


def broker_figures(context: Context) -> dict[str, Value]:
    """The broker as a whole; times in ms, sizes in bytes, counts since the start."""
    state = context.state
    figures: dict[str, Value] = {
        "broker": context.identity.name,
        "version": VERSION,
        "cluster": f"{context.identity.cluster:016x}",
        "home": f"{context.identity.node:016x}",
        "epoch": state.epoch + (not context.is_serving),  # another one than the life before had
        "uptime_ms": context.now_ms - context.started_ms,
        "sync": context.settings.sync,
        "connections": len(context.clients),
        "topics": len(state.topics),
        "partitions": len(state.partitions),
        "messages": sum(p.high_watermark - p.log_start for p in state.all_partitions()),
        "sessions": len(state.sessions),
        "sequences": state.sequences.count,
        "polls_waiting": context.waiting_polls.count(),
        "disk_full": context.disk_full,
    }
    if context.cluster is not None:
        figures["registry"] = context.cluster.state.value
    figures.update(dataclasses.asdict(context.counters))
    figures.update(context.shell_figures)
    return figures


def registry_figures(context: Context) -> dict[str, Value | None]:
    """The session with the registry, and what it told."""
    view = context.cluster
    if view is None:
        return {"address": None}
    return {
        "address": view.address,
        "state": view.state.value,
        "since_ms": max(0, context.now_ms - view.since_ms),
        "epoch": context.state.registration.epoch,
        "map_version": view.map_version,
        "homes": len(view.homes),
        "homes_led": sum(home.address is not None for home in view.homes.values()),
        "asked": view.asked,
        "topics_refused": len(view.refused),
    }


def replication_figures(context: Context) -> dict[str, Value | None]:
    """Of a replica: how far it lags. Of a leader: one item a replica that follows it, ``replica.<incarnation>``."""
    if context.leads_never:
        leader = None if context.cluster is None else context.cluster.leader(context.identity.node)
        return {
            "role": "replica",
            "leader": leader,
            "heard_ms_ago": max(0, context.now_ms - context.heard_ms) if context.heard_ms else None,
            "lag_bytes": max(0, context.leader_lsn - context.folded_lsn),
        }
    followers = context.followers.by_replica
    figures: dict[str, Value | None] = {"role": "leader", "replicas": len(followers)}
    for name, one in followers.items():
        figures |= {
            f"replica.{name}.address": one.address,
            f"replica.{name}.heard_ms_ago": max(0, context.now_ms - one.heard_ms),
            f"replica.{name}.lag_bytes": max(0, context.leader_lsn - one.forced_lsn),
            f"replica.{name}.folded_lag_bytes": max(0, context.leader_lsn - one.folded_lsn),
        }
    return figures


_PREPARED_KINDS = (TransactionKind.LAST_RESOURCE, TransactionKind.HALF, TransactionKind.FOREIGN, TransactionKind.SPARK)


def transaction_figures(context: Context) -> dict[str, Value]:
    """Unsettled transactions and kept outcomes."""
    unsettled = list(context.state.transactions.values())
    prepared = [t for t in unsettled if t.state is TransactionState.PREPARED]
    decisions = context.state.decisions
    since = [t.meta["prepared_ms"] for t in prepared] + [d.meta["decided_ms"] for d in decisions.incomplete.values()]
    since += [part.placed_ms or context.started_ms for part in context.state.branch_parts.unreported.values()]
    oldest = min(since, default=context.now_ms)
    resources = context.resources.figures(context.now_ms)
    kinds = Counter(t.meta["kind"] for t in prepared)
    return {
        "open": len(context.state.streams),
        "in_doubt": len(prepared) + len(decisions.incomplete),
        **{f"in_doubt_{kind.value.replace('-', '_')}": kinds[kind.value] for kind in _PREPARED_KINDS},
        "in_doubt_xa": sum(bool(decided.branches) for decided in decisions.incomplete.values()),
        "in_doubt_age_ms_max": max(0, context.now_ms - oldest, resources["branches_age_ms_max"]),
        **resources,
        **({} if context.cluster is None else branch_figures(context)),
        "commits_waiting_for_order": sum(bool(t.waiting) for t in prepared),
        "held_partitions": ",".join(f"{p.topic}-{p.number}" for p in decisions.barriers.partitions()) or "none",
        "held_transactions": len(decisions.barriers),
        "heuristics_kept": len(decisions.heuristics),
        "shown_before_rows": context.counters.shown_before_rows,
        "queries": len(context.state.queries.named),
        "outboxes": len(context.state.outbox_chains.newest),
        "outbox_pages": context.counters.outbox_pages,
        "half_checks": context.counters.checks,
        "payload_bytes": context.state.payload_bytes,
        "outcomes_kept": sum(len(s.outcomes) for s in context.state.sessions.values()),
        "committed": context.counters.committed,
        "rolled_back": context.counters.rolled_back,
        "prepared": context.counters.prepared,
    }


def _lines(figures: Mapping[str, object]) -> str:
    return "".join(f"{name} {_word(value)}\n" for name, value in figures.items())


def _word(value: object) -> str:
    """A value as the settings are written: ``true``, ``none``."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _shown(context: Context, client: ClientConnection) -> list[Topic]:
    """Topics that the connection's user may do something with."""
    return [topic for topic in context.state.topics if sees(context, client, TOPIC, topic.config.name)]


def _topics(context: Context, client: ClientConnection) -> str:
    lines = []
    for topic in _shown(context, client):
        partitions = context.state.partitions_of[topic.topic_id].values()
        lines.append(
            f"{topic.config.name} partitions {len(partitions)} "
            f"messages {sum(p.high_watermark - p.log_start for p in partitions)} "
            f"bytes {sum(p.size_bytes for p in partitions)} "
            f"accept_publish {str(topic.config.accept_publish).lower()} "
            f"accept_read {str(topic.config.accept_read).lower()}\n"
        )
    return "".join(lines)


def _topic_lines(context: Context, name: str) -> str:
    topic = context.state.topics.named(name)
    return _lines(topic.to_json()) + _watermarks(context, topic.topic_id)


def _watermarks(context: Context, topic_id: int) -> str:
    return "".join(
        f"{p.topic} {p.number} start {p.log_start} end {p.high_watermark} bytes {p.size_bytes}\n"
        for p in context.state.partitions_of[topic_id].values()
    )


def _offsets(context: Context, client: ClientConnection) -> str:
    return "".join(_watermarks(context, topic.topic_id) for topic in _shown(context, client))


def _resources(context: Context, client: ClientConnection) -> str:
    lines = []
    for row in shown_rows(context, client):
        words = {name: _word(row[name]) for name in ("kind", "reachable", "branches", "age_ms", "uuid", "seen_ms_ago")}
        lines.append(f"{row['resource']} {' '.join(f'{name} {word}' for name, word in words.items())}\n")
    return "".join(lines)


def _chains(context: Context, client: ClientConnection) -> str:
    return "".join(
        f"{row.pop('outbox')} {' '.join(f'{name} {_word(value)}' for name, value in row.items())}\n"
        for row in outbox.rows(context, client)
    )


def _for_watchers(figures: Callable[[Context], Mapping[str, object]]) -> Callable[[Context, ClientConnection], str]:
    """Figures that name what others have: for those who watch the broker, where there are users."""

    def text(context: Context, client: ClientConnection) -> str:
        require(context, client, DESCRIBE, BROKER, WHOLE)
        return _lines(figures(context))

    return text


def _for_operators(figures: Callable[[Context], Mapping[str, object]]) -> Callable[[Context, ClientConnection], str]:
    """The administrators' alone, where there are users."""

    def text(context: Context, client: ClientConnection) -> str:
        require_administrator(context, client, "stats of this item")
        return _lines(figures(context))

    return text


def _json(context: Context, client: ClientConnection) -> str:
    topics, is_watched = _shown(context, client), watches(context, client)
    offsets = [
        {"topic": p.topic, "partition": p.number, "start": p.log_start, "end": p.high_watermark, "bytes": p.size_bytes}
        for topic in topics
        for p in context.state.partitions_of[topic.topic_id].values()
    ]
    everything = {
        "broker": broker_figures(context),
        **({"transactions": transaction_figures(context)} if is_watched else {}),
        "resources": shown_rows(context, client),
        "chains": outbox.rows(context, client),
        "topics": [topic.to_json() for topic in topics],
        "offsets": offsets,
        **({"config": context.settings.shown()} if is_administrator(context, client) else {}),
    }
    if context.cluster is not None and is_watched:
        everything["registry"] = registry_figures(context)
        everything["replication"] = replication_figures(context)
    return json.dumps(everything)


_TEXTS: dict[str, Callable[[Context, ClientConnection], str]] = {
    "": lambda context, _client: _lines(broker_figures(context)),
    "topics": _topics,
    "offsets": _offsets,
    "transactions": _for_watchers(transaction_figures),
    "resources": _resources,
    "chains": _chains,
    "registry": _for_watchers(registry_figures),
    "replication": _for_watchers(replication_figures),
    "config": _for_operators(lambda context: context.settings.shown()),
    "json": _json,
    "help": lambda _context, _client: HELP,
}
