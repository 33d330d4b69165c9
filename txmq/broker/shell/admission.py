"""Who is let in: how many connections there may be, and how many of one address. No I/O.

An IPv6 host has 2^64 addresses to choose from: a network of 64 bits counts as one address (RFC 4291, 2.5.4).

Invariant: an address without a connection is forgotten; what is counted is bounded by the connections there are.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from typing import Final

from txmq.addresses import split_address
from txmq.config import BrokerSettings

_IPV6_NETWORK_BITS: Final = 64


class Admission:
    """See the module's docstring.

    Attributes:
        refused: connections that were closed at once.
    """

    __slots__ = ("_open", "_open_max", "_per_address", "_per_address_max", "refused")

    def __init__(self, settings: BrokerSettings) -> None:
        self._open_max, self._per_address_max = settings.connections_max, settings.connections_per_address_max
        self._open = self.refused = 0
        self._per_address: Counter[str] = Counter()

    def enter(self, address: str) -> str | None:
        """A connection has come, and counts until ``leave``; why it is to be closed, if it is.

        Args:
            address: HOST:PORT of its other end; empty if that is not known.
        """
        self._open += 1
        limit = self._per_address_max
        of_address = 0
        if limit is not None:
            place = _place(address)
            of_address = self._per_address[place] = self._per_address[place] + 1
        if self._open > self._open_max:
            refusal = f"connections_max {self._open_max} is reached"
        elif limit is not None and of_address > limit:
            refusal = f"connections_per_address_max {limit} is reached by {place}: close some of its connections"
        else:
            return None
        self.refused += 1
        return refusal

    def leave(self, address: str) -> None:
        """A connection has gone, whether it was let in or not."""
        self._open -= 1
        if self._per_address_max is not None:
            place = _place(address)
            self._per_address[place] -= 1
            if not self._per_address[place]:
                del self._per_address[place]


def _place(address: str) -> str:
    """What counts as one address."""
    if not address:
        return ""
    host = split_address(address)[0]
    if ":" not in host:
        return host
    found = ipaddress.IPv6Address(host)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(found), _IPV6_NETWORK_BITS), strict=False))
