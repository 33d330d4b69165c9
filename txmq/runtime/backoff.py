"""How long to wait before the same thing is tried again: twice as long each time, up to a bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Generic, TypeVar

Number = TypeVar("Number", int, float)

_DOUBLINGS_MAX: Final = 32


@dataclass(frozen=True, slots=True)
class Backoff(Generic[Number]):
    """Pauses in seconds or milliseconds.

    Attributes:
        first: pause after the first failure.
        most: longest pause.
    """

    first: Number
    most: Number

    def after(self, failures: int) -> Number:
        """The pause after a failure that so many others came before: 0 gives the first pause."""
        doubled: Number = self.first * (1 << min(max(failures, 0), _DOUBLINGS_MAX))
        return min(doubled, self.most)

    def following(self, pause: Number) -> Number:
        """The pause after one more failure, if the last pause was this long; 0 if there was none."""
        return min(max(pause * 2, self.first), self.most)
