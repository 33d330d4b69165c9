"""A statement of MySQL or MariaDB with the literals in it: written out as one text, or prepared once for many."""

from __future__ import annotations

from typing import NamedTuple


class Statement(NamedTuple):
    """SQL with its literals left out.

    Attributes:
        template: with ``%s`` for each of them, and no other percent sign.
        literals: as they are written in SQL, in order.
    """

    template: str
    literals: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Written out."""
        return self.template % self.literals


class Compound:
    """The compound statement that is prepared on a connection.

    Attributes:
        name: None before it was prepared.
        is_refused: the server does not prepare it, or forgets it.
    """

    __slots__ = ("is_refused", "name")

    def __init__(self) -> None:
        self.name: str | None = None
        self.is_refused = False
