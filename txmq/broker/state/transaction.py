"""One transaction in its home broker, as a state machine.

```
            PART            PREPARE             COMMIT
  NONE ------------> OPEN ------------> PREPARED -------> COMMITTED
   |  \\               |  \\                 |
   |   \\ COMMIT_PARTS |   \\ COMMIT         | ROLLBACK
   |    +------------- | ---+---> COMMITTED |
   | FENCE, ROLLBACK   | ROLLBACK, FENCE    |
   v                   v                    |
  ROLLED_BACK <--------+--------------------+

  NONE, OPEN --DECIDE--> DECIDED --COMPLETE, of every branch--> COMMITTED
  PREPARED, with branch homes --COMMIT--> DECIDED
  NONE, OPEN --COMMIT, DECIDE, after one of the same key--> PLACING --its turn--> COMMITTED or DECIDED
  PREPARED, decided here, --COMMIT, after one of the same key--> PLACING
```

NONE: never seen here. OPEN: parts of a large local transaction are streaming in. PREPARED: all parts are in the journal
and its coordinator decides; it has no timeout. DECIDED: the decision of a transaction with branches, in databases or
at other homes, is made, its messages have their offsets, and some branch has not completed (``decisions``). PLACING:
the decision is made, and the messages wait for their offsets (``commit_order``). COMMITTED and ROLLED_BACK: the
session keeps the outcome. FORGOTTEN: at or below the session's floor.

Laws:
    * every transition is one journal record, and every answer waits for it;
    * from COMMITTED and ROLLED_BACK nothing leads anywhere, so a repeated request can only get the same answer;
    * a pair that is missing from ``TRANSITIONS`` is an error that names state and event.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, Final

from txmq.log import batch as batches
from txmq.model import TransactionKind
from txmq.state_machine import next_step


class TransactionState(enum.Enum):
    """The state of a transaction in its home broker."""

    __hash__ = object.__hash__  # Enum's own is a call in Python, and the table is asked for every request

    NONE = "none"
    OPEN = "open"
    PREPARED = "prepared"
    DECIDED = "decided"
    PLACING = "placing"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled-back"
    FORGOTTEN = "forgotten"


class TransactionEvent(enum.Enum):
    """A request for a transaction."""

    __hash__ = object.__hash__

    PART = "part"  # put with tx=
    PREPARE = "prepare"
    COMMIT_PARTS = "commit with parts"
    COMMIT = "commit without parts"
    DECIDE = "decide"  # with the branches of an XA transaction
    COMPLETE = "complete"  # of one branch, in a database or at another home
    ROLLBACK = "rollback"
    FENCE = "outcome with fence"
    LOOKUP = "outcome"


class Action(enum.Enum):
    """The broker's reaction to an event."""

    ADD_PART = "add the part"
    PREPARE = "force the prepare record"
    DECIDE = "force messages and decision in one record"
    DECIDE_BRANCHES = "force messages, decision and branches in one record"
    COMPLETE = "force that the branch has completed"
    SETTLE = "force the commit of what is prepared, or placing"
    ROLL_BACK = "force the rollback"
    FENCE = "force rolled-back for a transaction never seen"
    REPEAT = "the same answer as before"
    TELL = "tell the state"
    REFUSE_CONFLICT = "409: it is decided or prepared otherwise"
    REFUSE_UNKNOWN = "404: no such transaction"
    REFUSE_FENCED = "410: no longer kept"


