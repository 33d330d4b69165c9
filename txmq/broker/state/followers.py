"""The replicas that follow this home, as each told last; in memory. The journal is kept for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from txmq.broker.client_connection import ClientConnection
from txmq.model import Lsn

HEARD_MS: Final = 5000  # a replica that follows is heard of each second
KEPT_MS: Final = 600_000  # the journal is kept for a replica that was heard of so long ago


@dataclass(slots=True, eq=False)
class Follow:
    """A replica's question that has no answer yet.

    Attributes:
        lsn: of the first byte that it asks for.
        chain: CRC of its last record, which ends there; None: the leader has said before that it is a copy.
        until_ms: the answer is empty if there is nothing by then.
        is_read: a thread reads for it.
    """

    client: ClientConnection
    opaque: bytes
    lsn: int
    chain: int | None
    until_ms: int
    is_read: bool = False


@dataclass(slots=True)
class Follower:
    """A replica.

    Attributes:
        forced_lsn: below it, everything is forced there.
        folded_lsn: below it, everything is in its state and can be read there.
    """

    address: str
    forced_lsn: int
    folded_lsn: int
    heard_ms: int


class Followers:
    """See the module's docstring.

    Attributes:
        by_replica: by incarnation.
        waiting: questions without an answer, one a connection.
    """

    def __init__(self) -> None:
        self.by_replica: dict[str, Follower] = {}
        self.waiting: list[Follow] = []

    def are_heard(self, now_ms: int) -> bool:
        """Whether one was heard of just now."""
        return any(now_ms - one.heard_ms < HEARD_MS for one in self.by_replica.values())

    def kept_from(self, now_ms: int) -> Lsn | None:
        """The lsn from which on the journal is kept for replicas; None if there are none. Forgets silent ones."""
        if not self.by_replica:
            return None
        self.by_replica = {name: one for name, one in self.by_replica.items() if now_ms - one.heard_ms < KEPT_MS}
        return Lsn(min((one.forced_lsn for one in self.by_replica.values()), default=1 << 63))
