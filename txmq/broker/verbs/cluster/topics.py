"""Topics of a broker with a registry are created, altered and deleted there; the answer waits for the own journal."""

from __future__ import annotations

from collections.abc import Callable

from txmq.broker.client_connection import ClientConnection
from txmq.broker.cluster.registry_asks import AlterTopic, Answer, Ask, CreateTopic, DeleteTopic, Result
from txmq.broker.context import Context
from txmq.broker.verbs.cluster.registry_events import as_answer, view_of
from txmq.errors import TxmqError, UnavailableError
from txmq.model import TopicConfig
from txmq.registry.topics import Topic, check_name

Describe = Callable[[Context, Topic], bytes]


def create(context: Context, client: ClientConnection, opaque: bytes, config: TopicConfig, describe: Describe) -> None:
    """Create a topic, spread over the homes that are led."""
    check_name(config.name)
    above, limit = context.state.topics.next_id - 1, context.settings.partitions_max
    _ask(context, client, opaque, lambda number: CreateTopic(number, config, above, limit), describe)


def alter(
    context: Context, client: ClientConnection, opaque: bytes, topic: Topic, words: dict[str, str], describe: Describe
) -> None:
    """Give a topic other settings; added partitions are spread."""
    limit = context.settings.partitions_max
    _ask(context, client, opaque, lambda number: AlterTopic(number, topic, words, limit), describe)


def delete(context: Context, client: ClientConnection, opaque: bytes, topic: Topic) -> None:
    """Delete a topic in all its homes."""
    _ask(context, client, opaque, lambda number: DeleteTopic(number, topic), None)


def _ask(
    context: Context, client: ClientConnection, opaque: bytes, make: Callable[[int], Ask], describe: Describe | None
) -> None:
    def answer(result: Result) -> None:
        if isinstance(result, TxmqError):
            context.answer_from_state(client, opaque, as_answer(result).with_traceback(None))
        else:
            _answer(context, client, opaque, result, describe)

    view_of(context).ask(make, answer)


def _answer(context: Context, client: ClientConnection, opaque: bytes, done: Answer, describe: Describe | None) -> None:
    topic = context.state.topics.with_id(done.value)
    if describe is None:
        context.answer_when_durable(client, opaque, b"{}")
    elif topic is None:
        error = UnavailableError("the topic was deleted meanwhile, or this home refuses it: see cluster describe")
        context.answer_from_state(client, opaque, error)
    else:
        context.answer_when_durable(client, opaque, describe(context, topic))