_S, _E, _A = TransactionState, TransactionEvent, Action
TRANSITIONS: dict[tuple[TransactionState, TransactionEvent], Action] = {
    (_S.NONE, _E.PART): _A.ADD_PART,
    (_S.NONE, _E.PREPARE): _A.PREPARE,
    (_S.NONE, _E.COMMIT_PARTS): _A.DECIDE,
    (_S.NONE, _E.COMMIT): _A.REFUSE_UNKNOWN,
    (_S.NONE, _E.DECIDE): _A.DECIDE_BRANCHES,
    (_S.NONE, _E.COMPLETE): _A.REFUSE_UNKNOWN,
    (_S.NONE, _E.ROLLBACK): _A.FENCE,
    (_S.NONE, _E.FENCE): _A.FENCE,
    (_S.NONE, _E.LOOKUP): _A.TELL,
    (_S.OPEN, _E.PART): _A.ADD_PART,
    (_S.OPEN, _E.PREPARE): _A.PREPARE,
    (_S.OPEN, _E.COMMIT_PARTS): _A.DECIDE,
    (_S.OPEN, _E.COMMIT): _A.DECIDE,
    (_S.OPEN, _E.DECIDE): _A.DECIDE_BRANCHES,
    (_S.OPEN, _E.COMPLETE): _A.REFUSE_UNKNOWN,
    (_S.OPEN, _E.ROLLBACK): _A.ROLL_BACK,
    (_S.OPEN, _E.FENCE): _A.ROLL_BACK,
    (_S.OPEN, _E.LOOKUP): _A.TELL,
    (_S.PREPARED, _E.PART): _A.REFUSE_CONFLICT,
    (_S.PREPARED, _E.PREPARE): _A.REPEAT,
    (_S.PREPARED, _E.COMMIT_PARTS): _A.REFUSE_CONFLICT,
    (_S.PREPARED, _E.COMMIT): _A.SETTLE,
    (_S.PREPARED, _E.DECIDE): _A.REFUSE_CONFLICT,
    (_S.PREPARED, _E.COMPLETE): _A.REFUSE_CONFLICT,
    (_S.PREPARED, _E.ROLLBACK): _A.ROLL_BACK,
    (_S.PREPARED, _E.FENCE): _A.TELL,
    (_S.PREPARED, _E.LOOKUP): _A.TELL,
    (_S.DECIDED, _E.PART): _A.REFUSE_CONFLICT,
    (_S.DECIDED, _E.PREPARE): _A.REFUSE_CONFLICT,
    (_S.DECIDED, _E.COMMIT_PARTS): _A.REPEAT,
    (_S.DECIDED, _E.COMMIT): _A.REPEAT,
    (_S.DECIDED, _E.DECIDE): _A.REPEAT,
    (_S.DECIDED, _E.COMPLETE): _A.COMPLETE,
    (_S.DECIDED, _E.ROLLBACK): _A.REFUSE_CONFLICT,
    (_S.DECIDED, _E.FENCE): _A.TELL,
    (_S.DECIDED, _E.LOOKUP): _A.TELL,
    (_S.PLACING, _E.PART): _A.REFUSE_CONFLICT,
    (_S.PLACING, _E.PREPARE): _A.REFUSE_CONFLICT,
    (_S.PLACING, _E.COMMIT_PARTS): _A.REPEAT,
    (_S.PLACING, _E.COMMIT): _A.SETTLE,
    (_S.PLACING, _E.DECIDE): _A.REPEAT,
    (_S.PLACING, _E.COMPLETE): _A.COMPLETE,
    (_S.PLACING, _E.ROLLBACK): _A.REFUSE_CONFLICT,
    (_S.PLACING, _E.FENCE): _A.TELL,
    (_S.PLACING, _E.LOOKUP): _A.TELL,
    (_S.COMMITTED, _E.PART): _A.REFUSE_CONFLICT,
    (_S.COMMITTED, _E.PREPARE): _A.REFUSE_CONFLICT,
    (_S.COMMITTED, _E.COMMIT_PARTS): _A.REPEAT,
    (_S.COMMITTED, _E.COMMIT): _A.REPEAT,
    (_S.COMMITTED, _E.DECIDE): _A.REPEAT,
    (_S.COMMITTED, _E.COMPLETE): _A.REPEAT,
    (_S.COMMITTED, _E.ROLLBACK): _A.REFUSE_CONFLICT,
    (_S.COMMITTED, _E.FENCE): _A.TELL,
    (_S.COMMITTED, _E.LOOKUP): _A.TELL,
    (_S.ROLLED_BACK, _E.PART): _A.REFUSE_CONFLICT,
    (_S.ROLLED_BACK, _E.PREPARE): _A.REFUSE_CONFLICT,
    (_S.ROLLED_BACK, _E.COMMIT_PARTS): _A.REFUSE_CONFLICT,
    (_S.ROLLED_BACK, _E.COMMIT): _A.REFUSE_CONFLICT,
    (_S.ROLLED_BACK, _E.DECIDE): _A.REFUSE_CONFLICT,
    (_S.ROLLED_BACK, _E.COMPLETE): _A.REFUSE_CONFLICT,
    (_S.ROLLED_BACK, _E.ROLLBACK): _A.REPEAT,
    (_S.ROLLED_BACK, _E.FENCE): _A.TELL,
    (_S.ROLLED_BACK, _E.LOOKUP): _A.TELL,
    (_S.FORGOTTEN, _E.PART): _A.REFUSE_FENCED,
    (_S.FORGOTTEN, _E.PREPARE): _A.REFUSE_FENCED,
    (_S.FORGOTTEN, _E.COMMIT_PARTS): _A.REFUSE_FENCED,
    (_S.FORGOTTEN, _E.COMMIT): _A.REFUSE_FENCED,
    (_S.FORGOTTEN, _E.DECIDE): _A.REFUSE_FENCED,
    (_S.FORGOTTEN, _E.COMPLETE): _A.REFUSE_FENCED,
    (_S.FORGOTTEN, _E.ROLLBACK): _A.REFUSE_FENCED,
    (_S.FORGOTTEN, _E.FENCE): _A.REFUSE_FENCED,
    (_S.FORGOTTEN, _E.LOOKUP): _A.REFUSE_FENCED,
}


