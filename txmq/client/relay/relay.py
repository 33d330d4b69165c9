"""``client.relay(outbox)``: a thread that takes an outbox's messages to the broker.

Any number of relays of one outbox may run: one has the lease, the others wait. A process that dies leaves its page to
the next one, which learns what became of it.

Source: the transactional outbox; what is different is in ``txmq/outbox/relay_core.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Self

from txmq.client.relay.broker_side import RelayBroker
from txmq.client.relay.database_side import Durability, RelayDatabase
from txmq.errors import ClosedError, ConfigError, OutboxStoppedError, RequestTimeoutError
from txmq.outbox.outbox import Outbox
from txmq.outbox.relay_core import (
    PAGE_ROWS,
    Away,
    Chain,
    Claim,
    Connect,
    Lock,
    NewTxid,
    Outcome,
    Pause,
    Peek,
    Read,
    RelayCore,
    RelayRow,
    Send,
    Stop,
    Topics,
    Unlock,
    Why,
)
from txmq.outbox.tables import Backlog
from txmq.runtime.backoff import Backoff
from txmq.runtime.clocks import OSRandom
from txmq.runtime.logging import get_logger
from txmq.runtime.ports import Clock, Random
from txmq.runtime.threads import Signal, start_daemon, thread_number
from txmq.xa.database.refusals import ASK_AGAIN_S

if TYPE_CHECKING:
    from txmq.client.client import Client

LOOK_EVERY_S: Final = 2.0
WAITS_MS_MAX: Final = 60_000
TOLD_EVERY_S: Final = 60.0
_LOOKS_SHARE: Final = 100  # of the time at most: a million rows take a fifth of a second to count
_THREAD_NAME: Final = "txmq-relay"
_IDLE_S: Final = Backoff(0.002, 0.020)
_TURN_EVERY_S: Final = 1.0  # of an idle relay
_AWAY_S: Final = Backoff(0.050, 2.0)
_HELD_S: Final = 0.5
_LOOK_AGAIN_S: Final = 1.0
_ASK_AGAIN_S: Final = Backoff(10.0, 120.0)  # whether a broker was put right: it is asked seldom, and ever more so
_RENEW_EVERY_S: Final = 3.0
_BUSY_ROWS: Final = 8  # a page of so many, and less than a full one: more are coming, and a page costs what it costs
_BUSY_TURN_S: Final = 0.010
_TOPICS_S: Final = 30.0
_CLOSE_S: Final = 10.0


class BacklogWatch:
    """How much waits in an outbox, and for how long: looked at now and then, and told where messages wait too long.

    Args:
        look: asks the database; None if it is away.

    Attributes:
        backlog: what was seen last; None: nothing yet.

    Thread safety: the relay's thread.
    """

    def __init__(self, look: Callable[[], Backlog | None], clock: Clock, log: Any) -> None:
        self._look, self._clock, self._log = look, clock, log
        self._due_at = self._tell_at = float("-inf")
        self.backlog: Backlog | None = None

    def look(self, reason: str) -> None:
        """Look, if it is time to. In no transaction.

        Args:
            reason: why messages may wait.
        """
        begun = self._clock.monotonic()
        if begun < self._due_at:
            return
        found = self._look()
        now = self._clock.monotonic()
        self._due_at = now + max(LOOK_EVERY_S, (now - begun) * _LOOKS_SHARE)
        if found is None:
            return
        self.backlog = found
        if found.oldest_ms is not None and found.oldest_ms >= WAITS_MS_MAX and now >= self._tell_at:
            self._tell_at = now + TOLD_EVERY_S
            self._log.warning(
                "outbox: messages wait", waiting=found.waiting, oldest_s=found.oldest_ms // 1000, parked=found.parked,
                reason=reason,
            )  # fmt: skip


class Relay:
    """A running relay, made by ``client.relay``; usable as a block. A forked child has none.

    Args:
        connect: opens a connection to the outbox's database, for this relay alone.
        durability: ``weak`` accepts a database that may lose commits in a power loss, which may stop the line then.

    Attributes:
        stopped: why it sends nothing: database and broker are not of one history. It goes on when an operator has
            acted, or when the two agree again. None while all is well.
        sent: how many messages it has taken to the broker.

    Thread safety: any thread.
    """

    def __init__(
        self, client: Client, outbox: Outbox, connect: Callable[[], Any], random: Random | None = None,
        durability: Durability = "forced",
    ) -> None:  # fmt: skip
        self.outbox, self._client, self._clock = outbox, client, client.clock
        self._holder = f"{(random or OSRandom()).bits(64):016x}"
        self._database = RelayDatabase(outbox, connect, client.clock, durability)
        self._broker = RelayBroker(client, outbox)
        self._log = get_logger(outbox=outbox.name)
        self._woken, self._ended, self._idle = Signal(), Signal(), Signal()
        self._is_ending = False
        self._failures = self._idles = 0
        self._drains = 0
        self._turn_at, self._page_rows = float("-inf"), 0  # when the last turn began, and what it sent
        self._thread: int | None = None
        self._has_ended = False
        self._stopped_at: RelayRow | None = None
        self.stopped: str | None = None
        self.sent = 0
        self._watch = BacklogWatch(self._database.backlog, client.clock, self._log)
        outbox.add_relay(self.wake)
        start_daemon(_THREAD_NAME, self._run)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wake(self) -> None:
        """Messages were committed: look now, not with the next poll."""
        self._woken.set()

    @property
    def backlog(self) -> Backlog | None:
        """What waits, as it was when the relay looked last; None: it has not seen the database yet."""
        return self._watch.backlog

    @property
    def refusal(self) -> str | None:
        """Why it cannot use this database: not installed, a wrong password; None while all is well.

        It is tried again, with pauses up to 30 seconds.
        """
        return None if self._database.refusal is None else str(self._database.refusal)

    def require_begun(self) -> None:
        """For a command: refuse a relay that has never seen its database, and is refused there.

        Raises:
            ConfigError: what somebody must correct. Of one that has worked there it is only logged.
        """
        if self.backlog is None and self._database.refusal is not None:
            raise ConfigError(str(self._database.refusal))

    def drain(self, timeout: float) -> None:
        """Wait until nothing waits any more that was committed before this call.

        Args:
            timeout: seconds.

        Raises:
            OutboxStoppedError: the relay has stopped: an operator says which side is right, or puts one right.
            ConfigError: the outbox is not installed, or its database may lose commits.
            RequestTimeoutError: messages still wait; they stay in the database.
            ClosedError: the relay has ended.

        Durability: what was sent is on the broker's disk.
        """
        until = self._clock.monotonic() + timeout
        wanted = self._drains + 2  # a look that began after this call
        while self._drains < wanted:
            if self.stopped is not None:
                raise OutboxStoppedError(self.stopped)
            if self._has_ended:
                raise ClosedError(f"the relay of outbox {self.outbox.name!r} has ended, in this process at least")
            if self.refusal is not None:
                raise ConfigError(self.refusal)
            self.wake()
            left = until - self._clock.monotonic()
            if left <= 0:
                raise RequestTimeoutError(self._still_waits(timeout))
            self._idle.wait(min(left, _LOOK_AGAIN_S))

    def _still_waits(self, seconds: float) -> str:
        text, failure = f"outbox {self.outbox.name!r}: messages still wait after {seconds} s", self._database.failure
        if failure is not None:
            return f"{text}; the database: {type(failure).__name__}: {failure}"
        return text if self._broker.problem is None else f"{text}; the broker: {self._broker.problem}"

    def ask_to_end(self) -> None:
        """End it, without waiting for that."""
        self._is_ending = True
        self.outbox.remove_relay(self.wake)
        self._woken.set()

    def close(self) -> None:
        """End it, after the page that is on its way; what waits is left to others. Idempotent."""
        self.ask_to_end()
        if self._thread != thread_number() and not self._has_ended and self._ended.wait(_CLOSE_S):
            self._ended.set()  # for others that wait

    @property
    def has_ended(self) -> bool:
        """Whether it runs no more."""
        return self._has_ended

    def forked(self) -> None:
        """In a forked child, which has no such thread: its connections are the parent's."""
        self._has_ended = True
        self._database.forked()

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._thread = thread_number()
        try:
            while not self._is_ending:
                try:
                    self._go_on() if self.stopped is None else self._await_agreement()
                except Exception as error:  # noqa: BLE001  the next turn begins with what the relay row says
                    self._log.error("outbox's relay failed", error=repr(error))
                    self._database.close()
                    self._rest(_LOOK_AGAIN_S)
        finally:
            self.outbox.remove_relay(self.wake)
            self._database.unlock()
            self._database.release(self._holder)
            self._database.close()
            with suppress(Exception):
                self._broker.close()
            self._has_ended = True
            self._ended.set()
            self._idle.set()

    def _go_on(self) -> None:
        """Until the core stops, or the relay ends: between two turns, when nothing is on its way.

        A stopped line goes on only after ``_await_agreement``, whatever fails there.
        """
        turns = RelayCore(self._holder).turns()
        step = next(turns)
        while not (self._is_ending and isinstance(step, (Lock, Pause, Connect, Peek))):
            result = self._carry_out(step)
            try:
                step = turns.send(result)
            except StopIteration:
                return

    def _carry_out(self, step: Any) -> Any:
        match step:
            case Lock():
                return self._lock()
            case Read():
                return self._database.read(step)
            case Away():
                return self._broker.away(step)
            case Claim():
                return self._database.claim(step)
            case Unlock():
                return self._database.unlock()
            case Peek():
                return self._database.peek()
            case NewTxid():
                return self._broker.new_txid()
            case Send():
                return self._sent(step)
            case Connect():
                return self._broker.connect(step.home)
            case Topics():
                return self._broker.ask_topics()
            case Outcome():
                return self._broker.outcome(step)
            case Chain():
                return self._broker.chain(step)
            case Pause():
                return self._pause(step.why)
            case Stop():
                return self._stop(step)
        raise AssertionError(step)

    def _lock(self) -> Any:
        if self._database.read_s:
            self._rest(self._database.read_s)  # others need the database as well
        if _BUSY_ROWS <= self._page_rows < PAGE_ROWS:
            self._rest(self._turn_at + _BUSY_TURN_S - self._clock.monotonic())
        self._turn_at, self._page_rows = self._clock.monotonic(), 0
        self._database.answering = self._broker.answering(self._database.parked_for)
        locked = self._database.lock()
        are_old = self._clock.monotonic() - self._broker.asked_topics_at >= _TOPICS_S
        return None if locked is None else locked._replace(are_topics_old=are_old)

    def _sent(self, step: Send) -> Any:
        renewed_at = self._clock.monotonic()

        def on_part() -> None:
            nonlocal renewed_at
            if self._clock.monotonic() - renewed_at >= _RENEW_EVERY_S:
                renewed_at = self._clock.monotonic()
                self._database.renew(step.row)

        answer = self._broker.send(step, on_part)
        if self._broker.problem is None:
            self._database.page_was_sent()
            self.sent += len(step.rows)
            self._page_rows = len(step.rows)
            self._recovered()
            self._idles = 0
            self._watch.look("they are being sent; if this stays so, more is written than the relay can send")
        return answer

    def _pause(self, why: Why) -> None:
        if why is not Why.DATABASE:
            self._watch.look(str(self._broker.problem) if why is Why.BROKER and self._broker.problem else why.value)
        if why is Why.IDLE:
            self._nothing_waits()
            self._recovered()
            self._await_rows()
            return
        if why is Why.HELD:
            if self._database.nothing_waits():  # by what the other one has done
                self._nothing_waits()
            self._rest(_HELD_S)
            return
        if why is Why.BROKER and self._failures == 0:
            self._log.warning("outbox's broker away", error=repr(self._broker.problem))
        self._rest((_AWAY_S if self.refusal is None else ASK_AGAIN_S).after(self._failures))
        self._failures += 1

    def _recovered(self) -> None:
        if self._failures:
            self._log.info("outbox goes on")
        self._failures = 0

    def _await_rows(self) -> None:
        """Until there is something to do, as far as a look tells: it locks nothing, so that no writer of SQLite waits
        for it, and costs PostgreSQL no transaction id. A turn now and then sees to what else there is."""
        until, took_s = self._clock.monotonic() + _TURN_EVERY_S, 0.0
        while not self._is_ending:
            if self._woken.wait(max(_IDLE_S.after(self._idles), took_s)):
                self._idles = 0
                return
            self._idles += 1
            begun = self._clock.monotonic()
            if begun >= until or not self._database.nothing_waits():
                return
            took_s = self._clock.monotonic() - begun  # others need the database as well

    def _nothing_waits(self) -> None:
        self._drains += 1
        self._idle.set()

    def _rest(self, seconds: float) -> None:
        """Wait, however often it is woken: new messages do not bring a broker back."""
        until = self._clock.monotonic() + seconds
        while not self._is_ending and (left := until - self._clock.monotonic()) > 0:
            self._woken.wait(left)

    # --- stopped -----------------------------------------------------------------------------------------------------

    def _stop(self, step: Stop) -> None:
        self.stopped = (
            f"outbox {self.outbox.name!r} has stopped, no message was lost: the broker's newest page is "
            f"{step.chain or 'none'}, this database knows {step.row.last or 'none'} and {step.row.claim or 'none'}. "
            "One of the two was restored, or this database is a copy: an operator says which one is right. "
            "If the broker is put right, the line goes on by itself"
        )
        self._log.error(
            "outbox stopped", uuid=step.row.uuid, chain=step.chain, last=step.row.last, claim=step.row.claim,
            reason=self.stopped,
        )  # fmt: skip
        self._stopped_at = step.row

    def _await_agreement(self) -> None:
        """Look now and then whether the line may go on: it was adopted, another relay was right, or the broker was put
        right.

        A relay that stops, too, has changed the claim, and no more. Nothing is sent here, nor fenced: the turns that
        follow begin as those of a relay that was just started.
        """
        assert self._stopped_at is not None
        pause_s = _ASK_AGAIN_S.first
        ask_at = self._clock.monotonic() + pause_s
        while not self._is_ending:
            self._idle.set()
            self._rest(_LOOK_AGAIN_S if self.refusal is None else ASK_AGAIN_S.most)
            self._watch.look("the outbox has stopped")
            row = self._database.peek()
            if row is None:
                continue
            has_moved = _place(row) != _place(self._stopped_at)
            if not has_moved and self._clock.monotonic() < ask_at:
                continue
            if has_moved or self._broker.agrees_with(row):
                self.stopped = None
                self._log.info("outbox goes on", uuid=row.uuid)
                return
            pause_s = _ASK_AGAIN_S.following(pause_s)
            ask_at = self._clock.monotonic() + pause_s


def _place(row: RelayRow) -> tuple[str, str, str | None]:
    """How far the line has come, and where it goes."""
    return row.uuid, row.home, row.last
