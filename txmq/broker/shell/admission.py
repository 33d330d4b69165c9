"""Admission: how many connections there may be, how many of one address, and how often they may come. No I/O.

What one address is: ``addresses.network_of``.

Invariants:
    * an address without a connection is not counted: there are as many counts as connections at most;
    * at most ``BUCKETS_MAX`` addresses are known by how often they come; the one that was new first is forgotten first.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from txmq.addresses import network_of
from txmq.broker.shell.token_bucket import TokenBucket
from txmq.config import BrokerSettings

BURST_S: Final = 10.0  # a host whose programs all come back at once
BUCKETS_MAX: Final = 10_000


class Admission:
    """See the module's docstring.

    Attributes:
        refused: connections that were closed at once.
    """

    __slots__ = ("_buckets", "_open", "_open_max", "_per_address", "_per_address_max", "_per_s_max", "refused")

    def __init__(self, settings: BrokerSettings) -> None:
        self._open_max, self._per_address_max = settings.connections_max, settings.connections_per_address_max
        self._per_s_max = settings.connects_per_address_per_s_max
        self._buckets: dict[str, TokenBucket] = {}
        self._open = self.refused = 0
        self._per_address: Counter[str] = Counter()

    def enter(self, address: str, now_s: float) -> str | None:
        """A connection has come, and counts until ``leave``; why it must be closed, if it must.

        Args:
            address: HOST:PORT of its other end; empty if that is not known.
            now_s: monotonic.
        """
        self._open += 1
        limit = self._per_address_max
        of_address = 0
        if limit is not None:
            place = network_of(address)
            of_address = self._per_address[place] = self._per_address[place] + 1
        if self._open > self._open_max:
            refusal = f"connections_max {self._open_max} is reached"
        elif limit is not None and of_address > limit:
            refusal = f"connections_per_address_max {limit} is reached by {place}: close some of its connections"
        elif self._per_s_max is not None and not self._comes_in_time(network_of(address), self._per_s_max, now_s):
            told = f"connects_per_address_per_s_max {self._per_s_max} is exceeded by {network_of(address)}"
            refusal = f"{told}: keep connections open, and come again later"
        else:
            return None
        self.refused += 1
        return refusal

    def leave(self, address: str) -> None:
        """A connection has gone, whether it was let in or not."""
        self._open -= 1
        if self._per_address_max is not None:
            place = network_of(address)
            self._per_address[place] -= 1
            if not self._per_address[place]:
                del self._per_address[place]

    def _comes_in_time(self, place: str, rate: int, now_s: float) -> bool:
        bucket = self._buckets.get(place)
        if bucket is None:
            if len(self._buckets) >= BUCKETS_MAX:
                del self._buckets[next(iter(self._buckets))]
            bucket = self._buckets[place] = TokenBucket(rate, BURST_S)
        if not bucket.is_open(now_s):
            return False
        bucket.take(1, now_s)
        return True
