"""The newest fencing token of each database. A fold over the journal.

A resolver of a database draws a random word, its *token*, and stores it there. This broker keeps the newest one of
each database, and takes another only as its successor: from a database that has the newest one. So of a database and
its copy one goes on, and the other is known by its token (``xa/fencing.py`` has the whole).

Invariants:
    * a token is followed only by one that was drawn in a database that had it; or by an operator's word;
    * a database is never forgotten: a copy that comes late finds that it is not the newest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

TOKENS_MAX: Final = 10_000  # databases: of each a uuid and a token
FROZEN_FIELDS: Final = 2


class FencingTokens:
    """All of them, by the database's uuid; both are 32 hex digits."""

    def __init__(self) -> None:
        self.newest: dict[str, str] = {}

    def follows(self, uuid: str, after: str) -> bool:
        """Whether a token that was drawn in a database which had ``after`` may be the next; empty: it had none."""
        return self.newest.get(uuid, "") == after

    def drawn(self, uuid: str, token: str) -> None:
        """A token is the newest from now on."""
        self.newest[uuid] = token

    def freeze(self) -> Iterator[tuple[str, str]]:
        """A copy of each."""
        return iter(list(self.newest.items()))

    def restore(self, rows: Iterable[tuple[str, str]]) -> None:
        """What ``freeze`` copied."""
        self.newest = dict(rows)
