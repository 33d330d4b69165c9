"""The two-phase coordinator of XA transactions: a state machine without I/O. One per transaction block.

Theory of operation. Every branch is prepared in its database, one request ``decide`` to the broker decides, then
every branch is committed and reported ``complete``. ``XACoordinator.step(event)`` answers the effects that the shell
(or the simulator) carries out in order; the result of each is the next event. Effects act on all branches at once:
each branch has a ``BranchState`` of its own, and ``vote``, ``committed`` and ``branches_rolled_back`` make one event
of them.

```
 ACTIVE --BODY_DONE--> PREPARING --PREPARED--> DECIDING --DECIDED--> COMMITTING --BRANCHES_COMMITTED--> REPORTING
   |                     |    |                 | |  |                 ^    |                              |
   | BODY_FAILED         |    | MAYBE_PREPARED  | |  | DECIDE_DOUBTFUL |    | SOME_COMMITTED               v
   |       NOT_PREPARED  |    |                 | |  v                 |    v                          COMMITTED
   |       PARTS_REFUSED |    | DECIDE_REFUSED  | | ASKING --DECIDED---+  REPORTING_SOME
   v                     |    v                 | |  |  |                   |
 UNDOING <---------------+  FENCING <-----------+ |  |  | FENCE_UNKNOWN     v
   |                         |   |                |  |  v                COMMITTED_PENDING
   |                  FENCED |   | FENCE_UNKNOWN  +--|-> LEAVING_UNKNOWN
   |                         v   v   DECIDE_UNKNOWN  |          |
   |          UNDOING_FENCED  LEAVING                |          v
   |             |   ^           |                   |       UNKNOWN
   v             v   +-----------|--------FENCED-----+
 ROLLED_BACK <---+               v
                        ROLLED_BACK_PENDING
```

FENCING: some branch is or may be prepared, and nothing was decided nor will be, since this owner never sends ``decide``
(again). ASKING: ``decide`` was sent, and what became of it is not known; the broker rolls it back now, or says that it
has decided.

Laws:
    * ``SEND_DECIDE`` comes only when every branch is prepared; only the broker's answer makes it a decision;
    * no branch that may be prepared is rolled back before the broker has fenced the transaction: ``ROLL_BACK_BRANCHES``
      comes in UNDOING, when none can be prepared, and after FENCED (or FORGOTTEN, if ``decide`` was never sent).
      An owner that cannot fence leaves the branch to the resolver, which does;
    * after DECIDED nothing rolls back, an interrupt included; branches that cannot be finished here are left to the
      resolver;
    * a branch is reported complete only after its own commit;
    * ROLLED_BACK and ROLLED_BACK_PENDING are the end only if no ``decide`` was executed, nor ever will be. If that
      cannot be known the end is UNKNOWN;
    * every interrupt leads to an end, and none takes a decision back;
    * a pair that is missing from ``TRANSITIONS`` is an error that names state and event.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from txmq.state_machine import Coordinator


class XAState(enum.Enum):
    """State of an XA transaction, as its owner knows it."""

    __hash__ = object.__hash__  # Enum's own is a call in Python for each look-up

    ACTIVE = "active"  # the body runs
    PREPARING = "preparing"  # the branches are being prepared
    DECIDING = "deciding"  # every branch is prepared; decide is under way: may be decided
    COMMITTING = "committing"  # decided; the branches are being committed
    REPORTING = "reporting"  # every branch is committed; that is being reported to the broker
    REPORTING_SOME = "reporting-some"  # the same of some branches; the others are left to the resolver
    FENCING = "fencing"  # to be rolled back; some branch may be prepared; nothing was decided
    ASKING = "asking"  # decide may have been executed: the broker fences, or says so
    UNDOING = "undoing"  # no branch can be prepared: they are rolled back
    UNDOING_FENCED = "undoing-fenced"  # the broker has forced the rollback; so the branches are rolled back
    LEAVING = "leaving"  # never decided; connections are closed, what may be prepared is left to the resolver
    LEAVING_UNKNOWN = "leaving-unknown"  # perhaps decided; everything is left to the resolver
    COMMITTED = "committed"
    COMMITTED_PENDING = "committed-pending"  # the resolver finishes some branch, or reports it
    ROLLED_BACK = "rolled-back"
    ROLLED_BACK_PENDING = "rolled-back-pending"  # the resolver rolls some branch back
    UNKNOWN = "unknown"


ENDS = frozenset(
    {XAState.COMMITTED, XAState.COMMITTED_PENDING, XAState.ROLLED_BACK, XAState.ROLLED_BACK_PENDING, XAState.UNKNOWN}
)


class XAEvent(enum.Enum):
    """Events of an XA transaction."""

    __hash__ = object.__hash__

    BODY_DONE = "body done"
    BODY_FAILED = "body failed"  # raised, or doomed by an SQL error, or a branch was ended by it
    PARTS_REFUSED = "parts refused"  # parts sent ahead were not taken, or the deadline passed; nothing prepared
    PREPARED = "prepared"  # every branch
    NOT_PREPARED = "not prepared"  # some branch refused, and no branch is or may be prepared
    MAYBE_PREPARED = "maybe prepared"  # some branch refused or did not answer, and some is or may be prepared
    DECIDED = "decided"  # the broker says so, to decide or when it is asked
    DECIDE_REFUSED = "decide refused"  # or not sent at all; surely no attempt was executed, or will be
    DECIDE_DOUBTFUL = "decide doubtful"  # refused after an attempt that was not answered
    DECIDE_UNKNOWN = "decide unknown"  # no answer, and no time left
    BRANCHES_COMMITTED = "branches committed"
    SOME_COMMITTED = "some committed"  # of the others nothing is known
    REPORTED = "reported"
    NOT_REPORTED = "not reported"
    FENCED = "fenced"  # the broker has forced the rollback: a decide that comes later is refused
    FORGOTTEN = "forgotten"  # the broker keeps nothing of this id, and executes nothing under it any more
    FENCE_UNKNOWN = "fence unknown"
    BRANCHES_ROLLED_BACK = "branches undone"
    SOME_ROLLED_BACK = "some undone"  # the others are left to the resolver
    LEFT = "left"
    INTERRUPTED = "interrupted"  # KeyboardInterrupt, SystemExit: the effect may or may not have been carried out


class XAEffect(enum.Enum):
    """Orders to the shell. Each leads to one event, unless the comment says otherwise."""

    __hash__ = object.__hash__

    SEND_PARTS = "send parts"  # parts that do not fit into decide; an event only if that failed
    PREPARE_BRANCHES = "prepare branches"
    SEND_DECIDE = "send decide"  # the same request until it is answered or time is up
    COMMIT_BRANCHES = "commit branches"
    SEND_COMPLETE = "send complete"  # of those that are committed
    SEND_ROLLBACK = "send rollback"  # forced at the broker; one that has decided answers so
    ROLL_BACK_BRANCHES = "roll back branches"
    WITHDRAW = "withdraw"  # the broker may forget parts sent ahead; nothing depends on it, no event
    CLOSE_BRANCHES = "close branches"  # no event
    LEAVE = "leave"  # close the connections; the resolver has the rest


class BranchState(enum.Enum):
    """State of one branch, as its owner knows it."""

    __hash__ = object.__hash__

    ACTIVE = "active"  # begun, not prepared; gone when its connection ends
    PREPARING = "preparing"  # XA PREPARE was called: it may be prepared
    PREPARED = "prepared"
    REFUSED = "refused"  # surely not prepared
    ENDING = "ending"  # its commit or rollback was called
    COMMITTED = "committed"
    ROLLED_BACK = "rolled-back"
    LEFT = "left"  # closed; the resolver finishes it


_MAY_BE_PREPARED = frozenset({BranchState.PREPARING, BranchState.PREPARED})
_ALL_PREPARED, _ALL_COMMITTED = frozenset({BranchState.PREPARED}), frozenset({BranchState.COMMITTED})
_S, _E, _F = XAState, XAEvent, XAEffect
_Step = tuple[XAState, tuple[XAEffect, ...]]

_UNDO: _Step = (_S.UNDOING, (_F.ROLL_BACK_BRANCHES,))
_UNDO_FENCED: _Step = (_S.UNDOING_FENCED, (_F.ROLL_BACK_BRANCHES,))
_FENCE: _Step = (_S.FENCING, (_F.SEND_ROLLBACK,))
_ASK: _Step = (_S.ASKING, (_F.SEND_ROLLBACK,))
_COMMIT: _Step = (_S.COMMITTING, (_F.COMMIT_BRANCHES,))
_REPORT_SOME: _Step = (_S.REPORTING_SOME, (_F.CLOSE_BRANCHES, _F.SEND_COMPLETE))
_LEAVE: _Step = (_S.LEAVING, (_F.LEAVE,))
_LEAVE_UNKNOWN: _Step = (_S.LEAVING_UNKNOWN, (_F.LEAVE,))
_PENDING: _Step = (_S.COMMITTED_PENDING, ())

TRANSITIONS: dict[tuple[XAState, XAEvent], _Step] = {
    (_S.ACTIVE, _E.BODY_DONE): (_S.PREPARING, (_F.SEND_PARTS, _F.PREPARE_BRANCHES)),
    (_S.ACTIVE, _E.BODY_FAILED): _UNDO,
    (_S.ACTIVE, _E.INTERRUPTED): _UNDO,
    (_S.PREPARING, _E.PARTS_REFUSED): _UNDO,
    (_S.PREPARING, _E.PREPARED): (_S.DECIDING, (_F.SEND_DECIDE,)),
    (_S.PREPARING, _E.NOT_PREPARED): _UNDO,
    (_S.PREPARING, _E.MAYBE_PREPARED): _FENCE,
    (_S.PREPARING, _E.INTERRUPTED): _FENCE,
    (_S.DECIDING, _E.DECIDED): _COMMIT,
    (_S.DECIDING, _E.DECIDE_REFUSED): _FENCE,
    (_S.DECIDING, _E.DECIDE_DOUBTFUL): _ASK,
    (_S.DECIDING, _E.DECIDE_UNKNOWN): _LEAVE_UNKNOWN,
    (_S.DECIDING, _E.INTERRUPTED): _ASK,
    (_S.COMMITTING, _E.BRANCHES_COMMITTED): (_S.REPORTING, (_F.SEND_COMPLETE,)),
    (_S.COMMITTING, _E.SOME_COMMITTED): _REPORT_SOME,
    (_S.COMMITTING, _E.INTERRUPTED): _REPORT_SOME,
    (_S.REPORTING, _E.REPORTED): (_S.COMMITTED, ()),
    (_S.REPORTING, _E.NOT_REPORTED): _PENDING,
    (_S.REPORTING, _E.INTERRUPTED): _PENDING,
    (_S.REPORTING_SOME, _E.REPORTED): _PENDING,
    (_S.REPORTING_SOME, _E.NOT_REPORTED): _PENDING,
    (_S.REPORTING_SOME, _E.INTERRUPTED): (_S.REPORTING_SOME, (_F.CLOSE_BRANCHES, _F.SEND_COMPLETE)),
    (_S.FENCING, _E.FENCED): _UNDO_FENCED,
    (_S.FENCING, _E.FORGOTTEN): _UNDO_FENCED,  # as good as a fence: this owner's decide was not executed before
    (_S.FENCING, _E.FENCE_UNKNOWN): _LEAVE,
    (_S.FENCING, _E.DECIDED): _LEAVE_UNKNOWN,  # another client decided under this id: nothing here may be ended
    (_S.FENCING, _E.INTERRUPTED): _LEAVE,
    (_S.ASKING, _E.FENCED): _UNDO_FENCED,
    (_S.ASKING, _E.DECIDED): _COMMIT,
    (_S.ASKING, _E.FORGOTTEN): _LEAVE_UNKNOWN,
    (_S.ASKING, _E.FENCE_UNKNOWN): _LEAVE_UNKNOWN,
    (_S.ASKING, _E.INTERRUPTED): _LEAVE_UNKNOWN,
    (_S.UNDOING, _E.BRANCHES_ROLLED_BACK): (_S.ROLLED_BACK, (_F.WITHDRAW,)),  # row locks go first
    (_S.UNDOING, _E.SOME_ROLLED_BACK): (_S.ROLLED_BACK_PENDING, (_F.WITHDRAW,)),
    (_S.UNDOING, _E.INTERRUPTED): _LEAVE,  # closing rolls back what is not prepared
    (_S.UNDOING_FENCED, _E.BRANCHES_ROLLED_BACK): (_S.ROLLED_BACK, ()),
    (_S.UNDOING_FENCED, _E.SOME_ROLLED_BACK): (_S.ROLLED_BACK_PENDING, ()),
    (_S.UNDOING_FENCED, _E.INTERRUPTED): _LEAVE,
    (_S.LEAVING, _E.LEFT): (_S.ROLLED_BACK_PENDING, ()),
    (_S.LEAVING, _E.INTERRUPTED): _LEAVE,  # closing twice is harmless
    (_S.LEAVING_UNKNOWN, _E.LEFT): (_S.UNKNOWN, ()),
    (_S.LEAVING_UNKNOWN, _E.INTERRUPTED): _LEAVE_UNKNOWN,
}


def vote(branches: Iterable[BranchState]) -> XAEvent:
    """The event of all branches, when each has been asked to prepare."""
    states = set(branches)
    if states <= _ALL_PREPARED:
        return XAEvent.PREPARED
    return XAEvent.MAYBE_PREPARED if states & _MAY_BE_PREPARED else XAEvent.NOT_PREPARED


def committed(branches: Iterable[BranchState]) -> XAEvent:
    """The event of all branches, when each has been asked to commit."""
    return XAEvent.BRANCHES_COMMITTED if _ALL_COMMITTED.issuperset(branches) else XAEvent.SOME_COMMITTED


def branches_rolled_back(branches: Iterable[BranchState]) -> XAEvent:
    """The event of all branches, when each has been asked to roll back."""
    return XAEvent.BRANCHES_ROLLED_BACK if set(branches) <= {BranchState.ROLLED_BACK} else XAEvent.SOME_ROLLED_BACK


class XACoordinator(Coordinator[XAState, XAEvent, XAEffect]):
    """One transaction's place in the table."""

    def __init__(self) -> None:
        super().__init__(TRANSITIONS, ENDS, XAState.ACTIVE)
