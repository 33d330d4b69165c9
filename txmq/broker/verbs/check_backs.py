"""Half messages: the verb ``checks`` hands those that are due for a check-back to a live member of their group.

A half message is a prepared transaction of kind ``half``. The application's checker answers COMMIT, ROLLBACK or
UNKNOWN, and its client commits it or rolls it back. It is due when its owner has been gone for a second or its deadline
has passed, and its last check is long enough ago: the pause doubles from 1 s to a minute and never ends. Counts of
checks are not journaled: after a restart they begin anew.

Invariants:
    * no check-back while the owner is connected and its deadline holds;
    * a check-back settles nothing: UNKNOWN, silence and lost answers leave the half message as it is.
"""

from __future__ import annotations

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.broker.state.check_backs import CheckPoll
from txmq.broker.state.session import BrokerSession
from txmq.broker.state.transaction import Transaction, TransactionState, halves_key
from txmq.broker.verbs.access.audit_log import refusal_of
from txmq.broker.verbs.access.authorizer import GROUP, READ
from txmq.model import TransactionKind
from txmq.protocol.answers import Records
from txmq.protocol.requests import Request
from txmq.protocol.transaction_bodies import DueHalf, encode_half
from txmq.runtime.backoff import Backoff

OWNER_GONE_MS = 1000
PAUSE_MS = Backoff(1000, 60_000)
WAIT_MS_MAX = 30_000
ANSWER_SIZE_BYTES_MAX = 1 << 20  # but at least one half
_HALVES_MAX = 100


def checks(context: Context, client: ClientConnection, request: Request) -> None:
    """Hand out what is due; wait for it as long as ``wait`` says."""
    _, arguments, extensions, _body, opaque = request
    given = extensions or {}
    limit = max(1, min(int(given.get(b"limit", _HALVES_MAX)), _HALVES_MAX))
    wait_ms = min(int(given.get(b"wait", 0)), WAIT_MS_MAX)
    poll = CheckPoll(client, opaque, arguments[0].decode(), limit, context.now_ms + wait_ms)
    _look(context)
    if _hand_out(context, poll):
        return
    if wait_ms == 0 or context.stopping:
        _answer(context, poll, [])
    else:
        context.checks.wait(poll)


# --- when one is due -------------------------------------------------------------------------------------------------


def prepared(context: Context, transaction: Transaction) -> None:
    """A transaction is prepared. A half message is looked at when a check-back can be due."""
    if transaction.meta["kind"] == TransactionKind.HALF.value:
        _watch(context, transaction)


def owner_gone(context: Context, session: BrokerSession) -> None:
    """The session's connection was lost."""
    for _, half in context.state.prepared.behind(0, halves_key(session.number)):
        _watch(context, half)


def tick(context: Context) -> None:
    """Time has passed: halves have become due, polls are over."""
    pending = context.checks
    for group in _look(context):
        for poll in list(pending.polls.get(group, ())):
            if not poll.client.gone:
                _hand_out(context, poll)
    for poll in pending.over.take_all() if context.stopping else pending.over.take_due(context.now_ms):
        _answer(context, poll, [])


def _look(context: Context) -> dict[str, None]:
    """Make those ready whose time has come; their groups."""
    groups: dict[str, None] = {}
    for half in context.checks.take_looks(context.now_ms):
        if _watch(context, half):
            groups[half.meta["resource"]] = None
    return groups


def _watch(context: Context, half: Transaction) -> bool:
    """Have it looked at when it can be due; whether it is now."""
    due_ms = _due_ms(context, half)
    if due_ms is None:
        return False  # its owner is there and has no deadline; it is looked at when the owner goes
    if due_ms > context.now_ms:
        context.checks.look_at(half, due_ms)
        return False
    context.checks.put_ready(half)
    return True


def _due_ms(context: Context, half: Transaction) -> int | None:
    if half.state is not TransactionState.PREPARED:
        return None  # it is committed, and waits for its place
    owner, deadline_ms = context.state.sessions.get(half.session), half.meta["deadline_ms"]
    times = [deadline_ms] if deadline_ms else []
    if owner is None:
        times.append(0)
    elif owner.bound is None:
        times.append(owner.gone_ms + OWNER_GONE_MS)
    return max(min(times), half.checked_ms) if times else None


# --- handing out -----------------------------------------------------------------------------------------------------


def _hand_out(context: Context, poll: CheckPoll) -> bool:
    """Answer a poll if a half message is ready for its group, or if its user may not ask for them any more."""
    refusal = refusal_of(context, poll.client, b"checks", READ, GROUP, poll.group)
    if refusal is not None:
        context.checks.answered(poll)
        context.answer(poll.client, poll.opaque, refusal)
        return True
    content: list[bytes] = []
    size = 0
    while len(content) < poll.limit and size < ANSWER_SIZE_BYTES_MAX:
        half = context.checks.take_ready(poll.group)
        if half is None:
            break
        due_ms = _due_ms(context, half)
        if due_ms is not None and due_ms <= context.now_ms:  # else its owner came back meanwhile
            content.append(_handed_out(context, half))
            size += len(content[-1])
        _watch(context, half)
    if content:
        _answer(context, poll, content)
    return bool(content)


def _answer(context: Context, poll: CheckPoll, content: list[bytes]) -> None:
    context.checks.answered(poll)
    context.counters.checks += len(content)
    context.answer_from_state(poll.client, poll.opaque, Records(b"".join(content)))


def _handed_out(context: Context, transaction: Transaction) -> bytes:
    pause_ms = PAUSE_MS.after(transaction.checks)
    transaction.checks, transaction.checked_ms = transaction.checks + 1, context.now_ms + pause_ms
    parts = []
    for part in transaction.parts:
        topic = context.state.topics.with_id(part.topic_id)
        if topic is not None:
            parts.append((topic.config.name, part.partition, part.batch))
    age_ms = max(0, context.now_ms - transaction.meta["prepared_ms"])
    return encode_half(DueHalf(context.txid_of(transaction.name), transaction.checks, age_ms, tuple(parts)))
