"""A member's requests to the broker about its group, over a connection of their own.

The broker notices at once if a process is killed, because its connection ends.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from txmq.client.consumer.offsets.offset_store import OffsetPosition
from txmq.client.consumer.options import MemberSettings
from txmq.client.transport.reconnecting import ReconnectingConnection
from txmq.errors import FencedError, StorageError, UnknownTopicError
from txmq.model import TopicPartition
from txmq.protocol.group_rows import in_pieces

REQUEST_TIMEOUT_S = 5.0
Fields = dict[str, str | int | None]


class SupersededError(FencedError):
    """Another process joined the group under this member's name and took over its partitions."""


class GroupRequests:
    """See the module's docstring. Thread safety: any thread."""

    def __init__(self, connection: ReconnectingConnection, settings: MemberSettings) -> None:
        self._connection, self._settings = connection, settings
        self._incarnation: Fields = {"incarnation": settings.incarnation} if settings.incarnation else {}

    def call(self, action: str, rows: Sequence[Any], fields: Fields) -> bytes:
        """Send ``group <action>``.

        Raises:
            SupersededError: another process has the member's name.
            TxmqError: the broker refused, or cannot be reached.
        """
        wait_s = int(fields.get("wait") or 0) / 1000
        try:
            return self._connection.call(
                "group", action, self._settings.group, timeout=REQUEST_TIMEOUT_S + wait_s,
                extensions={"member": self._settings.name, **self._incarnation, **fields},
                body=[json.dumps(rows).encode()],
            )  # fmt: skip
        except FencedError as error:
            raise SupersededError(*error.args) from error

    def save(self, positions: Sequence[OffsetPosition]) -> list[TopicPartition]:
        """Save offsets in the broker; those that were refused, because another member has the partition.

        Raises:
            StorageError: the broker was restarted, and the member has to join again; or a transaction of the member's
                own overtook this.
        """
        rows = [[*position.slot, position.generation, position.offset, position.deferred] for position in positions]
        order = max(position.order for position in positions)
        refused: dict[TopicPartition, int] = {}
        for piece in in_pieces(rows):
            answer = json.loads(self.call("save", piece, {"order": order} if order else {}))
            refused.update({(topic, partition): newest for topic, partition, newest in answer["refused"]})
        ours = [p.slot for p in positions if refused.get(p.slot) in (0, p.generation)]
        if ours:
            raise StorageError(f"the offset of {ours[0][0]}-{ours[0][1]} cannot be saved now")
        return list(refused)

    def has_topic(self, topic: str) -> bool:
        """Whether there is such a topic."""
        try:
            self._connection.call("meta", topic, timeout=REQUEST_TIMEOUT_S)
        except UnknownTopicError:
            return False
        return True

    def close(self) -> None:
        """End the connection."""
        self._connection.close()
