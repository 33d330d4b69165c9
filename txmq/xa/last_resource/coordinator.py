"""The last-resource coordinator: a state machine without I/O. One per transaction block.

Theory of operation. The messages are prepared in the broker; the database's own COMMIT, with a marker row in it, is the
decision; then the broker is told, and its answer is not awaited. Over several homes "the broker" is all of them: it has
prepared or rolled back when every home has, and is told when every home is. ``LastResourceCoordinator.step(event)``
answers the effects that the shell (or the simulator) carries out in order; the result of each is the next event.

```
 ACTIVE --BODY_DONE--> PREPARING --+--MARKER_INSERTED,-> MARKED ---PREPARED---------+
   |  ^                            |  MARKER_LEFT                                   |
   |  |                            +--PREPARED--> PREPARED --MARKER_INSERTED--+     |
   |  STREAMING (parts were sent)                                             v     v
   |                                                                       COMMITTING
   | BODY_FAILED, RELEASE_FAILED, anything refused before COMMIT         |      |       |
   v                        MARKER_REFUSED, DATABASE_REFUSED   COMMITTED |      | UNKNOWN
 UNDOING (database) --> WITHDRAWING (broker) <-----------------+         |      v
                          |                                              |  LOOKING_UP --> LOOKUP_FAILED: UNKNOWN
                          v          CONFIRMING <- PROVED_ROLLED_BACK ---|------+
                     ROLLED_BACK                                         v      | PROVED_COMMITTED
                                                                      DECIDED <-+
                                                      COMMIT_WRITTEN |   | COMMIT_LEFT: pending
                                                                     v   v
                                                                   COMMITTED
```

UNDOING that finds the transaction ended by the body (DATABASE_ENDED) leads to REPORTING: the broker is to keep that,
and the end is HAZARD.

Laws:
    * ``COMMIT_DATABASE`` comes only after PREPARED and MARKER_INSERTED, both of them, whichever is first. A marker
      that was left to it (MARKER_LEFT) is part of it, and one that is refused there (MARKER_REFUSED) has kept the
      COMMIT out;
    * from DECIDED nothing leads to a rollback, an interrupt included;
    * once a COMMIT was sent, only the database's own answer or the marker table proves its result. A rolled-back
      marker that gets in proves a rollback only together with the broker's word: a resolver may have found the
      committed marker before, reported it to the broker, and removed it. So CONFIRMING: a broker that has committed is
      right;
    * an owner that may have left a part or a prepare in the broker sends ``SEND_ROLLBACK``, which fences the
      transaction id. If that fails, the resolver finds the prepared transaction, proves by the marker table that it is
      not committed, and rolls it back. The caller does not wait for that: without a marker row it cannot be committed;
    * ROLLED_BACK is the end only if the database's transaction was there to be undone. If the body has ended it by
      itself, its rows may be committed, and that cannot be known any more;
    * a pair that is missing from ``TRANSITIONS`` is an error that names state and event.
"""

from __future__ import annotations

import enum

from txmq.state_machine import Coordinator


class LastResourceState(enum.Enum):
    """State of a last-resource transaction, as its owner knows it."""

    __hash__ = object.__hash__  # Enum's own is a call in Python for each look-up

    ACTIVE = "active"  # the body runs
    STREAMING = "streaming"  # the body runs, and parts of its messages are in the broker
    PREPARING = "preparing"  # prepare is under way, the marker row is being inserted
    MARKED = "marked"  # the marker row is in, uncommitted, or left to COMMIT; prepare is not answered
    PREPARED = "prepared"  # the broker has prepared; the marker row is not in
    COMMITTING = "committing"  # COMMIT is under way: may be decided
    LOOKING_UP = "looking-up"  # COMMIT was not answered: the marker table is asked
    CONFIRMING = "confirming"  # the rolled-back marker got in: the broker says whether it was in time
    DECIDED = "decided"  # the database has committed; the broker is next
    UNDOING = "undoing"  # the database is being rolled back; the broker was never asked for anything
    UNDOING_BOTH = "undoing-both"  # the same, and the broker is next
    WITHDRAWING = "withdrawing"  # the database is rolled back; the broker is next
    REPORTING = "reporting"  # the body had ended the database's transaction by itself; the broker is to keep that
    COMMITTED = "committed"  # the broker's answer is to come
    COMMITTED_PENDING = "committed-pending"  # the resolver tells the broker
    ROLLED_BACK = "rolled-back"
    BROKER_ALONE = "broker-alone"  # the rows are gone; the broker had committed the messages
    HAZARD = "hazard"  # the rows may be there; no message is
    UNKNOWN = "unknown"


