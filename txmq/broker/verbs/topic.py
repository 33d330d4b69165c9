"""The verb ``topic``: create, alter, describe, delete, list."""

from __future__ import annotations

import dataclasses
import json

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.errors import BadRequestError, InvariantError, OverloadedError
from txmq.protocol.requests import Request
from txmq.redo import entries
from txmq.registry.topics import Topic, with_settings


def topic(context: Context, client: ClientConnection, request: Request) -> None:
    """Dispatch by action."""
    _, arguments, extensions, _body, opaque = request
    action = _ACTIONS.get(arguments[0])
    if action is None:
        known = b", ".join(_ACTIONS).decode()
        raise BadRequestError(f"unknown action {arguments[0].decode('ascii', 'replace')!r}; known: {known}")
    words = {name.decode(): value.decode("ascii", "replace") for name, value in (extensions or {}).items()}
    action(context, client, arguments[1].decode("ascii", "replace"), words, opaque)


def _create(context: Context, client: ClientConnection, name: str, words: dict[str, str], opaque: bytes) -> None:
    config = with_settings(context.settings.new_topic(name), words)
    context.state.topics.check_new(name)
    _refuse_too_many(context, config.partitions)
    created = Topic(context.ids.new_topic_id(), config)
    if context.state.topics.with_id(created.topic_id) is not None:
        raise InvariantError(f"topic id {created.topic_id} is in use")
    _journal(context, created)
    context.answer_when_durable(client, opaque, _described(context, created))


def _alter(context: Context, client: ClientConnection, name: str, words: dict[str, str], opaque: bytes) -> None:
    current = context.state.topics.named(name)
    config = with_settings(current.config, words)
    if config.storage is not current.config.storage:
        raise BadRequestError("storage cannot be altered; create another topic")
    if config.partitions < current.config.partitions:
        raise BadRequestError(f"partitions can only grow; topic {name!r} has {current.config.partitions}")
    _refuse_too_many(context, config.partitions - current.config.partitions)
    altered = dataclasses.replace(current, config=config)
    _journal(context, altered)
    context.answer_when_durable(client, opaque, _described(context, altered))


def _delete(context: Context, client: ClientConnection, name: str, words: dict[str, str], opaque: bytes) -> None:
    _refuse_settings(words)
    doomed = context.state.topics.named(name)
    context.group.add_entry(entries.encode_topic_deleted(doomed.topic_id))
    removed = context.state.delete_topic(doomed.topic_id)
    for partition in removed:
        context.group.open_runs.pop(partition, None)
    context.group.deleted.extend(removed)
    context.answer_when_durable(client, opaque, b"{}")


def _describe(context: Context, client: ClientConnection, name: str, words: dict[str, str], opaque: bytes) -> None:
    _refuse_settings(words)
    context.answer_from_state(client, opaque, _described(context, context.state.topics.named(name)))


def _list(context: Context, client: ClientConnection, _name: str, words: dict[str, str], opaque: bytes) -> None:
    _refuse_settings(words)
    listed = [item.to_json() for item in context.state.topics]
    context.answer_from_state(client, opaque, json.dumps({"topics": listed}).encode())


_ACTIONS = {b"create": _create, b"alter": _alter, b"describe": _describe, b"delete": _delete, b"list": _list}


def _journal(context: Context, changed: Topic) -> None:
    context.group.add_entry(entries.json_entry(entries.TOPIC, changed.to_json()))
    context.state.put_topic(changed)


def _described(context: Context, described: Topic) -> bytes:
    partitions = [
        {
            "partition": p.number,
            "broker_number": f"0-{p.number}",
            "start": p.log_start,
            "end": p.high_watermark,
            "bytes": p.size_bytes,
        }
        for p in context.state.partitions_of[described.topic_id].values()
    ]
    return json.dumps({**described.to_json(), "watermarks": partitions}).encode()


def _refuse_settings(words: dict[str, str]) -> None:
    if words:
        raise BadRequestError("this action takes no settings")


def _refuse_too_many(context: Context, added: int) -> None:
    limit = context.settings.partitions_max
    if len(context.state.partitions) + added > limit:
        raise OverloadedError(f"partitions_max {limit} would be passed: {len(context.state.partitions)} exist")
