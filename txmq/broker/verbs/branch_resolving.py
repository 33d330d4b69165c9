"""Branches are brought to their outcome: what the home that decides is asked, and what follows from its answer.

```
 prepared, and its client says nothing --outcome branch= owner--> committed:        placed in its turn
                                                                  rolled-back, 410: rolled back
                                                                  410 never-issued: asked again later, and an alarm
                                                                  prepared:         asked again later
                                                                  403:              asked again later
                                                                  unknown:          owner there: asked again later
                                                                                    owner gone:  outcome ... fence
 placed and forced ---------------------complete branch=--------> 200, 410:         reported; readers may see it
```

410 `fenced` means rolled back to a branch in doubt: a decision that lists the branch is kept until the branch is
reported. A home that answers `never-issued` was restored from an older copy, and may have lost the decision: an
operator ends the branch. To a placed one any 410 means that nothing waits for its report: it was reported, or an
operator has placed it, and the home that decides did not commit. ``fence`` makes the home refuse a decision that comes
later, so a slow client is fenced only when it has been gone for a second, or its deadline has passed. 403: whoever
prepared the branch has named a transaction of somebody else (``access/required_grants.py``), which does not list it.
Nobody but its own user or an operator ends it then.
"""

from __future__ import annotations

from collections.abc import Mapping

from txmq.broker.cluster.branch_asks import FIRST_LOOK_MS, PREPARED_PAUSE_MS_MAX, BranchAsk, Look, Reminder
from txmq.broker.context import Context
from txmq.broker.state.decisions import BranchPart
from txmq.broker.state.transaction import Transaction, home_group_key
from txmq.broker.verbs import ordered_commits
from txmq.broker.verbs.access.required_grants import owner_of
from txmq.broker.verbs.decide import reported
from txmq.broker.verbs.prepare_commit import roll_back
from txmq.errors import NeverIssuedError
from txmq.runtime.crashpoints import crash_point
from txmq.xid import TxId

OWNER_GONE_MS = 1000
_OK, _FORBIDDEN, _GONE = 200, 403, 410
_NEVER_ISSUED = NeverIssuedError.wire_name.encode()


def began(context: Context) -> None:
    """The broker has started: what can be placed is, and every branch that the journal brought back is looked at."""
    ordered_commits.place_what_waited(context)
    for _, transaction in context.state.prepared.behind(0):
        if transaction.is_branch:
            look = Look(transaction.name, transaction.meta["of"])
            context.branch_asks.at(context.now_ms + FIRST_LOOK_MS, look)
    for part in context.state.branch_parts.unreported.values():
        placed_durably(context, part)


def placed_durably(context: Context, part: BranchPart) -> None:
    """The record that placed a part is forced: the home that decided is told.

    If readers do not wait for that, it is told with the next tick: many reports then share a sync at either home.
    """
    part.is_durable = True
    look = Look(part.name, part.of)
    if part.is_held:
        context.branch_asks.now(look)
    else:
        context.branch_asks.at(context.now_ms, look)


def led_anew(context: Context, home: int) -> None:
    """Another home has a new leader: what is undecided there may have been decided, and here it was not heard of."""
    _look_soon(context, home)
    context.branch_asks.led_anew(home)


def lost(context: Context, home: int) -> None:
    """The connection to another home is lost, or none can be made: it is asked again later, and about all branches."""
    if context.branch_asks.lost(home, context.now_ms):
        _look_soon(context, home)


def _look_soon(context: Context, home: int) -> None:
    branches = [transaction for _, transaction in context.state.prepared.behind(0, home_group_key(home))]
    context.branch_asks.hurry([branch for branch in branches if not branch.is_committing], context.now_ms)


