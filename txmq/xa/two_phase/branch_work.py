"""The values that a round of ``BranchResolver`` works on. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from txmq.xa.resolver_ports import OWNER_GONE_MS, Answer
from txmq.xa.two_phase.heuristic_outcome import Verdict
from txmq.xa.two_phase.resource_ports import ListedXid
from txmq.xid import Xid


class Decided(NamedTuple):
    """A branch of this resource that the broker has decided to commit."""

    txid: str
    xid: Xid
    has_marker: bool
    wrote: bool
    may_kill: bool


class Orphan(NamedTuple):
    """A prepared branch whose transaction is not among the decided ones."""

    listed: ListedXid
    txid: str
    is_given_up: bool  # the deadline has passed by a second, or this process itself has left it


class Work:
    """A round's results for decided branches.

    Attributes:
        sent: ``complete`` requests whose answers are not awaited yet, each with its verdict.
        finished: txids whose branch here is complete.
        suspects: txids whose branch looks lost.
        missing: branches that are not there, with what that means once a fencing token is drawn.
    """

    __slots__ = ("finished", "missing", "sent", "suspects")

    def __init__(self) -> None:
        self.sent: deque[tuple[str, Verdict, Answer]] = deque()
        self.finished: set[str] = set()
        self.suspects: set[str] = set()
        self.missing: list[tuple[Decided, Verdict]] = []


class Watched(NamedTuple):
    """A transaction that an owner in this process left, and a callback for its end."""

    txid: str
    on_resolved: Callable[[], None]


def is_gone(owner_line: str) -> bool:
    """Read ``owner connected`` or ``owner gone <ms>``."""
    words = owner_line.split()
    return words[:2] == ["owner", "gone"] and len(words) == 3 and int(words[2]) >= OWNER_GONE_MS
