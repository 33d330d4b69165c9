"""When which home is asked about a branch: parts in doubt, and placed parts that must be reported.

Theory of operation. A prepared branch is looked at a second after it was prepared: by then its client has told its
outcome, or is in trouble. While it is undecided, its look comes again after pauses that grow: to 30 s if the home has
the transaction prepared, which may last; else to 2 s. If a commit must wait for the branch, or the home that decides is
led anew or was lost, it has an extra look at once. A placed part is reported as soon as its record is durable. Each
look becomes one ask of the home that decided (``verbs/branch_resolving.py``), and the answer, or the loss of the
connection, comes back under the ask's number.

A transaction that was prepared here for longer may have branches whose homes look at it every 30 s. When it is decided,
and a home has not reported its branch within a second, that home is reminded: asked for the branch's outcome, it looks.
After 30 s it has looked by itself, if it is there.

A home that cannot be reached is tried once a second, or as soon as the registry has a new leader of it, with one ask:
however many branches wait for it. The others follow when it has greeted.

In memory only: after a restart each branch is looked at anew.

Invariants:
    * a branch has one ask without an answer at a time;
    * a home has at most ``ASKED_MAX`` asks without an answer, and one that cannot be reached is left alone for a while.
      What waits for one home keeps nothing from another one;
    * no look is lost: it ends when its branch does;
    * a reminder ends when its home has answered, has reported, or would have looked by itself: none stays for a home
      that is lost for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from txmq.broker.state.deadlines import Deadlines
from txmq.broker.state.decisions import Name
from txmq.broker.state.transaction import Transaction
from txmq.runtime.backoff import Backoff
from txmq.xid import TxId

FIRST_LOOK_MS: Final = 1000
PAUSE_MS: Final = 1000
PAUSE_MS_MAX: Final = 2000
PREPARED_PAUSE_MS_MAX: Final = 30_000
HURRY_PAUSE_MS: Final = 250  # between two extra looks at a branch
AWAY_MS: Final = Backoff(250, 1000)  # until a home that cannot be reached is tried again
ASKED_MAX: Final = 1000


class BranchAsk(NamedTuple):
    """An effect: a request to the leader of another home. The answer comes back under its number."""

    number: int
    home: int
    verb: str
    txid: str
    extensions: Mapping[str, str | None]

    @property
    def arguments(self) -> tuple[str, ...]:
        """Of the request."""
        return (self.txid,)


class Look(NamedTuple):
    """One branch here, about which the home that decides must be asked.

    Attributes:
        of: id of the transaction at that home.
        attempt: how often that was done without an end.
        is_fencing: its owner is gone: nothing that is not decided may be decided any more.
        is_extra: the branch has its own look, too, which comes later.
        is_alarmed: an operator was told that it has no end.
    """

    name: Name
    of: str
    attempt: int = 0
    is_fencing: bool = False
    is_extra: bool = False
    is_alarmed: bool = False

    @property
    def other(self) -> str:
        """The transaction's id at the home that is asked."""
        return self.of


class Reminder(NamedTuple):
    """One branch that its own home must look at: the transaction was decided here.

    Attributes:
        branch: its id at that home.
        is_committed: the decision; that home reports it then.
        until_ms: that home has looked by itself.
    """

    name: Name
    branch: str
    is_committed: bool
    until_ms: int

    @property
    def other(self) -> str:
        """The transaction's id at the home that is asked."""
        return self.branch


_Key = tuple[Name, str]
"""A name, and the other home's id of the transaction: a decision may have several."""


class _AskedHome:
    """The asks of one home."""

    __slots__ = ("asked", "failures", "quiet_until_ms", "ready")

    def __init__(self) -> None:
        self.ready: dict[_Key, None] = {}
        self.asked: dict[int, _Key] = {}
        self.failures = self.quiet_until_ms = 0


