"""Half messages that are due for a check-back, and members of producer groups that wait for one: in memory only.

A half message has at most one time at which it is looked at, set by the verb ``checks``. From then on it is *ready*,
until it is handed out. Half messages are kept by name: one that is settled leaves when its turn comes.

Invariant: idle time costs nothing, however many halves and members wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from txmq.broker.client_connection import ClientConnection
from txmq.broker.state.deadlines import Deadlines
from txmq.broker.state.transaction import Transaction

Name = tuple[int, int]  # session and counter
_NEVER = 0  # ``look_at_ms`` of one that no time is set for
_READY = -1
_SETTLED_MAX = 64  # names of settled halves that are kept, beyond the number of unsettled ones


class CheckPoll:
    """A member of a producer group that waits for a half to be due."""

    __slots__ = ("client", "deadline_ms", "group", "is_answered", "limit", "opaque")

    def __init__(self, client: ClientConnection, opaque: bytes, group: str, limit: int, deadline_ms: int) -> None:
        self.client, self.opaque, self.group = client, opaque, group
        self.limit, self.deadline_ms, self.is_answered = limit, deadline_ms, False


class CheckBacks:
    """See the module's docstring.

    Attributes:
        polls: members that wait, by group.
        over: when each of them has waited long enough.
    """

    def __init__(self, transactions: Mapping[Name, Transaction]) -> None:
        self._transactions = transactions
        self._times: Deadlines[tuple[Name, int]] = Deadlines(self._is_over)
        self._ready: dict[str, deque[Name]] = {}
        self._ready_count, self._ready_bound = 0, _SETTLED_MAX
        self.polls: dict[str, dict[CheckPoll, None]] = {}
        self.over: Deadlines[CheckPoll] = Deadlines(lambda poll: poll.is_answered)

    # --- halves ------------------------------------------------------------------------------------------------------

    def look_at(self, half: Transaction, at_ms: int) -> None:
        """Look at a half message at that time, or earlier if an earlier time is set."""
        if half.look_at_ms == _NEVER or half.look_at_ms > at_ms:
            half.look_at_ms = at_ms
            self._times.add(at_ms, (half.name, at_ms))

    def _is_over(self, look: tuple[Name, int]) -> bool:
        """Whether the half is settled, or is looked at at another time."""
        half = self._transactions.get(look[0])
        return half is None or half.look_at_ms != look[1]

    def take_looks(self, now_ms: int) -> list[Transaction]:
        """Halves that must be looked at now."""
        halves = [self._transactions[name] for name, _ in self._times.take_due(now_ms)]
        for half in halves:
            half.look_at_ms = _NEVER
        return halves

    def put_ready(self, half: Transaction) -> None:
        """It may be handed out."""
        if half.look_at_ms == _READY:
            return
        if self._ready_count >= self._ready_bound:
            self._drop_settled()
        half.look_at_ms = _READY
        self._ready.setdefault(half.meta["resource"], deque()).append(half.name)
        self._ready_count += 1

    def _drop_settled(self) -> None:
        kept = {group: deque(n for n in names if n in self._transactions) for group, names in self._ready.items()}
        self._ready = {group: names for group, names in kept.items() if names}
        self._ready_count = sum(map(len, self._ready.values()))
        self._ready_bound = 2 * self._ready_count + _SETTLED_MAX

    def take_ready(self, group: str) -> Transaction | None:
        """The half of a group that has been ready longest."""
        names = self._ready.get(group, ())
        while names:
            half = self._transactions.get(names.popleft())
            self._ready_count -= 1
            if not names:
                del self._ready[group]
            if half is not None:
                half.look_at_ms = _NEVER
                return half
        return None

    # --- waiting members ---------------------------------------------------------------------------------------------

    def wait(self, poll: CheckPoll) -> None:
        """A member waits."""
        self.polls.setdefault(poll.group, {})[poll] = None
        self.over.add(poll.deadline_ms, poll)

    def answered(self, poll: CheckPoll) -> None:
        """It waits no more."""
        poll.is_answered = True
        waiting = self.polls.get(poll.group, {})
        waiting.pop(poll, None)
        if not waiting:
            self.polls.pop(poll.group, None)
