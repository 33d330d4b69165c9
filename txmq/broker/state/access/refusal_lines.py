"""Which refusals are written to the log: of one user from one address so many a minute, the others are counted.

Invariants:
    * the first one of a user and address is always written;
    * at most ADDRESSES_MAX pairs are kept; the one that was begun first goes first.
"""

from __future__ import annotations

from typing import Final

LINES_A_MINUTE: Final = 60
ADDRESSES_MAX: Final = 10_000
_MINUTE_MS: Final = 60_000


class RefusalLines:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._begun: dict[tuple[str, str], tuple[int, int]] = {}  # when its minute began, and refusals since

    def take(self, user: str, address: str, now_ms: int) -> int | None:
        """One more refusal: how many were left out in its minute before; None if it is left out."""
        pair = user, address.rpartition(":")[0]
        begun_ms, count = self._begun.get(pair, (now_ms, 0))
        if not 0 <= now_ms - begun_ms < _MINUTE_MS:
            del self._begun[pair]
            self._begun[pair] = now_ms, 1
            return max(0, count - LINES_A_MINUTE)
        self._begun[pair] = begun_ms, count + 1
        if len(self._begun) > ADDRESSES_MAX:
            del self._begun[next(iter(self._begun))]
        return 0 if count < LINES_A_MINUTE else None
