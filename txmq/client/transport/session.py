"""Who this client is to its broker: the session behind txids and producer sequences.

A session is made when the first one needs it, resumed by each new connection, and replaced when the broker no longer
knows it (410) or is another broker than the one that issued it. What the old session left unanswered is then unknown
for good, and whoever asked is told so.

Invariants:
    * A counter is issued once per session: a txid never names two transactions.
    * ``floor`` is the highest n with all counters up to n finished; it never falls.
    * A counter whose end nobody saw holds the floor, and the broker keeps what is above it. It is *lost*: a later
      transaction asks for it (``transaction/broker_side.py``), and the answer is kept here, for whoever asks by its id.
"""

from __future__ import annotations

import heapq
import json
from collections import deque
from itertools import count
from typing import Any

from txmq.errors import RemoteProtocolError
from txmq.model import Outcome
from txmq.runtime.threads import Lock
from txmq.xid import TxId

PROTOCOL = 1
_KNOWN_OUTCOMES_MAX = 4096  # outcomes of lost transactions


class ClientSession:
    """One session, as the broker's ``hello`` told it.

    Attributes:
        cluster, home: ids of the cluster and of the broker whose journal decides.
        id: the session's number; also the producer id of its batches.
        epoch: rises where another process takes the session over; this one is fenced then.
        secret: what resuming needs; never logged.
        in_flight_max: unanswered batches per partition that the broker tells apart from duplicates.
        request_size_bytes_max: largest body of a request.
        clock_ahead_ms: the broker's wall clock less our monotonic one, when it was last asked; deadlines are told by
            the broker's, and our wall clock may be set.
        lost: counters of local transactions whose end was not seen, and which nobody else asks about.

    Thread safety: any thread.
    """

    def __init__(self, fields: dict[str, Any], monotonic_ms: int | None = None) -> None:
        try:
            self.cluster, self.home = int(fields["cluster"], 16), int(fields["home"], 16)
            self.id, self.epoch = int(fields["session"], 16), int(fields["epoch"])
            self.secret = str(fields["secret"])
            self.in_flight_max = int(fields["in_flight_max"])
            self.request_size_bytes_max = int(fields["request_size_bytes_max"])
            self.clock_ahead_ms = 0 if monotonic_ms is None else int(fields["time_ms"]) - monotonic_ms
        except (KeyError, TypeError, ValueError) as error:
            raise RemoteProtocolError(f"the answer to hello lacks or garbles {error}") from None
        self._txid_prefix = str(TxId(self.cluster, self.home, self.id, 0))[:-1]
        self._numbers = count(1)
        self._lock = Lock()
        self._floor = 0
        self._finished: list[int] = []  # heap of the finished counters above the floor
        self._kept: set[int] = set()  # those that somebody still needs the broker's word about
        self.lost: deque[int] = deque()
        self._outcomes: dict[int, Outcome] = {}

    def next_txid(self) -> TxId:
        """A transaction id never used before."""
        return TxId(self.cluster, self.home, self.id, next(self._numbers))

    def next_txid_text(self) -> tuple[int, str]:
        """The same as its counter and its text, which is what a transaction needs of it (0.3 us instead of 2)."""
        counter = next(self._numbers)
        return counter, f"{self._txid_prefix}{counter:x}"

    def keep(self, counter: int) -> None:
        """A branch in some database may come back: the broker must know the outcome until ``finished``."""
        with self._lock:
            self._kept.add(counter)

    def saw_outcome(self, counter: int) -> None:
        """Somebody was told the end; ``finished``, unless the outcome is still needed."""
        if counter not in self._kept:
            self.finished(counter)

    def finished(self, counter: int) -> None:
        """The end of the transaction with this counter was seen; once per counter."""
        with self._lock:
            self._kept.discard(counter)
            if counter == self._floor + 1 and not self._finished:  # one at a time, they end in order
                self._floor = counter
                return
            heapq.heappush(self._finished, counter)
            while self._finished and self._finished[0] <= self._floor + 1:
                self._floor = max(self._floor, heapq.heappop(self._finished))

    def found(self, counter: int, outcome: Outcome) -> None:
        """The end of a lost transaction, for ``told``; the broker need not keep it."""
        self._outcomes[counter] = outcome
        while len(self._outcomes) > _KNOWN_OUTCOMES_MAX:
            del self._outcomes[next(iter(self._outcomes))]
        self.finished(counter)

    def known_outcome(self, counter: int) -> Outcome | None:
        """What became of a transaction that was lost and found."""
        return self._outcomes.get(counter)

    @property
    def floor(self) -> int:
        """The highest n such that every counter up to n is finished; 0 if there is none."""
        return self._floor

    @property
    def wish(self) -> str:
        """What ``hello`` takes to resume it."""
        return resume_wish(self.id, self.epoch, self.secret)

    def is_same(self, other: ClientSession) -> bool:
        """Whether both name the same session of the same broker."""
        return (self.cluster, self.home, self.id, self.epoch) == (other.cluster, other.home, other.id, other.epoch)


def resume_wish(session: int, epoch: int, secret: str) -> str:
    """What ``hello`` takes to resume a session; with a higher epoch than it has, to take it over."""
    return f"{session:x}.{epoch}.{secret}"


def parse_hello(body: bytes) -> dict[str, Any]:
    """Read the answer to ``hello``.

    Raises:
        RemoteProtocolError: it is not one.
    """
    try:
        fields = json.loads(body)
    except ValueError:
        raise RemoteProtocolError(f"the answer to hello is not JSON: {body[:80]!r}") from None
    if not isinstance(fields, dict) or fields.get("protocol") != PROTOCOL:
        raise RemoteProtocolError(f"the answer to hello is not of protocol {PROTOCOL}: {body[:80]!r}")
    return fields
