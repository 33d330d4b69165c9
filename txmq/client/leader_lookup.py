"""Where the homes of a cluster are led, looked up by all clients of a process together.

Theory of operation. A look-up costs the registry a session. While no broker answers, each connection of each client
would ask anew at every attempt. So one look-up is under way at a time, and those that come meanwhile share its result.
It is followed by a pause, which doubles, with jitter, while look-ups come one after another: for so long the
answer is repeated. A failure that is nearly over is waited for; it is repeated where the caller has no time to ask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from txmq.client.transport.reconnecting import Address
from txmq.errors import BrokerAwayError, TxmqError
from txmq.runtime.backoff import Backoff
from txmq.runtime.ports import Clock, Random
from txmq.runtime.threads import Attempt, Exclusive, watch_forks

PAUSE_S: Final = Backoff(0.1, 2.0)
QUIET_S: Final = 2 * PAUSE_S.most  # without a look-up for so long the next pause is the shortest again
_JITTER_BITS: Final = 16


class _Answer(NamedTuple):
    """The result of a look-up, and when it ended."""

    addresses: Sequence[Address]
    error: TxmqError | None
    at: float

    def again(self) -> Sequence[Address]:
        """The addresses; or the error, as one of the caller's own."""
        if self.error is not None:
            raise type(self.error)(str(self.error))
        return self.addresses


class LeaderLookup:
    """See the module's docstring. Thread safety: any thread.

    Args:
        ask: asks the registry, within so many seconds.
    """

    def __init__(self, ask: Callable[[float], Sequence[Address]], clock: Clock, random: Random) -> None:
        self._ask, self._clock, self._random = ask, clock, random
        self._turn = Exclusive()
        self._answer: _Answer | None = None
        self._pause_s = 0.0
        self._not_before = float("-inf")
        watch_forks(self)

    def find(self, timeout: float) -> Sequence[Address]:
        """The addresses. Raises what ``ask`` raised, now or a moment ago."""
        begun = self._clock.monotonic()
        deadline, me = begun + timeout, Attempt()
        try:
            is_mine = self._turn.take_before(deadline, me, self._clock)
            answer = self._answer
            if answer is not None and (answer.at >= begun or not is_mine or self._may_be_repeated(answer, deadline)):
                return answer.again()
            if not is_mine:
                raise BrokerAwayError("the registry does not tell where the brokers are: another look-up is under way")
            self._answer = self._look(max(deadline - self._clock.monotonic(), 0.001))
            return self._answer.again()
        finally:
            me.is_over = True
            self._turn.leave(me)

    def _may_be_repeated(self, answer: _Answer, deadline: float) -> bool:
        now = self._clock.monotonic()
        left_s = self._not_before - now
        if left_s <= 0:
            return False
        if answer.error is None or left_s > (deadline - now) / 2:
            return True
        self._clock.sleep(left_s)
        return False

    def _look(self, timeout: float) -> _Answer:
        begun = self._clock.monotonic()
        is_quiet = begun - self._not_before > QUIET_S
        self._pause_s = PAUSE_S.following(0.0 if is_quiet else self._pause_s)
        try:
            return _Answer(self._ask(timeout), None, self._clock.monotonic())
        except TxmqError as error:
            return _Answer((), error.with_traceback(None), self._clock.monotonic())
        finally:
            jitter = 0.75 + self._random.bits(_JITTER_BITS) / (1 << _JITTER_BITS) / 2
            self._not_before = self._clock.monotonic() + self._pause_s * jitter

    def forked(self) -> None:
        """In a forked child: a thread of the parent may have had its turn."""
        self._turn = Exclusive()
