"""The verb ``topic``: create, alter, describe, delete, list.

With a registry, topics are created, altered and deleted there; the answer waits for the own journal.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

from txmq.broker.client_connection import ClientConnection
from txmq.broker.cluster.registry_asks import AlterTopic, Answer, Ask, CreateTopic, DeleteTopic, Result, as_answer
from txmq.broker.context import Context
from txmq.broker.verbs.access.audit_log import audit
from txmq.broker.verbs.access.authorizer import TOPIC, require_seen, sees
from txmq.broker.verbs.access.fair_share import TOPIC_SHARE, note_made, refuse_over_half
from txmq.broker.verbs.partition_lookup import homes_fields
from txmq.errors import BadRequestError, InvariantError, OverloadedError, TxmqError, UnavailableError
from txmq.log.partition import Partition
from txmq.model import TopicConfig
from txmq.protocol.requests import Request
from txmq.redo import entries
from txmq.registry.topics import Topic, altered, check_name, with_settings

Describe = Callable[[Context, Topic], bytes]


def topic(context: Context, client: ClientConnection, request: Request) -> None:
    """Dispatch by action."""
    _, arguments, extensions, _body, opaque = request
    action = _ACTIONS.get(arguments[0])
    if action is None:
        known = b", ".join(_ACTIONS).decode()
        raise BadRequestError(f"unknown action {arguments[0].decode('ascii', 'replace')!r}; known: {known}")
    words = {name.decode(): value.decode("ascii", "replace") for name, value in (extensions or {}).items()}
    name = arguments[1].decode("ascii", "replace")
    action(context, client, name, words, opaque)
    event = _TOLD.get(arguments[0])
    if event is not None:  # the line is written before the record, or before the registry is asked
        settings = ",".join(f"{word}={value}" for word, value in words.items())
        audit(context, client, event, topic=name, **({"settings": settings} if settings else {}))


def _create(context: Context, client: ClientConnection, name: str, words: dict[str, str], opaque: bytes) -> None:
    config = with_settings(context.settings.new_topic(name), words)
    _refuse_over_half(context, client, config.partitions)

    def describe(context: Context, made: Topic) -> bytes:
        note_made(context, client, TOPIC_SHARE, made.config.name, made.config.partitions)
        return _described(context, made)

    if context.cluster is not None:
        _create_in_registry(context, client, opaque, config, describe)
        return
    context.state.topics.check_new(name)
    _refuse_too_many(context, config.partitions)
    created = Topic(context.ids.new_topic_id(), config)
    if context.state.topics.with_id(created.topic_id) is not None:
        raise InvariantError(f"topic id {created.topic_id} is in use")
    _journal(context, created)
    context.answer_when_durable(client, opaque, describe(context, created))


def _alter(context: Context, client: ClientConnection, name: str, words: dict[str, str], opaque: bytes) -> None:
    current = context.state.topics.named(name)
    config = altered(current.config, words)
    added = config.partitions - current.config.partitions
    _refuse_over_half(context, client, added)

    def describe(context: Context, changed: Topic) -> bytes:
        if added:
            _, before = context.state.principals.made.get((TOPIC_SHARE, name), ("", 0))
            note_made(context, client, TOPIC_SHARE, name, before + added)
        return _described(context, changed)

    if context.cluster is not None:
        _alter_in_registry(context, client, opaque, current, words, describe)
        return
    _refuse_too_many(context, added)
    changed = dataclasses.replace(current, config=config)
    _journal(context, changed)
    context.answer_when_durable(client, opaque, describe(context, changed))


def _delete(context: Context, client: ClientConnection, name: str, words: dict[str, str], opaque: bytes) -> None:
    _refuse_settings(words)
    doomed = context.state.topics.named(name)
    if context.cluster is not None:
        _delete_in_registry(context, client, opaque, doomed)
        return
    delete_topic(context, doomed.topic_id)
    context.answer_when_durable(client, opaque, b"{}")


def delete_topic(context: Context, topic_id: int) -> list[Partition]:
    """Journal and fold the end of a topic; its partitions here."""
    context.group_with_room().add_entry(entries.encode_topic_deleted(topic_id))
    removed = context.state.delete_topic(topic_id)
    for partition in removed:
        context.group.open_runs.pop(partition, None)
    context.group.deleted.extend(removed)
    return removed


def _describe(context: Context, client: ClientConnection, name: str, words: dict[str, str], opaque: bytes) -> None:
    _refuse_settings(words)
    require_seen(context, client, TOPIC, name)
    context.answer_from_state(client, opaque, _described(context, context.state.topics.named(name)))


def _list(context: Context, client: ClientConnection, _name: str, words: dict[str, str], opaque: bytes) -> None:
    _refuse_settings(words)
    shown = [item for item in context.state.topics if sees(context, client, TOPIC, item.config.name)]
    listed = [context.state.topic_fields(item) for item in shown]
    context.answer_from_state(client, opaque, json.dumps({"topics": listed}).encode())


_ACTIONS = {b"create": _create, b"alter": _alter, b"describe": _describe, b"delete": _delete, b"list": _list}
_TOLD = {b"create": "topic created", b"alter": "topic altered", b"delete": "topic deleted"}


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
            "log": p.log.decode(),
        }
        for p in context.state.partitions_of[described.topic_id].values()
    ]
    fields = context.state.topic_fields(described)
    if context.cluster is not None:
        fields |= homes_fields(context)
    return json.dumps({**fields, "watermarks": partitions}).encode()


def _refuse_settings(words: dict[str, str]) -> None:
    if words:
        raise BadRequestError("this action takes no settings")


def _refuse_over_half(context: Context, client: ClientConnection, added: int) -> None:
    limit = context.settings.partitions_max
    refuse_over_half(context, client, TOPIC_SHARE, limit, "partitions_max", more=added)


def _refuse_too_many(context: Context, added: int) -> None:
    limit = context.settings.partitions_max
    if len(context.state.partitions) + added > limit:
        raise OverloadedError(f"partitions_max {limit} would be passed: {len(context.state.partitions)} exist")


def _create_in_registry(
    context: Context, client: ClientConnection, opaque: bytes, config: TopicConfig, describe: Describe
) -> None:
    """Create a topic, spread over the homes that are led."""
    check_name(config.name)
    above, limit = context.state.topics.next_id - 1, context.settings.partitions_max
    _ask_registry(context, client, opaque, lambda number: CreateTopic(number, config, above, limit), describe)


def _alter_in_registry(
    context: Context, client: ClientConnection, opaque: bytes, topic: Topic, words: dict[str, str], describe: Describe
) -> None:
    """Give a topic other settings; added partitions are spread."""
    limit = context.settings.partitions_max
    _ask_registry(context, client, opaque, lambda number: AlterTopic(number, topic, words, limit), describe)


def _delete_in_registry(context: Context, client: ClientConnection, opaque: bytes, topic: Topic) -> None:
    """Delete a topic in all its homes."""
    _ask_registry(context, client, opaque, lambda number: DeleteTopic(number, topic), None)


def _ask_registry(
    context: Context, client: ClientConnection, opaque: bytes, make: Callable[[int], Ask], describe: Describe | None
) -> None:
    def answer(result: Result) -> None:
        if isinstance(result, TxmqError):
            context.answer_from_state(client, opaque, as_answer(result).with_traceback(None))
        else:
            _answer_of_registry(context, client, opaque, result, describe)

    context.joined_cluster().ask(make, answer)


def _answer_of_registry(
    context: Context, client: ClientConnection, opaque: bytes, done: Answer, describe: Describe | None
) -> None:
    topic = context.state.topics.with_id(done.value)
    if describe is None:
        context.answer_when_durable(client, opaque, b"{}")
    elif topic is None:
        error = UnavailableError("the topic was deleted meanwhile, or this home refuses it: see cluster describe")
        context.answer_from_state(client, opaque, error)
    else:
        context.answer_when_durable(client, opaque, describe(context, topic))
