"""``client.groups``: list, describe, reset and delete consumer groups."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from txmq.client.transport.ports import Link, Routing
from txmq.protocol.group_rows import in_pieces
from txmq.protocol.json_text import Fields, json_object

FieldsList = list[Fields]


class Groups:
    """Operators' view of consumer groups. Thread safety: any thread."""

    def __init__(self, routes: Routing[Link], timeout: float) -> None:
        self._routes, self._timeout = routes, timeout

    def list(self) -> FieldsList:
        """Groups with members or saved offsets: ``group`` and number of ``members``."""
        found: FieldsList = self._ask("list", "*")["groups"]
        return found

    def describe(self, group: str) -> Fields:
        """Members, and owner, generation, offset, start, end and lag of each partition.

        Raises:
            UnknownGroupError: it has neither members nor saved offsets.
        """
        return self._ask("describe", group)

    def reset(self, group: str, offsets: Iterable[Sequence[Any]], *, create: bool = False) -> None:
        """Set the offsets from which a group continues.

        Args:
            offsets: rows of topic, partition and offset.
            create: create the group if it does not exist.

        Raises:
            UnknownGroupError: the group has no saved offsets, and ``create`` is not set.
            UnknownTopicError: there is no such topic or partition.
            GroupActiveError: the group has members; stop them first.

        Durability: durable in the broker when this returns; of more than 1,000 rows some may be when it raises.
        """
        for piece in in_pieces(offsets):
            self._ask("reset", group, piece, **({"create": None} if create else {}))

    def change_deferred(self, group: str, rows: Iterable[Sequence[Any]]) -> FieldsList:
        """Change what is deferred, also while members are active: they get those partitions anew.

        Args:
            rows: topic, partition, the text there is, and the text there should be (``describe``: ``deferred``) each.

        Returns:
            Rows that were refused, because another text is there by now: ``topic``, ``partition``, ``deferred``.

        Durability: durable in the broker when this returns; of many rows some may be when it raises.
        """
        refused = [row for piece in in_pieces(rows) for row in self._ask("deferred", group, piece)["refused"]]
        return [dict(zip(("topic", "partition", "deferred"), row, strict=True)) for row in refused]

    def delete(self, group: str) -> None:
        """Forget a group. Raises as ``describe`` and ``reset``. Durability: durable when this returns."""
        self._ask("delete", group)

    def _ask(self, action: str, group: str, rows: FieldsList | Sequence[Any] = (), **words: None) -> Fields:
        body = [json.dumps(rows).encode()]
        control = self._routes.any_link().control
        return json_object(control.call("group", action, group, timeout=self._timeout, extensions=words, body=body))
