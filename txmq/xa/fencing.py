"""Fencing tokens: of a database and its copies, which is the one in which what is missing proves anything.

Theory of operation. A copy of a database has everything of the original's, but not what was written there since. So a
resolver in a database writes a random word into it, a *token*, and tells the broker, which keeps the newest token of
each database and takes another one only from a database that has the newest (``broker/state/fencing_tokens.py``). Of a
database and its copy the first one that resolves goes on; in the other one no token is accepted any more. Whatever
follows the former in time, by replication, fail-over or a restart, has its token and goes on likewise, without a word.

A *drawing*::

 READ --ROW------> SETTLE --ACCEPTED--> DRAW --DRAWN--> TELL --ACCEPTED--> HELD
  | \\--EMPTY-----------------------------^|             |
  |                  |                     |             |
  |  \\--SAME--> STRANGE                    |             |
  ^------REFUSED-----+---------MOVED-------+---REFUSED---+

READ the row: ``accepted``, and ``drawn`` after it. SETTLE: tell the broker again what a resolver has drawn that may
have died before it told it. DRAW, in one forced commit: the settled one becomes ``accepted``, a new one ``drawn``. TELL
it.

SAME: the row is the one that was refused a moment ago. The broker's answer lies between two looks at an unchanged row,
so its newest token does not stand here.

Laws:
    1. ``accepted`` was the newest token of the broker at some time. ``drawn`` is replaced only after it was settled. So
       the broker's newest token is always one of the two, in the database that goes on: there nobody is refused twice.
    2. What a transaction that draws has seen stands in every database that ever goes on after its token was accepted:
       each of them has that token, and so its history up to that. A rolled-back marker among it keeps the owner's
       COMMIT out of all of them (``proof``). It is the token's acceptance that proves the rollback, not the row.
    3. The judge of a marker is the home in its txid: one, however many homes the transaction has parts at.
    4. A committed marker proves a commit wherever it is found: no token is asked.
    5. An XA branch that XA RECOVER does not list, and whose marker is not there, is lost only by a token that was drawn
       after both looks (``two_phase/branch_resolver.py``). The broker has decided, so the branch was prepared before:
       it stands neither prepared nor committed in what goes on. That holds whether or not a replica has prepared
       branches. XA RECOVER lists those of the whole server; the token stands in one schema, next to the markers. So of
       two schemas with one identity on a server one goes on, and two resources never share a token.

What if it stops here?

==============================  ================================================================================
rows inserted, nothing drawn    they prove nothing yet: the next drawing sees them
drawn, not told                 the next one settles it; its drawer, if he wakes up, is refused and reads anew
told, the answer lost           told again it is accepted while it is the newest, and was settled by another one if not
two resolvers at once           one compares and swaps the row, the other reads anew; whichever told first, law 2 holds
the owner looks itself up       it is a resolver like any other
an older broker is restored     its newest token does not stand in the row, nor may it: nothing is proved, an operator
                                adopts the database. What it lists may have been committed and forgotten long ago
an older database is restored   the same if anybody has drawn since; if not, it is as good as the one that was lost
==============================  ================================================================================

A copy that resolves before the original has drawn since the copy was made goes on in its place. So a resolver draws
also without a reason: in its first round and then every minute.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from txmq.errors import ConfigError, OtherTokenError, UnavailableError
from txmq.runtime.crashpoints import crash_point
from txmq.state_machine import next_step
from txmq.xa.database.marker_table import TokenRow
from txmq.xa.resolver_ports import REQUEST_TIMEOUT_S, Control

DRAW_EVERY_S: Final = 60.0
_TRIES_MAX: Final = 20  # looks at the row: each but the last one was outdated by another resolver


class StrangeServerError(ConfigError):
    """The database is not the one that goes on, but perhaps a copy: what is absent from it proves nothing."""


class Step(enum.Enum):
    """The next step of a drawing."""

    READ = "read the row"
    SETTLE = "tell the broker what is drawn already"
    DRAW = "draw a token"
    TELL = "tell the broker"
    HELD = "accepted"
    STRANGE = "not the database that goes on"


class Found(enum.Enum):
    """The result of a step."""

    ROW = "a token is drawn"
    EMPTY = "none was ever drawn"
    SAME = "unchanged since it was refused"
    ACCEPTED = "the newest"
    REFUSED = "another one is the newest"
    DRAWN = "drawn"
    MOVED = "the row was another one"


_S, _F = Step, Found
TRANSITIONS: dict[tuple[Step, Found], Step] = {
    (_S.READ, _F.ROW): _S.SETTLE,
    (_S.READ, _F.EMPTY): _S.DRAW,
    (_S.READ, _F.SAME): _S.STRANGE,
    (_S.SETTLE, _F.ACCEPTED): _S.DRAW,
    (_S.SETTLE, _F.REFUSED): _S.READ,
    (_S.DRAW, _F.DRAWN): _S.TELL,
    (_S.DRAW, _F.MOVED): _S.READ,
    (_S.TELL, _F.ACCEPTED): _S.HELD,
    (_S.TELL, _F.REFUSED): _S.READ,
}


class Drawing:
    """One drawing, without I/O: what to do next, and with what.

    Attributes:
        step: the next step.
        row: as it was read, or drawn.
        reads: how often the row was read.
    """

    def __init__(self) -> None:
        self.step, self.row, self.reads = Step.READ, TokenRow(), 0
        self._refused: TokenRow | None = None

    def read(self, row: TokenRow) -> None:
        """READ is done."""
        self.row, self.reads = row, self.reads + 1
        if not row.drawn:
            self._go(Found.EMPTY)
        else:
            self._go(Found.SAME if row == self._refused else Found.ROW)

    def answered(self, *, is_accepted: bool) -> None:
        """SETTLE or TELL is done: the broker's newest is the one that is drawn, or another one."""
        if self.step is Step.SETTLE and not is_accepted:
            self._refused = self.row
        self._go(Found.ACCEPTED if is_accepted else Found.REFUSED)

    def next_row(self, token: str) -> TokenRow:
        """What DRAW puts in the place of ``row``."""
        return TokenRow(self.row.drawn, token)

    def drawn(self, row: TokenRow, *, is_in: bool) -> None:
        """DRAW is done: the row is this one now, or another resolver was faster."""
        if is_in:
            self.row = row
        self._go(Found.DRAWN if is_in else Found.MOVED)

    def _go(self, found: Found) -> None:
        self.step = next_step(TRANSITIONS, self.step, found)


