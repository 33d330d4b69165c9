"""What a relay does, turn by turn: claim a page in the database, send it once, learn what became of it.

A page is one transaction of the broker. Its id, the *claim*, stands in the outbox's relay row before it is sent, with
the ids of its rows. Every transaction of the database begins with a lock on that row, so relays and operators never
mix.
A turn:

1. *Lock.* Is there a claim whose outcome this relay does not know, then end the transaction and *settle* the claim.
2. *Claim.* In the same transaction: if the claim was committed, its rows are deleted; the next rows are read and
   claimed. The commit is forced, and makes durable whatever was read.
3. *Send*, once. Taken: the next turn deletes the rows. Anything else, silence too, is settled by the next turn: the
   outcome is asked for with a fence, so a request on its way is executed before that or never. No page is sent twice.

A session that has ended (410), or one of which a broker that lost its end knows nothing, takes no request any more:
then the broker's *chain*, the newest page of the outbox, tells. Is it neither the claim nor the page before, one of the
two is not what it was (a copy, a restore, a fail-over that lost commits): the relay *stops*, unless the relay row has
changed meanwhile, because another relay has gone on.

The core knows no database, broker or clock. It yields ``Step`` values; the driver carries one out and sends the result
in. It may be a thread, a task or a simulation (``tools/outbox_model``).

Invariants:
    * a page is sent only after its claim is committed, and forced;
    * rows are deleted only under the lock, by the ids of the claim that the locked row has, and only if that claim is
      known to be committed;
    * a claim is replaced only when its outcome is known for certain;
    * a unit is parked as refused only if the broker takes a page without it;
    * nothing is sent after a stop, until an operator has said which side is right, or the two are read to agree again.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from enum import Enum
from typing import Any, Final, NamedTuple

from txmq.outbox.page import REFUSED, UNKNOWN_TOPIC, OutboxRow, Page, Run, Waiting, build, runs

PAGE_ROWS: Final = 512
SLOW_PAGES: Final = 4  # a page has so many times as many rows while reading is slow
PAGE_ROWS_MIN: Final = 1
PAGE_BYTES: Final = 1 << 20


class RelayRow(NamedTuple):
    """The one row of the relay's table.

    Attributes:
        uuid: of the outbox, 32 hex.
        home: which keeps the outbox's chain; empty until the first relay has begun.
        last: the newest page that is known to be committed; None: there was none.
        claim: the page that is on its way.
        ids: of its rows.
        holder: drawn by each relay when it starts.
    """

    uuid: str
    home: str = ""
    last: str | None = None
    claim: str | None = None
    ids: tuple[Run, ...] = ()
    holder: str | None = None

    def agrees_with(self, chain: str | None) -> bool:
        """Whether the newest page that the broker has is the last one that is known here, or the one on its way."""
        return chain == self.last or (self.claim is not None and chain == self.claim)


class Locked(NamedTuple):
    """The relay row under its lock.

    Attributes:
        is_lease_over: the holder has not renewed it in time.
        is_page_due: nothing was sent for a while: an empty page shows whether the chain is still this outbox's.
        are_topics_old: they may have more partitions by now.
    """

    row: RelayRow
    is_lease_over: bool
    is_page_due: bool
    are_topics_old: bool = False


# --- steps: what the driver does ------------------------------------------------------------------------------------


class Connect(NamedTuple):
    """Take a session of the home, or of any if it is empty. Result: the home; None: it is away; OTHER_HOME."""

    home: str


class Lock(NamedTuple):
    """Begin a transaction of the database, and lock the relay row. Result: ``Locked``; None: the database is away."""


class Unlock(NamedTuple):
    """Roll that transaction back."""


class Peek(NamedTuple):
    """Result: the relay row as it is now, without a lock; None: the database is away."""


class Read(NamedTuple):
    """Delete the rows of a page that is committed, and read the next ones. Result: ``Waiting``; None: lost."""

    gone: tuple[Run, ...]
    rows_max: int
    bytes_max: int = PAGE_BYTES  # a single row may have more


class Claim(NamedTuple):
    """Park rows, write the relay row with a new lease, commit, forced. Result: whether it is known to have happened."""

    row: RelayRow
    parked: tuple[tuple[OutboxRow, str], ...]  # each with the reason


class NewTxid(NamedTuple):
    """Result: the next transaction id of the session."""


class Topics(NamedTuple):
    """Ask a broker which topics there are. Result: their names; None: it is away."""


class Away(NamedTuple):
    """Result: of these rows' units those with a message for a home that is away for long, each with the reason."""

    rows: Sequence[OutboxRow]


class Outcome(NamedTuple):
    """Ask for a claim's outcome, with a fence. Result: ``ClaimOutcome``; None: the broker is away."""

    txid: str


class Chain(NamedTuple):
    """Ask for the newest page of the outbox. Result: a tuple of its id or None; None: the broker is away."""

    uuid: str


