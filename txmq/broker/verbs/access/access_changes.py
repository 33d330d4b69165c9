"""How users, grants and quotas are changed: planned, then journaled here, or asked of the registry first.

Theory of operation. A verb plans: it looks at what is known, and says which entries make the change, or refuses. A
broker that is alone journals them at once. With a registry its records are the truth, and what this home knows may be
a moment old. So the registry is asked to change them as of the version that the plan saw; a refusal, a list, and a
plan that changes nothing are confirmed in the same way. If the version is another one by then, its records come with
the answer and are taken over (``take_over``), and the verb plans again, its connection's grants included. Only what
the registry has is folded: every home does it alike, this one too.

Invariants:
    * one change is one journal entry, folded as recovery folds it;
    * nobody is told of a change before the registry has it, and this home's journal;
    * while the registry does not answer nothing is changed; lists, logins and grants go on with what is known.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from txmq.broker.client_connection import ClientConnection
from txmq.broker.cluster.cluster_view import ClusterView, RegistryState
from txmq.broker.cluster.registry_asks import ChangeAccess, Result
from txmq.broker.context import Context
from txmq.broker.state.principals import Entry, Secrets, changes_by, entries_between
from txmq.broker.verbs.access.audit_log import audit, refused
from txmq.broker.verbs.access.authorizer import log_out, strangers_from_now_on
from txmq.broker.verbs.access.required_grants import admit
from txmq.config import why_no_users
from txmq.errors import BadRequestError, BrokerError, InvalidNameError, RegistryAwayError, TxmqError, UnavailableError
from txmq.model import is_valid_name
from txmq.protocol.grants import ALL
from txmq.protocol.requests import Request
from txmq.redo import entries
from txmq.registry.cluster_metadata import SECRET, Access, Changes

PLANS_MAX: Final = 10  # of one request, while others change users
SECRET_BITS: Final = 256


class Plan(NamedTuple):
    """What a request results in: entries, and the line that says who did what. No entries: nothing changes."""

    made: Sequence[Entry] = ()
    event: str = ""
    fields: Mapping[str, str] = MappingProxyType({})


@dataclass(slots=True)
class Work:
    """A request about users: its plan, and its answer after that.

    Attributes:
        client, request: who asks what.
        plan: looks at what is known now. Raises BrokerError: refused.
        describe: the fields of the answer. Raises BrokerError likewise.
        is_list: it changes nothing, and is answered without the registry, too.
        plans_left: how often it may be planned still.
        is_audited: the line about it is written.
        is_answered: that the registry does not answer.
    """

    client: ClientConnection
    request: Request
    plan: Callable[[], Plan]
    describe: Callable[[], dict[str, Any]]
    is_list: bool = False
    plans_left: int = PLANS_MAX
    is_audited: bool = False
    is_answered: bool = False


def carry_out(context: Context, work: Work) -> None:
    """Plan, change, answer.

    Raises:
        BrokerError: refused.
    """
    if context.cluster is not None:
        _ask(context, context.cluster, work)
        return
    plan = work.plan()
    for kind, fields in plan.made:
        journal(context, kind, fields)
    if plan.made:
        audit(context, work.client, plan.event, **plan.fields)
    _answer(context, work, is_new=bool(plan.made))


def journal(context: Context, kind: int, fields: dict[str, Any]) -> None:
    """Journal and fold one entry. The first user ends anonymity, on every connection."""
    principals = context.state.principals
    was_open = not principals.users
    if kind == entries.USER_REMOVED:
        log_out(context, fields["user"])
    context.group.add_entry(entries.json_entry(kind, fields))
    principals.fold(kind, fields)
    if was_open and principals.users:
        strangers_from_now_on(context)


def _answer(context: Context, work: Work, *, is_new: bool) -> None:
    text = json.dumps(work.describe()).encode()
    if is_new:
        context.answer_when_durable(work.client, work.request[4], text)
    else:
        context.answer_from_state(work.client, work.request[4], text)


# --- with a registry -------------------------------------------------------------------------------------------------


def take_over(context: Context, view: ClusterView, access: Access, *, is_anew: bool = False) -> None:
    """Make users, grants and quotas what the registry has.

    Args:
        is_anew: compare all, also at the same version: the journal may have been changed without the registry.
    """
    principals = context.state.principals
    if access.version < principals.registry_version:
        if view.older_access != access.version:
            view.older_access = access.version
            reason = f"its users have version {access.version}, and had {principals.registry_version}: not taken over"
            context.alarms.append({"event": "the registry contradicts the journal", "reason": reason})
        return
    if access.version == principals.registry_version and not is_anew:
        return
    for kind, fields in entries_between(principals, access):
        context.group_with_room()
        journal(context, kind, fields)
        context.group.needs_sync = True


def _ask(context: Context, view: ClusterView, work: Work) -> None:
    """Have the registry change what a plan says, or confirm that it is of the newest version."""
    if view.state is not RegistryState.CONNECTED:
        _away(context, work, f"the registry does not answer ({view.state.value})")
        return
    changes: Changes = {}
    refusal: BrokerError | None = None
    try:
        plan = work.plan()
        changes = _changes(context, plan)
    except BrokerError as error:
        plan, refusal = Plan(), error.with_traceback(None)
    if changes and not work.is_audited:
        audit(context, work.client, plan.event, **plan.fields)
        work.is_audited = True
    version = context.state.principals.registry_version

    def answered(result: Result) -> None:
        _answered(context, work, result, refusal, is_new=bool(changes))

    def lost() -> None:
        if not work.client.gone:
            _away(context, work, _unheard(is_new=bool(changes)))
        work.is_answered = True

    view.ask(lambda number: ChangeAccess(number, version, changes), answered, when_lost=lost)


def _unheard(*, is_new: bool) -> str:
    text = "whether it was done is not known" if is_new else "nothing was changed"
    return f"the registry does not answer: {text}"


def _changes(context: Context, plan: Plan) -> Changes:
    """The registry's records for the plan's entries. The first user brings the cluster's secrets."""
    principals = context.state.principals
    changes = dict(changes_by(principals, plan.made))
    if not principals.users and any(kind == entries.USER for kind, _ in plan.made):
        reason = why_no_users(context.settings)
        if reason:
            raise BadRequestError(reason)
        drawn = [f"{context.random.bits(SECRET_BITS):064x}" for _ in range(2)]
        changes[SECRET] = Secrets(*drawn)._asdict()
    return changes


