"""The chain of each outbox: its newest page. A fold over the journal.

A relay sends the rows of an outbox in *pages*, each an ordinary transaction. A page is taken only as the successor of
the newest one that this broker knows, and takes its place in the record of its decision. So of an outbox and its copy
one goes on, a relay that was overtaken is refused, and what became of a page whose session has ended is told by the
chain.

Invariants:
    * a page follows only the one before it; the first one of an outbox follows none;
    * an outbox is forgotten by an administrator's word alone: a copy that comes late finds that it is not the newest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

OUTBOXES_MAX: Final = 1000
FROZEN_FIELDS: Final = 4


class NewestPage(NamedTuple):
    """The newest page of an outbox.

    Attributes:
        last: its transaction, as text.
        name: of the outbox, for operators.
        taken_ms: when it was taken.
    """

    last: str
    name: str
    taken_ms: int


class OutboxChains:
    """All of them, by the outbox's uuid: 32 hex digits."""

    def __init__(self) -> None:
        self.newest: dict[str, NewestPage] = {}

    def last(self, uuid: str) -> str:
        """The transaction of the newest page; empty: there was none."""
        page = self.newest.get(uuid)
        return "" if page is None else page.last

    def fold(self, fields: dict[str, Any]) -> None:
        """A page is the newest from now on; or, without one, the outbox is forgotten."""
        if fields["last"] is None:
            self.newest.pop(fields["uuid"], None)
        else:
            self.newest[fields["uuid"]] = NewestPage(fields["last"], fields["name"], fields["time_ms"])

    def freeze(self) -> Iterator[tuple[str, str, str, int]]:
        """A copy of each."""
        return ((uuid, *page) for uuid, page in list(self.newest.items()))

    def restore(self, rows: Iterable[Sequence[Any]]) -> None:
        """What ``freeze`` copied."""
        self.newest = {uuid: NewestPage(last, name, taken_ms) for uuid, last, name, taken_ms in rows}
