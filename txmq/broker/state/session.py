"""Sessions: the identity of a client at its home broker, and the outcomes of its transactions.

A session's number is issued once, journaled before the client gets it, and never reused; it doubles as the producer id
of the session's batches. A client needs the session's *secret* to resume it. The *epoch* rises when a client that has
the secret takes the session over; the former holder is refused from then on. A client that is done with a session
*closes* it: the secret is forgotten, so that no connection speaks for it again. Only a connection that does may send
its batches: what the network still holds of them is refused, and the broker needs their sequences no more.

Outcomes are kept per session as a *floor* and a window above it: a counter at or below the floor is
answered 410 (never executed, never called rolled back), one above it is looked up.

A transaction that was not known may be *fenced* for one database, by a user who may settle for that database only: no
decision with a branch there is accepted any more. Others are, so such a fence is no outcome.

``IssuedSessions`` knows which numbers this broker's history has issued: a fold over the journal, without an entry of
its own. A broker that was restored from an older copy of its directory does not know the sessions that it issued after
the copy was made; databases may hold committed rows under their transaction ids. It must not take these for sessions
that have ended: of those it has told every outcome. So a broker that was started before issues numbers from the time of
this start on, in ms, one after another: a start is one *run* of numbers, and a history is a run for each of its starts.

Invariants:
    * ``floor`` never falls; a key of ``outcomes`` at or below it is as good as gone (it leaves when it is the oldest).
    * the floor rises only over counters the client called finished, and only while more than ``outcomes_kept`` are
      kept;
    * however many unfinished ones precede them, finished ones leave;
    * ``_order`` names the counters of ``outcomes``, each once;
    * a fence leaves with the session, or when the floor has passed it: no decision is accepted after that;
    * while ``_is_frozen``, a checkpoint reads both: the first change after it copies them;
    * runs are in order, and neither meet nor overlap; only a number that was issued changes them: no request that names
      a session makes them grow;
    * a run that is beyond ``RUNS_MAX`` is forgotten, the oldest first: its sessions look never issued, so that what
      would prove a loss is kept once too often rather than never.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Final

EPOCH_MAX = 0x7FFF  # a record batch has 16 bits for it
_PASSED_OVER_MAX = 2  # two for each that comes: no more stay than are unfinished, and as many again
ROLLED_BACK = None
CommittedParts = tuple[tuple[int, int, int, int], ...]  # (topic id, partition, base offset, count) a part
Kept = CommittedParts | None  # the parts, or ROLLED_BACK
Outcomes = dict[int, Kept]
Fences = dict[int, tuple[str, ...]]
Frozen = tuple[int, int, str, int, int, int, deque[int], Outcomes, str, str, Fences]
FROZEN_FIELDS: Final = 11
_FENCED: Final = "fenced "  # begins such an outcome of a checkpoint
_NO_FENCES: Final[Fences] = {}
RUNS_MAX: Final = 10_000  # starts in which a session was issued
RUN_FIELDS: Final = 2


class BrokerSession:
    """One client session.

    Attributes:
        number: the session id, also the producer id.
        epoch: how often it was taken over, at least; a request with a lower one is fenced.
        secret: 32 hex digits; empty if it is closed, or an older broker issued it: it cannot be resumed then.
        user: whose it is; empty: of nobody, because there were no users.
        outcomes: counter -> the committed parts, or None for rolled back.
        fences: counter -> uuids of databases for which it is fenced.
        over: so many outcomes more than ``kept_max`` there are.
        finished: the highest floor the client has stated.
        bound: number of the connection that holds it now, or None.
        gone_ms: wall time its connection was lost, or the broker was started.
        owed: its transactions that are prepared, or decided with an incomplete branch.
        is_ended: the broker has let go of it.
    """

    __slots__ = (
        "_is_frozen", "_order", "bound", "epoch", "fences", "finished", "floor", "gone_ms", "is_ended", "name",
        "number", "outcomes", "over", "owed", "secret", "used_ms", "user",
    )  # fmt: skip

    def __init__(self, number: int, epoch: int, name: str, used_ms: int, secret: str = "", user: str = "") -> None:
        self.number, self.epoch, self.name, self.used_ms, self.secret = number, epoch, name, used_ms, secret
        self.user = user
        self.floor = self.finished = self.over = 0
        self.outcomes: Outcomes = {}
        self.fences: Fences = {}
        # Oldest first. The first key of a dict would do, but finding it walks over every key that left since the dict
        # last grew: a microsecond of each transaction.
        self._order: deque[int] = deque()
        self._is_frozen = False
        self.bound: int | None = None
        self.owed, self.is_ended = 0, False
        self.gone_ms = used_ms

    def owe(self, more: int, unsettled: dict[str, int]) -> None:
        """So many more of its transactions are unsettled; counted by user in ``unsettled``, too."""
        self.owed += more
        if self.user:
            count_for(unsettled, self.user, more)

    def take(self, epoch: int, user: str, unsettled: dict[str, int]) -> None:
        """A client took it over; if it was nobody's, it is the ``user``'s from now on."""
        self.epoch = epoch
        if user:
            self.user = user
            count_for(unsettled, user, self.owed)

    def keep(self, counter: int, outcome: Kept, floor: int, kept_max: int) -> int:
        """Keep an outcome; let those leave that the client called finished, oldest first, beyond ``kept_max``.

        Returns:
            how much ``over`` has grown.
        """
        if self._is_frozen:
            self.outcomes, self._order, self._is_frozen = self.outcomes.copy(), self._order.copy(), False
        if counter not in self.outcomes:
            self._order.append(counter)
        self.outcomes[counter] = outcome
        if floor > self.finished:
            self.finished = floor
        passed_over = 0
        while len(self.outcomes) > kept_max:
            oldest = self._order[0]
            if oldest <= self.finished:
                del self.outcomes[self._order.popleft()]
                if oldest > self.floor:
                    self.floor = oldest
            elif passed_over < _PASSED_OVER_MAX:
                # To the end: one that is never finished (a fence for an invented counter) must not hold them.
                self._order.rotate(-1)
                passed_over += 1
            else:
                return self.recount(kept_max)
        return self.recount(kept_max) if self.over else 0

    def recount(self, kept_max: int) -> int:
        """Set ``over``; how much it has grown."""
        former, self.over = self.over, max(0, len(self.outcomes) - kept_max)
        return self.over - former

    def fence(self, counter: int, uuid: str) -> None:
        """No decision of it with a branch in that database is accepted any more."""
        self.fences[counter] = (*self.fences.get(counter, ()), uuid)

    def close(self) -> None:
        """Its client is done with it: nobody has its secret any more, so no connection speaks for it."""
        self.secret = ""

    @property
    def tells_nothing(self) -> bool:
        """Whether no transaction of it was ever known here."""
        return not (self.owed or self.outcomes or self.fences or self.floor or self.finished)

    @property
    def has_finished_outcomes(self) -> bool:
        """Whether ``rest`` drops something."""
        return any(counter <= self.finished for kept in (self.outcomes, self.fences) for counter in kept)

    def rest(self) -> None:
        """Its client is away: outcomes it called finished leave, since no other client asks for them."""
        kept = [counter for counter in self._order if counter > self.finished]
        self.outcomes = {counter: self.outcomes[counter] for counter in kept}
        self._order, self._is_frozen = deque(kept), False
        self.floor = max(self.floor, self.finished)
        self.fences = {counter: uuids for counter, uuids in self.fences.items() if counter > self.floor}

    def freeze(self) -> Frozen:
        """A copy in constant time, however many outcomes; ``row`` makes it JSON-able, in any thread."""
        self._is_frozen = True
        return (
            self.number, self.epoch, self.name, self.used_ms, self.floor, self.finished, self._order, self.outcomes,
            self.secret, self.user, self.fences.copy() if self.fences else _NO_FENCES,
        )  # fmt: skip

    def snapshot(self) -> list[object]:
        """JSON-able state."""
        return row(self.freeze())

    @classmethod
    def restore(cls, number: int, epoch: int, name: str, used_ms: int, *rest: object) -> BrokerSession:
        """The reverse of ``snapshot``."""
        session = cls(number, epoch, name, used_ms)
        floor, finished, outcomes, *whose = rest
        session.secret = str(whose[0]) if whose else ""
        session.user = str(whose[1]) if len(whose) > 1 else ""
        assert isinstance(floor, int) and isinstance(finished, int) and isinstance(outcomes, list)  # noqa: PT018
        session.floor, session.finished = floor, finished
        kept = {counter: _parts(outcome) for counter, outcome in outcomes if not _is_fence(outcome)}
        session.outcomes = kept
        fenced = [(counter, outcome.split()[1:]) for counter, outcome in outcomes if _is_fence(outcome)]
        session.fences = {counter: tuple(uuids) for counter, uuids in fenced}
        session._order.extend(session.outcomes)
        return session


def count_for(counts: dict[str, int], user: str, more: int) -> None:
    """So many more are the user's; nothing is kept of a user without any, or of nobody."""
    if user and more:
        left = counts.get(user, 0) + more
        if left:
            counts[user] = left
        else:
            del counts[user]