def take_asks(context: Context) -> list[BranchAsk]:
    """Effects: what other homes are asked now."""
    asks = []
    for number, look in context.branch_asks.take(context.now_ms):
        home = TxId.parse(look.other).home
        words: Mapping[str, str | None]
        if isinstance(look, Reminder):
            words = {"of": context.txid_of(look.name), "for": owner_of(context, look.name)}
            asks.append(BranchAsk(number, home, "outcome", look.branch, words))
            continue
        words = {"branch": context.txid_of(look.name), "for": owner_of(context, look.name)}
        part = context.state.branch_parts.unreported.get(look.name)
        if part is not None and not part.is_durable:
            context.branch_asks.answered(number)  # ``placed_durably`` comes
            continue
        if part is not None:
            crash_point("broker.branch.reports")
            asks.append(BranchAsk(number, home, "complete", look.of, words))
            continue
        fence: Mapping[str, str | None] = {}
        if look.is_fencing:
            crash_point("broker.branch.fences")
            fence = {"fence": None}
        else:
            crash_point("broker.branch.asks")
        asks.append(BranchAsk(number, home, "outcome", look.of, {**words, "owner": None, **fence}))
    return asks


def answered(context: Context, ask: BranchAsk, code: int, body: bytes) -> None:
    """The leader of a home has answered."""
    look = context.branch_asks.answered(ask.number)
    if not isinstance(look, Look):  # a reminder needs no answer
        return
    part = context.state.branch_parts.unreported.get(look.name)
    if part is not None:
        _answered_report(context, look, part, code if ask.verb == "complete" else None)
        return
    transaction = context.state.transactions.get(look.name)
    if transaction is not None and not transaction.is_committing:
        _answered_outcome(context, look, transaction, code, body)


def _answered_report(context: Context, look: Look, part: BranchPart, code: int | None) -> None:
    if code in (_OK, _GONE):
        reported(context, part.name)
    elif code is not None:
        context.branch_asks.again(look, context.now_ms)
    elif part.is_durable:
        context.branch_asks.now(Look(part.name, part.of))  # it was placed while its outcome was asked for


def _answered_outcome(context: Context, look: Look, branch: Transaction, code: int, body: bytes) -> None:
    word, _, rest = body.partition(b"\n")
    if code == _GONE and body.startswith(_NEVER_ISSUED):
        _left_to_operator(context, look, branch)
    elif code == _GONE or (code == _OK and word == b"rolled-back"):
        crash_point("broker.branch.told_rolled_back")
        roll_back(context, *branch.name, 0)
    elif code == _OK and word == b"committed":
        crash_point("broker.branch.told_committed")
        ordered_commits.commit_decided(context, branch)
    elif code == _OK and word == b"unknown":
        _look_for_owner(context, look, branch, rest)
    elif code == _FORBIDDEN or (code == _OK and word == b"prepared"):
        context.branch_asks.again(look, context.now_ms, pause_ms_max=PREPARED_PAUSE_MS_MAX)
    else:
        context.branch_asks.again(look, context.now_ms)


def _left_to_operator(context: Context, look: Look, branch: Transaction) -> None:
    """The home that decides was restored from an older copy: it may have decided, and others may have committed."""
    if not (look.is_alarmed or look.is_extra):
        event = "a branch stays prepared: the home that decides was restored, and lost its transaction"
        context.alarms.append({"event": event, "txid": context.txid_of(branch.name), "of": look.of})
    context.branch_asks.again(look._replace(is_alarmed=True), context.now_ms, pause_ms_max=PREPARED_PAUSE_MS_MAX)


def _look_for_owner(context: Context, look: Look, branch: Transaction, told: bytes) -> None:
    now_ms, deadline_ms = context.now_ms, branch.meta["deadline_ms"]
    gone_ms = int(told.split()[-1]) if told.startswith(b"owner gone ") else None
    if (deadline_ms and now_ms >= deadline_ms) or (gone_ms is not None and gone_ms >= OWNER_GONE_MS):
        context.branch_asks.now(look._replace(is_fencing=True))
    elif gone_ms is not None:
        context.branch_asks.at(now_ms + OWNER_GONE_MS - gone_ms, look)
    else:
        context.branch_asks.again(look, now_ms, deadline_ms)
