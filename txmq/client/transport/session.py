"""The client's session at its broker, from which txids and producer sequences come.

A session is opened when it is first needed, resumed by each new connection, and replaced if the broker does not know it
any more (410) or is another broker than the one that issued it. Requests that the old session left unanswered then stay
unknown, and their callers get that as an error.

Invariants:
    * A counter is issued once per session: a txid never names two transactions.
    * ``finished_through`` is the highest n with all counters up to n finished; it never falls.
    * A counter whose end was not seen holds ``finished_through``, and the broker keeps all outcomes above it. It is
      *lost*: a later transaction asks for its outcome (``transaction/conversation.py``), which is kept here for callers
      that ask by txid.
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
REQUEST_SIZE_BYTES_MAX = 16 << 20  # until the broker has announced its own
_KNOWN_OUTCOMES_MAX = 4096  # outcomes of lost transactions that are kept


class ClientSession:
    """One session, from the answer to ``hello``.

    Attributes:
        cluster, home: ids of the cluster and of the broker whose journal decides.
        id: the session's number; also the producer id of its batches.
        epoch: rises if another process takes the session over; this one is fenced then.
        secret: needed to resume the session; never logged.
        in_flight_max: unanswered batches per partition that the broker tells apart from duplicates.
        request_size_bytes_max: largest body of a request.
        fences_by_database: the broker knows ``outcome <txid> fence uuid=``.
        clock_ahead_ms: the broker's wall clock less this process's monotonic clock, as last measured; deadlines are
            sent in the broker's time, because this machine's wall clock may be set.
        lost: counters of local transactions whose end was not seen and that no resolver asks about.
        finished_through: the highest n such that every counter up to n is finished; 0 if there is none.

    Thread safety: any thread.
    """

    def __init__(self, fields: dict[str, Any], monotonic_ms: int | None = None) -> None:
        try:
            self.cluster, self.home = int(fields["cluster"], 16), int(fields["home"], 16)
            self.id, self.epoch = int(fields["session"], 16), int(fields["epoch"])
            self.secret = str(fields["secret"])
            self.in_flight_max = int(fields["in_flight_max"])
            self.request_size_bytes_max = int(fields["request_size_bytes_max"])
            self.fences_by_database = fields.get("database_fences") is True
            self.clock_ahead_ms = 0 if monotonic_ms is None else int(fields["time_ms"]) - monotonic_ms
        except (KeyError, TypeError, ValueError) as error:
            raise RemoteProtocolError(f"the answer to hello lacks or garbles {error}") from None
        self._txid_prefix = str(TxId(self.cluster, self.home, self.id, 0))[:-1]
        self._numbers = count(1)
        self._lock = Lock()
        self.finished_through = 0
        self._finished: list[int] = []  # heap of the finished counters above it
        self._kept: set[int] = set()  # those whose outcome a resolver may still ask for
        self.lost: deque[int] = deque()
        self._outcomes: dict[int, Outcome] = {}

    def next_txid(self) -> tuple[int, str]:
        """A new transaction id as counter and text, without making a ``TxId``."""
        counter = next(self._numbers)
        return counter, f"{self._txid_prefix}{counter:x}"

    def last_counter(self) -> int:
        """The counter of the newest transaction id, 0 if there is none; to be asked when no other is given out."""
        return next(self._numbers) - 1

    def keep(self, counter: int) -> None:
        """Make the broker keep the outcome until ``finished``: a resolver may ask for it."""
        with self._lock:
            self._kept.add(counter)

    def saw_outcome(self, counter: int) -> None:
        """A caller knows the outcome: ``finished``, unless a resolver may still ask for it."""
        if counter not in self._kept:
            self.finished(counter)

    def finished(self, counter: int) -> None:
        """The outcome of a transaction was seen; once per counter."""
        with self._lock:
            self._kept.discard(counter)
            if counter == self.finished_through + 1 and not self._finished:  # one at a time, they end in order
                self.finished_through = counter
                return
            heapq.heappush(self._finished, counter)
            while self._finished and self._finished[0] <= self.finished_through + 1:
                self.finished_through = max(self.finished_through, heapq.heappop(self._finished))

    def found(self, counter: int, outcome: Outcome) -> None:
        """Note the outcome of a lost transaction; the broker need not keep it any more."""
        self._outcomes[counter] = outcome
        while len(self._outcomes) > _KNOWN_OUTCOMES_MAX:
            del self._outcomes[next(iter(self._outcomes))]
        self.finished(counter)

    def known_outcome(self, counter: int) -> Outcome | None:
        """The outcome of a lost transaction that was asked for, or None."""
        return self._outcomes.get(counter)

    @property
    def wish(self) -> str:
        """The extension ``session`` of ``hello`` that resumes it."""
        return resume_wish(self.id, self.epoch, self.secret)

    def is_same(self, other: ClientSession) -> bool:
        """Whether both name the same session of the same broker."""
        return (self.cluster, self.home, self.id, self.epoch) == (other.cluster, other.home, other.id, other.epoch)


def resume_wish(session: int, epoch: int, secret: str) -> str:
    """The extension ``session`` of ``hello`` that resumes a session, or takes it over with a higher epoch."""
    return f"{session:x}.{epoch}.{secret}"


def parse_hello(body: bytes) -> dict[str, Any]:
    """Read the answer to ``hello``.

    Raises:
        RemoteProtocolError: not such an answer.
    """
    try:
        fields = json.loads(body)
    except ValueError:
        raise RemoteProtocolError(f"the answer to hello is not JSON: {body[:80]!r}") from None
    if not isinstance(fields, dict) or fields.get("protocol") != PROTOCOL:
        raise RemoteProtocolError(f"the answer to hello is not of protocol {PROTOCOL}: {body[:80]!r}")
    return fields
