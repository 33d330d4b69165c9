"""The door to a partition: the one place where a request's topic and number become one; and where homes are led.

Every verb that writes asks ``writable``, every verb that reads ``readable``, and ``offset`` asks ``measured``. All ask
the connection's permissions first, so that nobody learns of a topic that is not theirs. What is prepared gets its place
without them (``appending``): a grant that is revoked meanwhile breaks no promise.

``State.partitions`` holds only the partitions that this home owns. If a look-up fails there, ``State.placed`` tells
which home owns the partition, and ``Context.cluster`` where that home is led. Answers about topics, and the verb
``cluster``, tell of all homes (``known_homes``).
"""

from __future__ import annotations

from typing import Any

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.broker.verbs.access.authorizer import READ, TOPIC, WRITE, require, require_seen
from txmq.errors import BrokerError, NotOwnerError, StaleTopicError, TopicClosedError, UnknownTopicError
from txmq.log.partition import Partition
from txmq.model import Storage


def writable(
    context: Context, client: ClientConnection, topic: bytes, number: bytes, topic_id: bytes | None = None
) -> Partition:
    """The partition that a request writes to, by its words on the wire.

    A closed topic is not refused here: a batch that is stored already is answered all the same (``appending``).

    Args:
        topic_id: of the topic that is meant; None for any of that name.

    Raises:
        ForbiddenError: the connection's user may not write to the topic.
        UnknownTopicError: no such topic or partition.
        StaleTopicError: the partition is elsewhere, and of another topic than is meant.
        NotOwnerError: another home owns the partition; the text names it and its leader.
    """
    if client.permissions is not None:
        require(context, client, WRITE, TOPIC, topic)
    partition = context.state.partitions.get((topic, number))
    if partition is None:
        raise _refusal(context, topic, number, topic_id)
    return partition


def refuse_stale(partition: Partition, topic_id: int) -> None:
    """Refuse what is meant for another topic of that name."""
    if topic_id != partition.topic_id:
        raise _stale(partition.topic, partition.topic_id, topic_id)


def readable(context: Context, client: ClientConnection, topic: bytes, number: bytes) -> Partition:
    """The partition that a request reads from.

    Raises:
        ForbiddenError: the connection's user may not read the topic.
        UnknownTopicError: no such topic or partition.
        NotOwnerError: another home owns the partition; the text names it and its leader.
        TopicClosedError: the topic is closed for reading.
    """
    if client.permissions is not None:
        require(context, client, READ, TOPIC, topic)
    return _open(context, topic, number)


def measured(context: Context, client: ClientConnection, topic: bytes, number: bytes) -> Partition:
    """The partition whose start and end a request asks for: whoever may do anything with the topic is told those.

    ``topic describe`` tells them as well, and a producer waits by them until what it sent can be read.

    Raises:
        ForbiddenError: the connection's user may do nothing with the topic.
        UnknownTopicError, NotOwnerError, TopicClosedError: as ``readable``.
    """
    if client.permissions is not None:
        require_seen(context, client, TOPIC, topic)
    return _open(context, topic, number)


def not_leading(context: Context) -> NotOwnerError:
    """The refusal of a replica."""
    home = context.identity.node
    leader = (context.cluster.leader(home) if context.cluster is not None else None) or "-"
    return NotOwnerError(f"leader={leader} home={home:016x} epoch={context.state.epoch}: this is a replica of it")


def _open(context: Context, topic: bytes, number: bytes) -> Partition:
    partition = context.state.partitions.get((topic, number))
    if partition is None:
        raise _refusal(context, topic, number)
    if not partition.config.accept_read:
        raise TopicClosedError(f"topic {partition.topic!r} is closed for reading")
    if context.leads_never and partition.config.storage is Storage.MEMORY:  # nothing of it is in the journal
        raise not_leading(context)
    return partition


def _stale(name: str, found: int, meant: int) -> StaleTopicError:
    return StaleTopicError(f"topic {name!r} has id {found} now, not {meant}")


def _refusal(context: Context, name: bytes, number: bytes, topic_id: bytes | None = None) -> BrokerError:
    text = name.decode("ascii", "replace")
    topic = context.state.topics.named(text)  # raises for an unknown topic
    if topic_id is not None and int(topic_id) != topic.topic_id:
        return _stale(text, topic.topic_id, int(topic_id))
    placed = context.state.placed.get(topic.topic_id)
    if placed is not None and context.cluster is not None and int(number) < len(placed.homes):
        home = placed.homes[int(number)]
        leader = context.cluster.leader(home) or "-"
        return NotOwnerError(f"leader={leader} home={home:016x} owns partition {number.decode()} of topic {text!r}")
    return UnknownTopicError(f"topic {text!r} has partitions 0 to {topic.config.partitions - 1}, not {number.decode()}")


def known_homes(context: Context) -> dict[str, Any]:
    """All homes. A broker that is alone tells of itself."""
    identity, view = context.identity, context.cluster
    if view is None:
        own = {
            "home": f"{identity.node:016x}", "name": identity.name, "epoch": context.state.epoch,
            "leader": context.address or context.settings.listen,
        }  # fmt: skip
        return {"cluster": f"{identity.cluster:016x}", "map_version": 0, "homes": [own]}
    rows = [
        {
            "home": f"{home.home:016x}", "name": home.name, "epoch": home.epoch, "leader": home.address,
            **({"retired": home.retired} if home.retired else {}),
            **({"replicas": [*home.replicas]} if home.replicas else {}),
        }
        for _, home in sorted(view.homes.items())
    ]  # fmt: skip
    return {"cluster": f"{identity.cluster:016x}", "map_version": view.map_version, "homes": rows}


def homes_fields(context: Context) -> dict[str, Any]:
    """By home, where it is led, and why it is given up if it is: what an answer about a topic tells of homes."""
    rows = known_homes(context)["homes"]
    retired = {row["home"]: row["retired"] for row in rows if row.get("retired")}
    return {"leaders": {row["home"]: row["leader"] for row in rows}, **({"retired": retired} if retired else {})}