class Drawn(Protocol):
    """A database, as its tokens are drawn: ``ResolvingConnection``, or the ``Recovery`` of an XA resource."""

    @property
    def uuid(self) -> str:
        """Its identity."""

    def token_row(self, home: str) -> TokenRow:
        """See ``TokenTable.row``."""

    def draw_token(self, home: str, before: TokenRow, after: TokenRow, rolled_back: Sequence[str] = ()) -> bool:
        """See ``TokenTable.draw``."""

    def close(self) -> None:
        """End the session."""


class Fence:
    """A database under the tokens of one home.

    Args:
        home: its id, 16 hex digits.
        control: a connection to it.
        new_token: draws one.
        timeout_s: for one request.
    """

    def __init__(
        self, database: Drawn, home: str, control: Control, new_token: Callable[[], str],
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:  # fmt: skip
        self._database, self._home, self._control = database, home, control
        self._new_token, self._timeout_s = new_token, timeout_s

    def check(self) -> None:
        """Make sure, without a write, that what is missing here may prove something. Raises as ``draw``."""
        self._carry_out(Step.DRAW, ())

    def draw(self, rolled_back: Sequence[str] = ()) -> None:
        """Draw a token, and have it accepted.

        Args:
            rolled_back: transactions whose rolled-back markers stand here: they are rolled back for good after that.

        Raises:
            StrangeServerError: another database goes on than this one, or the broker was restored.
            TxmqError: the broker is away, or others were faster all the time.
            Exception: the driver's own.

        Durability: the token is in the database and in the broker's journal when this returns.
        """
        self._carry_out(Step.HELD, rolled_back)

    def adopt(self) -> None:
        """Make this the database that goes on, whichever was: an operator says so. Raises as ``draw``."""
        for _ in range(_TRIES_MAX):
            drawing = Drawing()
            drawing.read(self._read())
            row = drawing.next_row(self._new_token())
            if self._database.draw_token(self._home, drawing.row, row):
                self._tell(row, {"adopted": None})
                return
        raise UnavailableError(f"{_TRIES_MAX} other resolvers were faster: try again")

    def _carry_out(self, end: Step, rolled_back: Sequence[str]) -> None:
        drawing, database = Drawing(), self._database
        while drawing.step is not end:
            match drawing.step:
                case Step.READ:
                    if drawing.reads == _TRIES_MAX:
                        raise UnavailableError(f"{_TRIES_MAX} other resolvers were faster")
                    drawing.read(self._read())
                case Step.SETTLE | Step.TELL:
                    drawing.answered(is_accepted=self._is_accepted(drawing.row))
                case Step.DRAW:
                    row = drawing.next_row(self._new_token())
                    drawing.drawn(row, is_in=database.draw_token(self._home, drawing.row, row, rolled_back))
                    crash_point("resolver.token_drawn")
                case Step.STRANGE | Step.HELD:
                    raise self._strange(drawing.row)

    def _read(self) -> TokenRow:
        return self._database.token_row(self._home)

    def _is_accepted(self, row: TokenRow) -> bool:
        try:
            self._tell(row, {"after": row.accepted} if row.accepted else {})
        except OtherTokenError:
            return False
        return True

    def _tell(self, row: TokenRow, words: dict[str, str | int | bytes | None]) -> None:
        self._control.call("token", self._database.uuid, row.drawn, extensions=words, timeout=self._timeout_s)

    def _strange(self, row: TokenRow) -> StrangeServerError:
        return StrangeServerError(
            f"the newest fencing token at home {self._home} does not stand in this database (its tokens: "
            f"{row.accepted or 'none'}, {row.drawn}): it is a copy, or it or the broker was restored from a backup. "
            "What is missing here proves nothing. Stop what resolves in the copy; if this is the database from now on, "
            "and no other one commits any more: txmq resolver adopt"
        )