class Send(NamedTuple):
    """Send a page, once. Result: ``Answer``."""

    row: RelayRow
    rows: tuple[OutboxRow, ...]


class Pause(NamedTuple):
    """Nothing can be done for a moment."""

    why: Why


class Stop(NamedTuple):
    """The chain is not this outbox's: tell the operator. The turns end with it; none may begin before the row has
    moved, or agrees with the chain."""

    row: RelayRow
    chain: str | None


Step = Connect | Lock | Unlock | Peek | Read | Away | Claim | NewTxid | Topics | Outcome | Chain | Send | Pause | Stop
Turns = Generator[Step, Any, None]

OTHER_HOME: Final = "other-home"


class Why(Enum):
    """What a pause is for."""

    IDLE = "nothing waits"
    HELD = "another relay has the lease"
    DATABASE = "the database is away"
    BROKER = "a broker is away, or busy, or refuses"
    FULL = "too many messages are parked"


class ClaimOutcome(Enum):
    """What a broker says of a claim."""

    COMMITTED = "committed"
    ROLLED_BACK = "rolled-back"
    OVER = "its session has ended, or is not known"
    OTHER_HOME = OTHER_HOME


class Answer(Enum):
    """What a broker says of a page."""

    TAKEN = "taken"
    CONFLICT = "another page is the newest"
    OVER = "the session has ended"
    REFUSED = "something in the page can never be taken"
    STALE = "a topic is not what it was"
    SILENT = "no answer, or not now"
    OTHER_HOME = OTHER_HOME


