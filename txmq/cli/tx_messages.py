"""Keys and values of a transaction's messages, from wherever they can be read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from txmq.cli import output
from txmq.errors import OffsetOutOfRangeError, TopicClosedError, UnknownTopicError, UnknownTransactionError

if TYPE_CHECKING:
    from txmq.client import Client
    from txmq.model import Message

SHOWN_MAX = 100
Row = dict[str, Any]


def rows(client: Client, fields: Row, *, with_values: bool) -> list[Row]:
    """Topic, partition, offset and key of each message, the first SHOWN_MAX of them; the beginning of its value."""
    found = []
    for message, offset in _messages(client, fields):
        row = {"topic": message.topic, "partition": message.partition, "offset": offset}
        row["key"] = output.content(message.key)
        found.append(row | ({"value": output.content(message.value)} if with_values else {}))
        if len(found) == SHOWN_MAX:
            break
    return found


def _messages(client: Client, fields: Row) -> Iterator[tuple[Message, int | None]]:
    """Prepared ones lie with the broker, committed ones in the log; of others nothing is kept."""
    if fields.get("state") == "prepared":
        try:
            yield from ((message, None) for message in client.transactions.messages(fields["txid"]))
        except UnknownTransactionError:  # it was settled a moment ago
            return
    elif fields.get("outcome") == "committed":
        for part in fields.get("parts", ()):
            yield from _placed(client, part)


def _placed(client: Client, part: Row) -> Iterator[tuple[Message, int]]:
    start = part.get("base_offset", part.get("offset"))
    if start is None or part["topic"] is None:
        return
    end, at = start + part["count"], start
    while at < end:
        try:
            messages = client.fetch(part["topic"], part["partition"], at)
        except (OffsetOutOfRangeError, UnknownTopicError, TopicClosedError):  # retention, or not visible yet
            return
        wanted = [message for message in messages if at <= message.offset < end]
        yield from ((message, message.offset) for message in wanted)
        if not wanted:
            return
        at = wanted[-1].offset + 1