ENDS = frozenset(
    {
        LastResourceState.COMMITTED, LastResourceState.COMMITTED_PENDING, LastResourceState.ROLLED_BACK,
        LastResourceState.BROKER_ALONE, LastResourceState.HAZARD, LastResourceState.UNKNOWN,
    }
)  # fmt: skip


class LastResourceEvent(enum.Enum):
    """Events of a last-resource transaction."""

    __hash__ = object.__hash__

    PARTS_STREAMED = "parts streamed"  # a part is about to be sent ahead of prepare
    BODY_DONE = "body done"  # the body returned and RELEASE succeeded
    BODY_FAILED = "body failed"  # raised, or doomed by an SQL error, or RELEASE failed, or the deadline passed
    PREPARED = "prepared"
    PREPARE_REFUSED = "prepare refused"
    PREPARE_UNKNOWN = "prepare unknown"  # no answer: prepared, or to be prepared yet, or lost
    MARKER_INSERTED = "marker inserted"
    MARKER_LEFT = "marker left to commit"  # it goes before COMMIT, which is not done unless the marker gets in
    MARKER_REFUSED = "marker refused"  # too late, taken by a resolver, or any error
    DATABASE_COMMITTED = "database committed"
    DATABASE_REFUSED = "database refused"  # the transaction is still open after the error: surely not committed
    DATABASE_UNKNOWN = "database unknown"
    PROVED_COMMITTED = "proved committed"  # by the marker table
    PROVED_ROLLED_BACK = "proved rolled back"
    LOOKUP_FAILED = "lookup failed"
    DATABASE_ROLLED_BACK = "database undone"  # rolled back, or its connection closed, which rolls it back
    DATABASE_ENDED = "database ended"  # the body had ended its transaction before: there was nothing to undo
    COMMIT_WRITTEN = "commit written"  # to every home
    COMMIT_LEFT = "commit left"  # to the resolver: a home is away
    BROKER_ROLLED_BACK = "broker rolled back"
    BROKER_UNKNOWN = "broker unknown"
    BROKER_CONTRADICTS = "broker contradicts"  # it decided the other way: an operator, or lost data
    INTERRUPTED = "interrupted"  # KeyboardInterrupt, SystemExit: the effect may or may not have been carried out


class LastResourceEffect(enum.Enum):
    """Orders to the shell. Each leads to one event, unless the comment says otherwise."""

    __hash__ = object.__hash__

    SEND_PREPARE = "send prepare"  # only sends; no event
    INSERT_MARKER = "insert marker"
    AWAIT_PREPARED = "await prepared"
    COMMIT_DATABASE = "commit database"
    LOOK_UP = "look up"  # ask the session that answered; else close it, and resolve by the marker table as a resolver
    SEND_COMMIT = "send commit"  # waits for nothing
    ROLL_BACK_DATABASE = "roll back database"
    SEND_ROLLBACK = "send rollback"
    REPORT_HAZARD = "report hazard"  # a rollback with what the broker is to keep


_S, _E, _F = LastResourceState, LastResourceEvent, LastResourceEffect
_Step = tuple[LastResourceState, tuple[LastResourceEffect, ...]]

_UNDO: _Step = (_S.UNDOING, (_F.ROLL_BACK_DATABASE,))
_UNDO_BOTH: _Step = (_S.UNDOING_BOTH, (_F.ROLL_BACK_DATABASE,))
_WITHDRAW: _Step = (_S.WITHDRAWING, (_F.SEND_ROLLBACK,))
_REPORT: _Step = (_S.REPORTING, (_F.REPORT_HAZARD,))
_COMMIT: _Step = (_S.COMMITTING, (_F.COMMIT_DATABASE,))
_LOOK_UP: _Step = (_S.LOOKING_UP, (_F.LOOK_UP,))
_REPORT_COMMIT: _Step = (_S.DECIDED, (_F.SEND_COMMIT,))
_PREPARE: _Step = (_S.PREPARING, (_F.SEND_PREPARE, _F.INSERT_MARKER))