def row(frozen: tuple[Any, ...]) -> list[object]:
    """What ``BrokerSession.restore`` takes, of what ``freeze`` returned."""
    *fields, order, outcomes, secret, user, fences = frozen
    whose = (secret, user) if user else (secret,)
    # First: if a counter has an outcome as well, older brokers go by that.
    fenced = [[counter, _FENCED + " ".join(uuids)] for counter, uuids in fences.items()]
    return [*fields, [*fenced, *([counter, outcomes[counter]] for counter in order)], *whose]


def _is_fence(outcome: object) -> bool:
    return isinstance(outcome, str) and outcome.startswith(_FENCED)


def _parts(outcome: Iterable[Iterable[int]] | None) -> Kept:
    if outcome is None:
        return None
    return tuple((topic, partition, offset, count) for topic, partition, offset, count in outcome)


class IssuedSessions:
    """All numbers that were issued: the last of each run, and with it the first."""

    __slots__ = ("_firsts", "_lasts")

    def __init__(self) -> None:
        self._firsts, self._lasts = list[int](), list[int]()

    def __contains__(self, number: int) -> bool:
        run = bisect_left(self._lasts, number)
        return run < len(self._lasts) and self._firsts[run] <= number

    def add(self, number: int) -> None:
        """A number was issued. Numbers come in order; those that another source of ids draws need not."""
        run = bisect_left(self._lasts, number)
        if run < len(self._lasts) and self._firsts[run] <= number:
            return
        is_behind = run > 0 and self._lasts[run - 1] == number - 1
        is_before = run < len(self._lasts) and self._firsts[run] == number + 1
        if is_behind and is_before:
            del self._firsts[run], self._lasts[run - 1]
        elif is_behind:
            self._lasts[run - 1] = number
        elif is_before:
            self._firsts[run] = number
        else:
            self._firsts.insert(run, number)
            self._lasts.insert(run, number)
            if len(self._lasts) > RUNS_MAX:
                del self._firsts[0], self._lasts[0]

    def freeze(self) -> Iterator[tuple[int, int]]:
        """A copy of each run."""
        return zip(self._firsts, self._lasts, strict=True)

    def restore(self, runs: Iterable[Iterable[int]]) -> None:
        """What ``freeze`` copied."""
        self._firsts, self._lasts = list[int](), list[int]()
        for first, last in runs:
            self._firsts.append(first)
            self._lasts.append(last)
