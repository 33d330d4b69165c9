"""The verb ``cluster``: homes, leaders and topics, as this broker knows them; homes that are given up."""

from __future__ import annotations

import json
from typing import Any

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.broker.verbs.access.authorizer import TOPIC, is_administrator, sees
from txmq.broker.verbs.branches.listing import waiting
from txmq.broker.verbs.cluster.home_listing import known_homes
from txmq.broker.verbs.cluster.retire import retire
from txmq.errors import BadRequestError
from txmq.protocol.requests import Request


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
