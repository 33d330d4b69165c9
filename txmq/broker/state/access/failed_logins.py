"""Failed logins by address: each one makes the next attempt from there wait longer. In memory only.

Invariants:
    * what one address is: ``addresses.network_of``;
    * at most ADDRESSES_MAX are kept; the one whose last failure is oldest goes first;
    * an address that failed FREE_MAX times may try again after a pause that doubles up to PAUSE_MS_MAX.
"""

from __future__ import annotations

from typing import Final

from txmq.addresses import network_of

ADDRESSES_MAX: Final = 10_000
FREE_MAX: Final = 3  # a person mistypes
PAUSE_MS: Final = 500
PAUSE_MS_MAX: Final = 30_000
FORGOTTEN_AFTER_MS: Final = 600_000


class FailedLogins:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._failed: dict[str, tuple[int, int]] = {}  # times, and when the last one was; oldest first

    def wait_ms(self, address: str, now_ms: int) -> int:
        """How long a login from there has to wait still."""
        times, last_ms = self._failed.get(network_of(address), (0, 0))
        if times < FREE_MAX or not 0 <= now_ms - last_ms < FORGOTTEN_AFTER_MS:
            return 0
        pause_ms = min(PAUSE_MS << min(times - FREE_MAX, 10), PAUSE_MS_MAX)
        return max(0, last_ms + pause_ms - now_ms)

    def failed(self, address: str, now_ms: int) -> None:
        """A login failed."""
        host = network_of(address)
        times, last_ms = self._failed.pop(host, (0, 0))
        if now_ms - last_ms >= FORGOTTEN_AFTER_MS:
            times = 0
        self._failed[host] = times + 1, now_ms
        if len(self._failed) > ADDRESSES_MAX:
            del self._failed[next(iter(self._failed))]