def next_action(state: TransactionState, event: TransactionEvent) -> Action:
    """Look up what to do.

    Raises:
        TransactionStateError: the pair is not in the table (a defect; the text names both).
    """
    return next_step(TRANSITIONS, state, event)


def group_key(kind: str, group: str) -> str:
    """Under which a kind's transactions of a producer group, a query or the like are indexed."""
    return f"{kind} {group}"


def home_group_key(home: int) -> str:
    """Under which the parts are indexed about which another home decides."""
    return group_key(TransactionKind.BRANCH.value, f"{home:016x}")


def halves_key(session: int) -> str:
    """Under which the halves that a session prepared are indexed."""
    return f"owner {session}"


FROZEN_FIELDS: Final = 8
Frozen = tuple[int, int, int, TransactionState, dict[str, Any], int, int, int]
_BRANCH: Final = TransactionKind.BRANCH.value  # Python 3.11 looks it up several times as long
ANY_KEY = "*"  # a part that collides with every key of its partition
Collision = tuple[int, int, int | str]  # topic id, partition, key's hash or ANY_KEY


class PreparedPart:
    """The messages of an undecided transaction for one partition: one record batch, not yet placed."""

    __slots__ = ("batch", "count", "crc", "max_timestamp_ms", "partition", "topic_id")

    def __init__(self, topic_id: int, partition: int, batch: bytearray, count: int, max_timestamp_ms: int) -> None:
        self.topic_id, self.partition, self.batch = topic_id, partition, batch
        self.count, self.max_timestamp_ms = count, max_timestamp_ms
        self.crc = batches.stored_crc(batch)


