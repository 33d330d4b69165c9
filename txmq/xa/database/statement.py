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


class Compounds:
    """The compound statements that are prepared on a connection.

    Attributes:
        names: by what they are made of.
        are_refused: the server does not prepare them, or forgets them.
    """

    __slots__ = ("are_refused", "names")

    def __init__(self) -> None:
        self.names: dict[tuple[str, ...], str] = {}
        self.are_refused = False