TRANSITIONS: dict[tuple[LastResourceState, LastResourceEvent], _Step] = {
    (_S.ACTIVE, _E.PARTS_STREAMED): (_S.STREAMING, ()),
    (_S.ACTIVE, _E.BODY_DONE): _PREPARE,
    (_S.ACTIVE, _E.BODY_FAILED): _UNDO,
    (_S.ACTIVE, _E.INTERRUPTED): _UNDO,
    (_S.STREAMING, _E.PARTS_STREAMED): (_S.STREAMING, ()),
    (_S.STREAMING, _E.BODY_DONE): _PREPARE,
    (_S.STREAMING, _E.BODY_FAILED): _UNDO_BOTH,
    (_S.STREAMING, _E.INTERRUPTED): _UNDO_BOTH,
    (_S.PREPARING, _E.MARKER_INSERTED): (_S.MARKED, (_F.AWAIT_PREPARED,)),
    (_S.PREPARING, _E.MARKER_LEFT): (_S.MARKED, (_F.AWAIT_PREPARED,)),
    (_S.PREPARING, _E.MARKER_REFUSED): _UNDO_BOTH,
    (_S.PREPARING, _E.PREPARED): (_S.PREPARED, ()),
    (_S.PREPARING, _E.PREPARE_REFUSED): _UNDO_BOTH,
    (_S.PREPARING, _E.PREPARE_UNKNOWN): _UNDO_BOTH,
    (_S.PREPARING, _E.INTERRUPTED): _UNDO_BOTH,
    (_S.MARKED, _E.PREPARED): _COMMIT,
    (_S.MARKED, _E.PREPARE_REFUSED): _UNDO_BOTH,
    (_S.MARKED, _E.PREPARE_UNKNOWN): _UNDO_BOTH,
    (_S.MARKED, _E.INTERRUPTED): _UNDO_BOTH,
    (_S.PREPARED, _E.MARKER_INSERTED): _COMMIT,
    (_S.PREPARED, _E.MARKER_REFUSED): _UNDO_BOTH,
    (_S.PREPARED, _E.INTERRUPTED): _UNDO_BOTH,
    (_S.COMMITTING, _E.DATABASE_COMMITTED): _REPORT_COMMIT,
    (_S.COMMITTING, _E.MARKER_REFUSED): _UNDO_BOTH,
    (_S.COMMITTING, _E.DATABASE_REFUSED): _UNDO_BOTH,
    (_S.COMMITTING, _E.DATABASE_UNKNOWN): _LOOK_UP,
    (_S.COMMITTING, _E.INTERRUPTED): _LOOK_UP,
    (_S.LOOKING_UP, _E.PROVED_COMMITTED): _REPORT_COMMIT,
    (_S.LOOKING_UP, _E.PROVED_ROLLED_BACK): (_S.CONFIRMING, (_F.SEND_ROLLBACK,)),
    (_S.LOOKING_UP, _E.LOOKUP_FAILED): (_S.UNKNOWN, ()),
    (_S.LOOKING_UP, _E.INTERRUPTED): (_S.UNKNOWN, ()),
    (_S.CONFIRMING, _E.BROKER_ROLLED_BACK): (_S.ROLLED_BACK, ()),
    (_S.CONFIRMING, _E.BROKER_CONTRADICTS): (_S.COMMITTED, ()),
    (_S.CONFIRMING, _E.BROKER_UNKNOWN): (_S.UNKNOWN, ()),
    (_S.CONFIRMING, _E.INTERRUPTED): (_S.UNKNOWN, ()),
    (_S.DECIDED, _E.COMMIT_WRITTEN): (_S.COMMITTED, ()),
    (_S.DECIDED, _E.COMMIT_LEFT): (_S.COMMITTED_PENDING, ()),
    (_S.DECIDED, _E.INTERRUPTED): (_S.COMMITTED_PENDING, ()),
    (_S.UNDOING, _E.DATABASE_ROLLED_BACK): (_S.ROLLED_BACK, ()),
    (_S.UNDOING, _E.DATABASE_ENDED): _REPORT,
    (_S.UNDOING, _E.INTERRUPTED): _UNDO,  # rolling back again is harmless
    (_S.UNDOING_BOTH, _E.DATABASE_ROLLED_BACK): _WITHDRAW,
    (_S.UNDOING_BOTH, _E.DATABASE_ENDED): _REPORT,
    (_S.UNDOING_BOTH, _E.INTERRUPTED): _UNDO_BOTH,
    (_S.WITHDRAWING, _E.BROKER_ROLLED_BACK): (_S.ROLLED_BACK, ()),
    (_S.WITHDRAWING, _E.BROKER_UNKNOWN): (_S.ROLLED_BACK, ()),
    (_S.WITHDRAWING, _E.BROKER_CONTRADICTS): (_S.BROKER_ALONE, ()),
    (_S.WITHDRAWING, _E.INTERRUPTED): (_S.ROLLED_BACK, ()),
    (_S.REPORTING, _E.BROKER_ROLLED_BACK): (_S.HAZARD, ()),
    (_S.REPORTING, _E.BROKER_UNKNOWN): (_S.HAZARD, ()),  # the resolver reports it
    (_S.REPORTING, _E.BROKER_CONTRADICTS): (_S.HAZARD, ()),
    (_S.REPORTING, _E.INTERRUPTED): (_S.HAZARD, ()),
}


class LastResourceCoordinator(Coordinator[LastResourceState, LastResourceEvent, LastResourceEffect]):
    """One transaction's place in the table."""

    def __init__(self) -> None:
        super().__init__(TRANSITIONS, ENDS, LastResourceState.ACTIVE)
