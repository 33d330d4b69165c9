"""What is remembered of refusals by address: failed logins, whose answers wait, and lines of the log. In memory only.

Theory of operation. A login is verified whatever failed before it, and a right one is let in at once: somebody else at
the same address (a load balancer, a machine of many services) keeps nobody out. Only the answer to a wrong one waits,
and its connection with it: longer with each failure of the address. So a guess costs a connection and its time; how
many of these an address has, ``connections_per_address_max`` and ``connects_per_address_per_s_max`` say.

Of the refusals of one user from one address so many a minute are written to the log; the others are counted.

Invariants:
    * what one address is to a login: ``addresses.network_of``;
    * at most ADDRESSES_MAX are kept; the one whose last failure is oldest goes first;
    * the first FREE_MAX failures of an address are answered at once, then the pause doubles up to PAUSE_MS.most;
    * the first refusal of a user and address is always written;
    * at most PAIRS_MAX pairs of these are kept; the one that was begun first goes first.
"""

from __future__ import annotations

from typing import Final

from txmq.addresses import network_of
from txmq.runtime.backoff import Backoff

ADDRESSES_MAX: Final = 10_000
FREE_MAX: Final = 3  # a person mistypes
PAUSE_MS: Final = Backoff(500, 4_000)  # less than clients and other homes wait for an answer
FORGOTTEN_AFTER_MS: Final = 600_000
LINES_A_MINUTE: Final = 60
PAIRS_MAX: Final = 10_000
_MINUTE_MS: Final = 60_000


class FailedLogins:
    """Failed logins by address: each one's answer waits longer than the one's before."""

    def __init__(self) -> None:
        self._failed: dict[str, tuple[int, int]] = {}  # times, and when the last one was; oldest first

    def failed(self, address: str, now_ms: int) -> int:
        """A login failed: how many milliseconds its answer must wait."""
        host = network_of(address)
        times, last_ms = self._failed.pop(host, (0, 0))
        times = times + 1 if 0 <= now_ms - last_ms < FORGOTTEN_AFTER_MS else 1
        self._failed[host] = times, now_ms
        if len(self._failed) > ADDRESSES_MAX:
            del self._failed[next(iter(self._failed))]
        return 0 if times <= FREE_MAX else PAUSE_MS.after(times - FREE_MAX - 1)


class RefusalLines:
    """Which refusals are written to the log."""

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
        if len(self._begun) > PAIRS_MAX:
            del self._begun[next(iter(self._begun))]
        return 0 if count < LINES_A_MINUTE else None