class BranchAsks:
    """See the module's docstring.

    Args:
        is_over: whether a look's branch is settled and reported, or a reminder is needed no more.

    Attributes:
        has_ready: whether ``take`` may find something.
    """

    def __init__(self, is_over: Callable[[Look | Reminder], bool]) -> None:
        self._is_over = is_over
        self._later: Deadlines[Look | Reminder] = Deadlines(is_over)
        self._homes: dict[int, _AskedHome] = {}
        self._pending: dict[_Key, Look | Reminder] = {}  # those that are ready or asked
        self._home_of: dict[int, int] = {}  # of an ask that has no answer, by number
        self._next_number = 1
        self.has_ready = False

    def at(self, at_ms: int, look: Look) -> None:
        """Look at that time."""
        self._later.add(at_ms, look)

    def now(self, look: Look | Reminder) -> None:
        """Look, or remind, as soon as the home can be asked; nothing if that is so already."""
        key = look.name, look.other
        pending = self._pending.get(key)
        if pending is None:
            self._home(TxId.parse(look.other).home).ready[key] = None
            self.has_ready = True
        if pending is None or (isinstance(pending, Look) and pending.is_extra):
            self._pending[key] = look  # the branch's own look goes on from the answer to an extra one

    def hurry(self, branches: Iterable[Transaction], now_ms: int) -> None:
        """Look at these soon, whenever their own looks come: a commit waits for them, or their home is back."""
        for branch in branches:
            if branch.hurried_ms > now_ms:
                continue  # such a look is still to come
            at_ms, look = branch.hurried_ms + HURRY_PAUSE_MS, Look(branch.name, branch.meta["of"], is_extra=True)
            branch.hurried_ms = max(now_ms, at_ms)
            if at_ms > now_ms:
                self.at(at_ms, look)
            else:
                self.now(look)

    def remind(self, branches: Iterable[str], name: Name, now_ms: int, *, is_committed: bool) -> None:
        """A transaction that was prepared here is decided: remind the homes of its branches, if they say nothing."""
        for txid in branches:
            reminder = Reminder(name, txid, is_committed, now_ms + PREPARED_PAUSE_MS_MAX)
            self._later.add(now_ms + FIRST_LOOK_MS, reminder)

    def again(self, look: Look, now_ms: int, latest_ms: int = 0, pause_ms_max: int = PAUSE_MS_MAX) -> None:
        """Look once more after a pause that grows; not if the branch has another look.

        Args:
            latest_ms: look then at the latest, however long the pause; 0: no such limit.
        """
        if look.is_extra:
            return
        at_ms = now_ms + Backoff(PAUSE_MS, pause_ms_max).after(look.attempt)
        self.at(min(at_ms, latest_ms or at_ms), look._replace(attempt=look.attempt + 1, is_fencing=False))

    def tick(self, now_ms: int) -> None:
        """Time has passed."""
        for look in self._later.take_due(now_ms):
            self.now(look)
        self.has_ready = any(home.ready for home in self._homes.values())

    def take(self, now_ms: int) -> Iterator[tuple[int, Look | Reminder]]:
        """What is asked now, each under its number."""
        self.has_ready = False
        for number, home in self._homes.items():
            asked_max = 1 if home.failures else ASKED_MAX
            while home.ready and len(home.asked) < asked_max and home.quiet_until_ms <= now_ms:
                key = next(iter(home.ready))
                del home.ready[key]
                look = self._pending[key]
                if self._is_over(look):
                    del self._pending[key]
                    continue
                ask = self._next_number
                self._next_number += 1
                home.asked[ask], self._home_of[ask] = key, number
                yield ask, look

    def answered(self, number: int) -> Look | Reminder | None:
        """An ask has its answer; None if it was given up before."""
        home = self._homes.get(self._home_of.pop(number, 0))
        key = home.asked.pop(number, None) if home is not None else None
        if home is None or key is None:
            return None
        self.has_ready = self.has_ready or bool(home.ready)
        return self._pending.pop(key)

    def reached(self, number: int) -> None:
        """A home has greeted: it is asked all that it must be asked."""
        home = self._home(number)
        home.failures = home.quiet_until_ms = 0
        self.has_ready = self.has_ready or bool(home.ready)

    def led_anew(self, number: int) -> None:
        """A home has another leader: it is tried at once."""
        home = self._homes.get(number)
        if home is not None:
            home.quiet_until_ms = 0
            self.has_ready = self.has_ready or bool(home.ready)

    def lost(self, number: int, now_ms: int) -> bool:
        """The connection to a home is lost, or there is none: what it was asked is asked again.

        Returns:
            Whether it is lost anew: it was reached before.
        """
        home = self._home(number)
        for ask in home.asked:
            del self._home_of[ask]
        home.ready, home.asked = dict.fromkeys([*home.asked.values(), *home.ready]), {}
        home.quiet_until_ms = now_ms + AWAY_MS.after(home.failures)
        home.failures += 1
        return home.failures == 1

    def _home(self, number: int) -> _AskedHome:
        home = self._homes.get(number)
        if home is None:
            home = self._homes[number] = _AskedHome()
        return home