class Transaction:
    """A transaction that is open or prepared, or whose messages wait for their place.

    Attributes:
        parts: numbered from 0 in order of arrival.
        meta: what ``prepare`` stated: kind, resource, uuid, deadline_ms, prepared_ms, client, keys (one list or "*" a
            part). Of a part of another home's transaction: ``of``. Of a transaction with branch homes: ``homes``.
        checksum: running CRC32C over all parts' batches, in order.
        file: LSN of the checkpoint in whose file (``prepared/``) its parts are; 0 if they are in none.
        file_parts: so many of its parts are in it.
        order: number of its preparation; grows.
        waiting: requests (peer, opaque, floor, is_delayable) for its commit that wait for earlier ones that it
            collides with.
        is_decided: the home that decides has said that it is committed. In memory only: that home is asked again.
        checks: how often a half was handed out for a check-back in this incarnation of the broker.
        checked_ms: before that time it is not handed out again.
        look_at_ms: when it is looked at, whether it is due (``check_backs``).
        hurried_ms: when a branch will be, or was last, looked at because a commit waits for it.
    """

    __slots__ = (
        "checked_ms", "checks", "checksum", "counter", "file", "file_parts", "hurried_ms", "is_decided", "look_at_ms",
        "meta", "opened_ms", "order", "parts", "session", "size_bytes", "state", "waiting",
    )  # fmt: skip

    def __init__(self, session: int, counter: int, opened_ms: int) -> None:
        self.session, self.counter, self.opened_ms = session, counter, opened_ms
        self.state = TransactionState.OPEN
        self.parts: list[PreparedPart] = []
        self.size_bytes = self.checksum = 0
        self.meta: dict[str, Any] = {}
        self.file = self.file_parts = self.order = self.checks = self.checked_ms = 0
        self.look_at_ms = self.hurried_ms = 0
        self.waiting: list[Any] = []
        self.is_decided = False

    def add(self, part: PreparedPart) -> None:
        """One more part."""
        self.parts.append(part)
        self.size_bytes += len(part.batch)
        self.checksum = batches.checksum(part.batch, self.checksum)

    def attach(self, part: PreparedPart) -> None:
        """Give a restored transaction its next part back; ``restore`` has set the checksum."""
        self.parts.append(part)
        self.size_bytes += len(part.batch)

    def prepare(self, meta: dict[str, Any], order: int) -> None:
        """From now on its coordinator decides, and it has no timeout."""
        self.state, self.meta, self.order = TransactionState.PREPARED, meta, order
        self.opened_ms = meta["prepared_ms"]  # when it was opened is not in the journal

    def await_place(self, meta: dict[str, Any], order: int) -> None:
        """It is decided, and its messages get their place in its turn."""
        self.prepare(meta, order)
        self.state = TransactionState.PLACING

    @property
    def is_committing(self) -> bool:
        """Whether only its turn keeps it from its place."""
        return self.is_decided or bool(self.waiting) or self.state is TransactionState.PLACING

    @property
    def is_branch(self) -> bool:
        """Whether another home decides."""
        return bool(self.meta) and self.meta["kind"] == _BRANCH

    @property
    def name(self) -> tuple[int, int]:
        """Session and counter."""
        return self.session, self.counter

    @property
    def index_keys(self) -> tuple[str, ...]:
        """Keys of the index: the resource's uuid, else kind and group; of a half message its owner too.

        None of the others looks like a uuid: they have a space.
        """
        meta = self.meta
        uuid: str = meta["uuid"]
        if uuid:
            return (uuid,)
        kind = meta["kind"]
        if kind == TransactionKind.HALF.value:
            return group_key(kind, meta["resource"]), halves_key(self.session)
        return (group_key(kind, meta["resource"]),)

    def freeze(self) -> Frozen:
        """A copy without the parts; ``row`` makes it JSON-able, in any thread.

        When a stream was opened is in no record, and it does not live through a restart.
        """
        opened_ms = self.opened_ms if self.meta else 0
        return (
            self.session, self.counter, opened_ms, self.state, self.meta, self.order, len(self.parts), self.checksum,
        )  # fmt: skip

    @classmethod
    def restore(cls, file: int, session: int, counter: int, opened_ms: int, *rest: Any) -> Transaction:
        """The reverse of ``row``, its parts in ``file``; then ``attach`` each of its ``file_parts``."""
        transaction = cls(session, counter, opened_ms)
        state, transaction.meta, transaction.order, transaction.file_parts, transaction.checksum = rest
        transaction.state, transaction.file = TransactionState(state), file if transaction.file_parts else 0
        return transaction


def row(frozen: Sequence[Any]) -> list[object]:
    """What ``Transaction.restore`` takes, of what ``freeze`` returned."""
    session, counter, opened_ms, state, *rest = frozen
    return [session, counter, opened_ms, state.value, *rest]
