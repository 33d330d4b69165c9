"""Half messages: the verb ``checks`` hands those that are due for a check-back to a live member of their group.

A half is a prepared transaction of kind ``half``; the application's checker answers what became of it, and commit or
rollback settle it. It is due when its owner has been gone for a second or its deadline has passed, and its last check
is long enough ago: the pause doubles from 1 s to a minute and never ends. Who was asked how often is not journaled:
after a restart checks begin anew.

Invariants:
    * no check-back while the owner is connected and its deadline holds;
    * nothing here settles anything: UNKNOWN, silence and lost answers leave the half as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from txmq.broker.context import Context
from txmq.broker.listing import txid_of
from txmq.broker.peer import Peer
from txmq.broker.transaction import Transaction, TransactionState
from txmq.model import TransactionKind
from txmq.protocol import answers
from txmq.protocol.halves import DueHalf, encode_half

Extensions = dict[bytes, bytes] | None
OWNER_GONE_MS = 1000
PAUSE_MS, PAUSE_MS_MAX = 1000, 60_000
WAIT_MS_MAX = 30_000
ANSWER_SIZE_BYTES_MAX = 1 << 20  # but at least one half
_HALVES_MAX = 100


class CheckPoll(NamedTuple):
    """A member that waits for a half to be due."""

    peer: Peer
    opaque: bytes
    group: str
    limit: int
    deadline_ms: int


def checks(
    context: Context, peer: Peer, arguments: list[bytes], extensions: Extensions, _body: bytearray | None,
    opaque: bytes,
) -> None:  # fmt: skip
    """Hand out what is due; wait for it as long as ``wait`` says."""
    given = extensions or {}
    limit = max(1, min(int(given.get(b"limit", _HALVES_MAX)), _HALVES_MAX))
    wait_ms = min(int(given.get(b"wait", 0)), WAIT_MS_MAX)
    poll = CheckPoll(peer, opaque, arguments[0].decode(), limit, context.now_ms + wait_ms)
    if not _hand_out(context, poll):
        context.checks.polls.append(poll)


def tick(context: Context) -> None:
    """Time has passed: halves have become due, polls are over."""
    desk = context.checks
    if desk.asked:
        live = context.state.transactions
        desk.asked = {name: asked for name, asked in desk.asked.items() if name in live}
    waiting, desk.polls = desk.polls, []
    desk.polls.extend(poll for poll in waiting if not poll.peer.gone and not _hand_out(context, poll))


def _hand_out(context: Context, poll: CheckPoll) -> bool:
    """Answer a poll, where something is due or its time is over."""
    content, size = [], 0
    for transaction in _due(context, poll.group):
        half = _handed_out(context, transaction)
        content.append(half)
        size += len(half)
        if len(content) >= poll.limit or size >= ANSWER_SIZE_BYTES_MAX:
            break
    if not content and poll.deadline_ms > context.now_ms and not context.stopping:
        return False
    context.counters.checks += len(content)
    context.send_settled(poll.peer, poll.opaque, answers.value_header(size, poll.opaque) + b"".join(content))
    return True


def _due(context: Context, group: str) -> Iterator[Transaction]:
    now_ms = context.now_ms
    for transaction in list(context.state.transactions.values()):
        meta = transaction.meta
        if transaction.state is not TransactionState.PREPARED or meta["kind"] != TransactionKind.HALF.value:
            continue
        if meta["resource"] != group or context.checks.next_ms((transaction.session, transaction.counter)) > now_ms:
            continue
        if 0 < meta["deadline_ms"] <= now_ms or _is_owner_gone(context, transaction):
            yield transaction


def _is_owner_gone(context: Context, transaction: Transaction) -> bool:
    owner = context.state.sessions.get(transaction.session)
    return owner is None or (owner.bound is None and context.now_ms - owner.gone_ms >= OWNER_GONE_MS)


def _handed_out(context: Context, transaction: Transaction) -> bytes:
    name = (transaction.session, transaction.counter)
    attempt = context.checks.attempts(name) + 1
    pause_ms = min(PAUSE_MS << min(attempt - 1, 16), PAUSE_MS_MAX)
    context.checks.asked[name] = (attempt, context.now_ms + pause_ms)
    parts = []
    for part in transaction.parts:
        topic = context.state.topics.with_id(part.topic_id)
        if topic is not None:
            parts.append((topic.config.name, part.partition, part.batch))
    age_ms = max(0, context.now_ms - transaction.meta["prepared_ms"])
    return encode_half(DueHalf(txid_of(context, name), attempt, age_ms, tuple(parts)))