def _answered(context: Context, work: Work, result: Result, refusal: BrokerError | None, *, is_new: bool) -> None:
    if work.client.gone or work.is_answered:
        return
    if isinstance(result, RegistryAwayError):
        _away(context, work, f"{_unheard(is_new=is_new)} ({result})")
    elif isinstance(result, TxmqError):
        _refuse(context, work, UnavailableError(str(result)))
    elif not result.value:
        _guarded(context, work, lambda: _again(context, work))
    elif refusal is not None:
        _refuse(context, work, refusal)
    else:
        _guarded(context, work, lambda: _answer(context, work, is_new=is_new))


def _again(context: Context, work: Work) -> None:
    """Others came first: their changes are known now."""
    work.plans_left -= 1
    if not work.plans_left:
        raise UnavailableError(f"others changed users {PLANS_MAX} times meanwhile: nothing was changed; repeat")
    if work.client.permissions is not None:
        admit(context, work.client, work.request)
    assert context.cluster is not None
    _ask(context, context.cluster, work)


def _guarded(context: Context, work: Work, step: Callable[[], None]) -> None:
    try:
        step()
    except BrokerError as error:
        _refuse(context, work, error.with_traceback(None))


def _away(context: Context, work: Work, reason: str) -> None:
    """What the registry does not answer: lists are of what this home knows."""
    if work.is_list:
        _guarded(context, work, lambda: _answer(context, work, is_new=False))
        return
    _refuse(context, work, UnavailableError(f"{reason}. Users, grants and quotas change again when ZooKeeper is back"))


def _refuse(context: Context, work: Work, error: BrokerError) -> None:
    context.counters.errors += 1
    if work.client.permissions is not None:
        refused(context, work.client, work.request[0], error)
    context.answer_from_state(work.client, work.request[4], error)


# --- names -----------------------------------------------------------------------------------------------------------


def check_name(noun: str, name: str) -> None:
    """Refuse what is no name; ``*`` is none either."""
    if not is_valid_name(name):
        raise InvalidNameError(f"{noun} {name[:80]!r}: 1 to 200 of A-Z a-z 0-9 . _ -, not beginning with . or -")


def chosen(context: Context, name: str) -> list[str]:
    """The names of all users, or of one that is known."""
    principals = context.state.principals
    return list(principals.users) if name == ALL else [principals.known(name).name]
