"""For the tests of a project: what was sent."""

from __future__ import annotations

from django.db import DEFAULT_DB_ALIAS, connections

from txmq.django.outbox import outbox_of
from txmq.outbox.page import OutboxRow

_ROWS_MAX = 10_000
_BYTES_MAX = 1 << 30


def sent(topic: str | None = None, using: str = DEFAULT_DB_ALIAS) -> list[OutboxRow]:
    """The messages that wait in the outbox, in the order in which they were sent, also those of an open transaction.

    Each has ``topic``, ``value``, ``key`` and ``headers``, and ``unit``, which those of one transaction share.

    Args:
        topic: of this one only.
    """
    connection = connections[using]
    rows = outbox_of(using).tables(connection).waiting(connection, _ROWS_MAX, _BYTES_MAX).rows
    return [row for row in rows if topic in (None, row.topic)]
