"""How brokers of one cluster know each other: a login by SCRAM, whose password the brokers derive and nobody types.

The password of a conversation is an HMAC of the cluster's secret and both homes. So the asking broker proves that it
is of the cluster, and the asked one that it is, too, and the home that was meant: an address in the registry proves
nothing. Relaying the conversation to another home gives no login there, nor, over TLS, with another certificate.

A broker's name begins with a dot: no user has such a name.
"""

from __future__ import annotations

import hmac
from functools import lru_cache
from typing import Final

from txmq.protocol.scram import SALT_SIZE, ScramKeys, keys_of

_PREFIX: Final = ".home-"
_HOMES_KEPT: Final = 1000


def peer_name(home: int) -> str:
    """The name under which the broker that leads a home logs in at other homes."""
    return f"{_PREFIX}{home:016x}"


def is_peer(name: str) -> bool:
    """Whether the name is a broker's."""
    return name.startswith(_PREFIX)


def home_of(name: str) -> int | None:
    """The home of such a name; None: it is a user's, or nobody's."""
    digits = name.removeprefix(_PREFIX)
    try:
        home = int(digits, 16)
    except ValueError:
        return None
    return home if peer_name(home) == name else None


def peer_password(secret: str, asking: int, asked: int) -> str:
    """What the broker of one home proves to that of another one."""
    return hmac.digest(secret.encode(), f"{asking:016x} asks {asked:016x}".encode(), "sha256").hex()


@lru_cache(maxsize=_HOMES_KEPT)
def peer_keys(secret: str, asking: int, asked: int) -> ScramKeys:
    """The keys of that password. Kept: they cost the loop two milliseconds."""
    salt = hmac.digest(secret.encode(), f"salt {asking:016x} {asked:016x}".encode(), "sha256")[:SALT_SIZE]
    return keys_of(peer_password(secret, asking, asked), salt)