class RelayCore:
    """One relay of one outbox.

    Args:
        holder: drawn anew at each start.
        page_rows: of a page at most, unless a unit is larger.
    """

    def __init__(self, holder: str, page_rows: int = PAGE_ROWS) -> None:
        self.holder, self.page_rows = holder, page_rows
        self._limit = page_rows
        self._is_slow = False
        self._is_connected = False
        self._home = ""
        self._known: tuple[str, bool] | None = None  # a claim, and whether it was committed
        self._topics: Collection[str] | None = None
        self._asked_at: RelayRow | None = None  # what the relay row was when the topics were asked for
        self._is_asked_anew = False  # since the last page
        self._refused: frozenset[int] = frozenset()  # units that were a page of their own when they were refused
        self._is_empty_taken = False  # since a page was refused: it is not the outbox that is refused, or the user
        self._is_stopped = False

    def turns(self) -> Turns:
        """Turn after turn; ends after a ``Stop``."""
        while not self._is_stopped:
            yield from self._turn()

    # --- a turn ------------------------------------------------------------------------------------------------------

    def _turn(self) -> Turns:
        if not self._is_connected:
            yield from self._connect()
            return
        locked: Locked | None = yield Lock()
        if locked is None:
            yield Pause(Why.DATABASE)
            return
        row = locked.row
        if row.holder not in (None, self.holder) and not locked.is_lease_over:
            yield Unlock()
            yield Pause(Why.HELD)
            return
        if row.home not in ("", self._home):  # another relay was the first, or an operator has chosen another one
            yield Unlock()
            self._is_connected = False
            return
        if locked.are_topics_old or self._may_topics_be_old(row):
            self._topics = None
        if self._must_settle(row):
            yield Unlock()
            yield from self._settle(row)
            return
        if self._topics is None:
            yield Unlock()
            yield from self._ask_topics(row)
            return
        yield from self._claim_and_send(locked)

    def _connect(self) -> Turns:
        row: RelayRow | None = yield Peek()
        if row is None:
            yield Pause(Why.DATABASE)
            return
        home = yield Connect(row.home)
        if home is None:
            yield Pause(Why.BROKER)
        elif home == OTHER_HOME:
            if (yield Peek()) == row:
                yield from self._stop(row, None)
        else:
            self._is_connected, self._home = True, home

    def _may_topics_be_old(self, row: RelayRow) -> bool:
        """Whether another relay has worked since they were asked for, and may have known more partitions."""
        return row.holder != self.holder and self._asked_at != row

    def _must_settle(self, row: RelayRow) -> bool:
        """Whether the row has a claim whose outcome is not known here."""
        return row.claim is not None and (self._known is None or self._known[0] != row.claim)

    def _ask_topics(self, row: RelayRow) -> Turns:
        self._topics, self._asked_at = (yield Topics()), row
        self._is_asked_anew = self._topics is not None
        if self._topics is None:
            yield Pause(Why.BROKER)

    def _claim_and_send(self, locked: Locked) -> Turns:
        row, gone = locked.row, self._gone(locked.row)
        if gone is not None:
            row = row._replace(last=row.claim)
        page: Page | None = yield from self._next_page(gone or ())
        if page is None:
            yield Pause(Why.DATABASE)
            return
        reasons = {why for _, why in page.parked}
        if UNKNOWN_TOPIC in reasons and not self._is_asked_anew:
            self._topics = None  # it may have been created since they were asked for
            yield Unlock()
            return
        is_tried = REFUSED in reasons and not self._is_empty_taken
        if is_tried:
            page = Page(())
        claim = None
        if page.rows or is_tried or (locked.is_page_due and not page.parked):
            claim = yield NewTxid()
        if claim is None and not page.parked and self._is_mine(row) and locked.row.claim is None:
            yield Unlock()
            yield Pause(Why.FULL if page.is_full else Why.IDLE)
            return
        row = row._replace(home=self._home, claim=claim, ids=runs(one.id for one in page.rows), holder=self.holder)
        if not is_tried:
            self._refused = frozenset()
        is_claimed = yield Claim(row, tuple(page.parked))
        if not is_claimed:
            yield Pause(Why.DATABASE)
        elif claim is not None:
            yield from self._send(row, tuple(page.rows))

    def _is_mine(self, row: RelayRow) -> bool:
        return row.holder == self.holder and row.home == self._home

    def _gone(self, row: RelayRow) -> tuple[Run, ...] | None:
        """The rows of a claim that is committed; None: there is none, or it is rolled back."""
        if row.claim is not None and self._known is not None and self._known[0] == row.claim and self._known[1]:
            return row.ids
        return None

    def _next_page(self, gone: tuple[Run, ...]) -> Generator[Step, Any, Page | None]:
        limit, size, topics = self._limit, PAGE_BYTES, self._topics or ()
        while True:
            waiting: Waiting | None = yield Read(gone, limit, size)
            if waiting is None:
                return None
            away: Mapping[int, str] = yield Away(waiting.rows)
            self._is_slow = waiting.is_slow
            page = build(waiting, topics, refused=self._refused, away=away, is_shortest=self._limit == PAGE_ROWS_MIN)
            if page.rows or page.parked or page.is_full or not waiting.rows:
                return page
            limit, size = limit * 2, size * 2  # not even the first unit fits
            gone = ()

    def _send(self, row: RelayRow, rows: tuple[OutboxRow, ...]) -> Turns:
        answer: Answer = yield Send(row, rows)
        self._is_asked_anew = False
        if answer is Answer.TAKEN:
            self._known = (str(row.claim), True)
            self._limit = min(self.page_rows * (SLOW_PAGES if self._is_slow else 1), self._limit * 2)
            self._is_empty_taken = not rows
        elif answer is Answer.CONFLICT:
            yield from self._look_after_conflict(row)
        elif answer in (Answer.OVER, Answer.OTHER_HOME):
            self._is_connected = False
        elif answer is Answer.REFUSED and rows:
            self._was_refused(rows)
        else:
            self._topics = None if answer is Answer.STALE else self._topics
            yield Pause(Why.BROKER)

    def _was_refused(self, rows: tuple[OutboxRow, ...]) -> None:
        """Something in the page cannot be sent: it is halved, until it is found."""
        self._topics, self._is_empty_taken = None, False
        if self._limit == PAGE_ROWS_MIN:
            self._refused = frozenset(one.group for one in rows)
        self._limit = max(PAGE_ROWS_MIN, self._limit // 2)

    # --- what became of a page ---------------------------------------------------------------------------------------

    def _settle(self, row: RelayRow) -> Turns:
        """Learn whether the claim was committed; a fence makes that certain. Or stop."""
        txid = str(row.claim)
        told: ClaimOutcome | None = yield Outcome(txid)
        if told is None:
            yield Pause(Why.BROKER)
        elif told is ClaimOutcome.OTHER_HOME:
            self._is_connected = False
        elif told is ClaimOutcome.OVER:
            yield from self._ask_chain(row)
        else:
            self._known = txid, told is ClaimOutcome.COMMITTED

    def _ask_chain(self, row: RelayRow) -> Turns:
        """Its session takes no request any more: what was decided stands in the chain."""
        chain: tuple[str | None] | None = yield Chain(row.uuid)
        if chain is None:
            yield Pause(Why.BROKER)
        elif row.agrees_with(chain[0]):
            self._known = str(row.claim), chain[0] == row.claim
        elif (yield Peek()) == row:
            yield from self._stop(row, chain[0])

    def _look_after_conflict(self, row: RelayRow) -> Turns:
        """Another page is the newest: of another relay, whose claim stands in the row by now, or of another outbox."""
        chain: tuple[str | None] | None = yield Chain(row.uuid)
        now: RelayRow | None = yield Peek()
        if chain is None or now is None or now.claim != row.claim:
            return
        if not now.agrees_with(chain[0]):
            yield from self._stop(now, chain[0])

    def _stop(self, row: RelayRow, chain: str | None) -> Turns:
        self._is_stopped = True
        yield Stop(row, chain)
