"""Reports to the broker: whether a resource's database is reached, which branches are prepared there, and hazards.

Theory of operation. A resolver notes the branches that a round saw (``saw``) and its end (``report``). The broker gets
a report every REPORT_EVERY_S, and at once when the database is reached again or not any more, or when a branch begins
or ends to hang. The answer is not awaited: nothing depends on it, and the next report says the same.

*A hazard* is a transaction whose rows may be committed, or are, without their messages. The body of a block ended the
transaction by itself: whether its rows are committed cannot be known, and the messages were never sent. Or a committed
marker proves the rows, and the broker knows nothing of the transaction: it was restored from an older copy. Nothing can
be taken back. So the broker keeps it (``rollback ... hazard=``) and lists it until an operator forgets it; as long as
it is listed, the marker stays.

Invariants:
    * a database that is not reached keeps what was last seen there: its branches have not gone away;
    * no report fails a round.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple, Protocol
from urllib.parse import quote

from txmq.errors import ConfigError, RolledBackError, TxmqError
from txmq.model import TransactionKind
from txmq.runtime.ports import Clock
from txmq.xa.resolver_ports import REQUEST_TIMEOUT_S, Client

_REASON_LENGTH_MAX = 200  # characters; of 12 bytes at most, so that the line is not too long
REPORT_EVERY_S = 10.0
HANGS_AFTER_MS = 1000  # a living owner ends its branches before that
LISTED_MAX = 10
TEXT_LENGTH_MAX = 300


class Hazard(NamedTuple):
    """One such transaction."""

    txid: str
    kind: TransactionKind
    resource: str
    uuid: str
    reason: str

    def extensions(self) -> dict[str, str | int | bytes | None]:
        """Its fields in ``rollback``."""
        reason = self.reason.encode("utf-8", "replace").decode()[:_REASON_LENGTH_MAX]
        return {
            "hazard": quote(reason, safe=""), "resource": self.resource, "uuid": self.uuid, "kind": self.kind.value,
        }  # fmt: skip


def lost_messages(txid: str, kind: TransactionKind, resource: str, uuid: str) -> Hazard:
    """Of a transaction that a marker proves, and of which the broker knows nothing though it has its session."""
    reason = "the rows are committed, and the broker has lost the messages: was it restored from an older copy?"
    return Hazard(txid, kind, resource, uuid, reason)


class Hanging(NamedTuple):
    """A prepared branch that a round has left.

    Attributes:
        overdue_ms: since its transaction's deadline, on the database's clock; it is at least as old.
        why: the reason, in words.
    """

    txid: str
    bqual: str
    overdue_ms: int
    why: str


class Reported(Protocol):
    """The resource whose database it is."""

    @property
    def name(self) -> str:
        """The resource's name."""

    @property
    def uuid(self) -> str | None:
        """Identity of the database; None before it was reached."""


class Reporter:
    """See the module's docstring. One thread at a time."""

    def __init__(self, client: Client, resource: Reported, kind: TransactionKind, clock: Clock) -> None:
        self._client, self._resource, self._kind, self._clock = client, resource, kind, clock
        self._branches: list[Hanging] = []
        self._first_seen: dict[str, float] = {}
        self._due_at = float("-inf")
        self._reported: tuple[bool, bool] | None = None
        self._told = 0  # branches

    @property
    def hanging(self) -> list[Hanging]:
        """The branches that were last seen."""
        return list(self._branches)

    @property
    def is_unreachable(self) -> bool:
        """Whether the last report said that the database is not reached."""
        return self._reported is not None and not self._reported[0]

    def saw(self, branches: Iterable[Hanging]) -> None:
        """Note the branches that are prepared in the database."""
        now = self._clock.monotonic()
        self._branches = list(branches)
        self._first_seen = {one.txid: self._first_seen.get(one.txid, now) for one in self._branches}

    def report(self, *, is_reachable: bool, problem: Exception | None) -> None:
        """Send a report, if it is time or if something has changed."""
        if isinstance(problem, TxmqError) and not isinstance(problem, ConfigError | RolledBackError):
            return  # it is the broker that is away
        now = self._clock.monotonic()
        ages = {one.txid: self._age_ms(one, now) for one in self._branches}
        state = is_reachable, max(ages.values(), default=0) >= HANGS_AFTER_MS
        if now < self._due_at and state == self._reported:
            return
        self._due_at, self._reported, self._told = now + REPORT_EVERY_S, state, len(ages)
        oldest = sorted(self._branches, key=lambda one: -ages[one.txid])[:LISTED_MAX]
        body = {
            "kind": self._kind.value, "uuid": self._resource.uuid, "reachable": is_reachable,
            "why": None if problem is None else f"{type(problem).__name__}: {problem}"[:TEXT_LENGTH_MAX],
            "branches": len(ages), "age_ms": max(ages.values(), default=0),
            "oldest": [[one.txid, one.bqual, ages[one.txid], one.why[:TEXT_LENGTH_MAX]] for one in oldest],
        }  # fmt: skip
        with suppress(TxmqError):
            self._client.control.submit(
                "resource", "report", self._resource.name, body=[json.dumps(body).encode()], timeout=REQUEST_TIMEOUT_S
            )

    def end(self) -> None:
        """Before it goes: the broker keeps branches that were told for a day, and these are finished."""
        if self._told and not self._branches and not self.is_unreachable:
            self._due_at = float("-inf")
            self.report(is_reachable=True, problem=None)

    def _age_ms(self, one: Hanging, now: float) -> int:
        return max(0, one.overdue_ms, int((now - self._first_seen[one.txid]) * 1000))
