"""Checks of the verbs of transactions before they change anything: owner, state, limits, and the branches they name.

A *branch* is the part of a transaction at a home that does not decide it. It is prepared under a txid of that home, and
names the deciding transaction with ``of=`` (``held``: readers must wait). The decision lists its branches with
``homes=``: the txid of each; and those in databases in its body.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.broker.state.session import BrokerSession
from txmq.broker.state.transaction import Action, Transaction, TransactionState
from txmq.broker.verbs.access.authorizer import INSTALL, RESOURCE, TOPIC, WRITE, require
from txmq.broker.verbs.appending import Part, refuse_unready
from txmq.errors import (
    BadRequestError,
    BrokerError,
    FencedError,
    NeverIssuedError,
    NotOwnerError,
    OtherSessionError,
    OverloadedError,
    SessionFullError,
    TooLargeError,
    TransactionConflictError,
    UnknownTransactionError,
)
from txmq.protocol.transaction_bodies import split_branches
from txmq.redo import entries
from txmq.xid import TxId

UNFINISHED_OUTCOMES_MAX = 65_536
OUTCOMES_OVER_MAX = 1_000_000  # of all sessions, beyond ``outcomes_kept`` of each: some 250 MB
FENCES_BESIDE_MAX = 65_536  # so that a branch left by a session full of commits can still be rolled back
_COUNTER_MAX = (1 << 64) - 1  # 64 bits in the journal; a decimal of 20 digits may be more
HOMES_MAX = 32  # so that they fit a line
Given = dict[bytes, bytes]


def state_of(context: Context, session: BrokerSession, counter: int) -> TransactionState:
    """The state of a transaction, on the assigned side."""
    transaction = context.state.transactions.get((session.number, counter))
    if transaction is not None:
        return transaction.state  # whatever floor was stated: what is undecided stays open to its decision
    if (session.number, counter) in context.state.decisions.incomplete:
        return TransactionState.DECIDED
    if counter <= session.floor:
        return TransactionState.FORGOTTEN
    if counter in session.outcomes:
        is_committed = isinstance(session.outcomes[counter], tuple)
        return TransactionState.COMMITTED if is_committed else TransactionState.ROLLED_BACK
    return TransactionState.NONE


def locate(context: Context, text: bytes) -> tuple[TxId, BrokerSession]:
    """Read a txid, and find its session.

    Raises:
        BadRequestError, NotOwnerError: not a txid, another home.
        FencedError: its session has ended.
        NeverIssuedError: there was no such session.
    """
    txid = at_home(context, text)
    session = context.state.sessions.get(txid.session)
    if session is None:
        raise no_session(context, txid.session, f"session {txid.session:x} of transaction {txid}")
    if txid.counter < 1:
        raise BadRequestError("transaction counters start at 1")
    return txid, session


def no_session(context: Context, number: int, what: str) -> FencedError:
    """The refusal of a session that is not there: it has ended, or this broker's history has never issued it.

    Args:
        what: begins the text.
    """
    if number in context.state.issued_sessions:
        return FencedError(f"{what} has ended")
    return NeverIssuedError(f"{what} was never issued here: was this broker restored from an older copy?")


def at_home(context: Context, text: bytes) -> TxId:
    """Read a txid of this broker; its session may have ended.

    Raises:
        BadRequestError, NotOwnerError: not a txid, another home.
    """
    try:
        txid = _read_txid(text)
    except ValueError as error:
        raise BadRequestError(str(error)) from None
    identity = context.identity
    if txid.cluster != identity.cluster or txid.home != identity.node:
        raise NotOwnerError(
            f"transaction {txid} is not at home here but at {txid.cluster:016x}-{txid.home:016x} "
            "(txmq stats: cluster, home)"
        )
    return txid


@lru_cache(maxsize=4096)
def _read_txid(text: bytes) -> TxId:
    """Kept: most ids are asked about twice within milliseconds, at the decision and when a branch is complete."""
    return TxId.parse(text.decode("ascii", "replace"))


def floor_of(given: dict[bytes, bytes], client: ClientConnection, session: BrokerSession) -> int:
    """The floor a request states. Only the session's own client knows what it has seen: from others it is ignored."""
    floor = int(given.get(b"floor", 0))
    if floor > _COUNTER_MAX:
        raise BadRequestError(f"floor is at most {_COUNTER_MAX}")
    return floor if client.session is session else 0


def require_owner(client: ClientConnection, session: BrokerSession) -> None:
    """Refuse what only the session's own connection may ask for."""
    if client.session is not session:
        raise OtherSessionError("the transaction belongs to another session than this connection's; send hello first")


def is_new(context: Context, text: bytes) -> bool:
    """Whether a txid is one of this home's of which nothing is known yet."""
    try:
        txid, session = locate(context, text)
    except BrokerError:
        return False
    return state_of(context, session, txid.counter) is TransactionState.NONE


def refusal(action: Action, txid: bytes) -> Exception:
    """The error of a refusing action."""
    name = txid.decode("ascii", "replace")
    if action is Action.REFUSE_FENCED:
        return FencedError(f"the outcome of transaction {name} is no longer kept")
    if action is Action.REFUSE_UNKNOWN:
        return UnknownTransactionError(f"transaction {name} was neither prepared nor streamed here")
    return TransactionConflictError(f"transaction {name} is already decided or prepared otherwise")


def owner_line(context: Context, session: BrokerSession) -> bytes:
    """Whether the session's client is there, as ``outcome`` tells it."""
    if session.bound is not None:
        return b"owner connected\n"
    return b"owner gone %d\n" % max(0, context.now_ms - session.gone_ms)


def is_over_own(context: Context, session: BrokerSession) -> bool:
    """Whether the session's user has as many unsettled transactions, open ones too, as one may have."""
    principals, user = context.state.principals, session.user
    return principals.unsettled.get(user, 0) + principals.streams.get(user, 0) >= _unsettled_max(context, user)


def is_over_own_bytes(context: Context, session: BrokerSession, size_bytes: int) -> bool:
    """Whether messages of that size would be more than the session's user may have in unsettled transactions."""
    return context.state.principals.payload_bytes.get(session.user, 0) + size_bytes > own_bytes_max(context)


def own_bytes_max(context: Context) -> int:
    """Half of what there may be, and one transaction at least."""
    settings = context.settings
    return max(settings.prepared_bytes_max // 2, settings.transaction_size_bytes_max)


def _unsettled_max(context: Context, user: str) -> int:
    """What the quota says, or half of what there may be: one user cannot take the room of all others."""
    limits = context.state.principals.quotas.get(("user", user), {})
    return limits.get("unsettled_max", max(1, context.settings.transactions_open_max // 2))


def refuse_over_limits(
    context: Context, session: BrokerSession, transaction: Transaction | None, added: Sequence[Part]
) -> None:
    """Refuse a new transaction, or parts of one, if disk, broker or a limit has no room for it."""
    settings = context.settings
    refuse_unready(context)
    if transaction is None and session.user and is_over_own(context, session):
        raise OverloadedError(
            f"{session.user} has {_unsettled_max(context, session.user)} unsettled transactions: settle them (txmq tx "
            "list), or have an administrator set the quota unsettled_max"
        )
    if transaction is None and context.state.unsettled >= settings.transactions_open_max:
        raise OverloadedError(f"transactions_open_max {settings.transactions_open_max} transactions are unsettled")
    added_size = sum(len(batch) for _, _, batch, *_ in added)
    size = added_size + (transaction.size_bytes if transaction else 0)
    if size > settings.transaction_size_bytes_max:
        raise TooLargeError(f"the transaction is over transaction_size_bytes_max {settings.transaction_size_bytes_max}")
    count = len(added) + (len(transaction.parts) if transaction else 0)
    if entries.committed_size(count) > settings.request_size_bytes_max:
        # It says where each part goes, in one record: what is prepared must be able to commit.
        raise TooLargeError(f"the decision about {count} parts does not fit a journal record: send larger parts")
    if session.user and is_over_own_bytes(context, session, added_size):
        raise OverloadedError(
            f"{session.user} has unsettled transactions with {own_bytes_max(context)} bytes, half of "
            "prepared_bytes_max: settle them (txmq tx list)"
        )
    if context.state.payload_bytes + added_size > settings.prepared_bytes_max:
        raise OverloadedError(f"unsettled transactions hold prepared_bytes_max {settings.prepared_bytes_max} bytes")


def refuse_over_outcomes(context: Context, session: BrokerSession, floor: int, *, is_fence: bool = False) -> None:
    """Refuse a session that keeps too many outcomes: its client states no floor, or fences ids that were never used.

    The floor this request states counts already. Where all sessions together keep many, each has ``outcomes_kept``.

    Raises:
        SessionFullError: the client must take another session.
    """
    limit = context.settings.outcomes_kept
    if context.state.outcomes_over < OUTCOMES_OVER_MAX:
        limit = max(UNFINISHED_OUTCOMES_MAX, limit)
    limit += FENCES_BESIDE_MAX if is_fence else 0
    if len(session.outcomes) > limit and (not floor or sum(counter > floor for counter in session.outcomes) > limit):
        raise SessionFullError(
            f"session {session.number:x} has {limit} outcomes above its floor: a client states floor= with its "
            "requests, or takes another session (hello session=new)"
        )


def check_streamed(
    context: Context, client: ClientConnection, transaction: Transaction | None, given: dict[bytes, bytes]
) -> None:
    """Refuse if the parts that were streamed before are not those that the client states, or may not be written now."""
    if client.permissions is not None and transaction is not None:
        for topic_id in {part.topic_id for part in transaction.parts}:
            topic = context.state.topics.with_id(topic_id)
            if topic is not None:
                require(context, client, WRITE, TOPIC, topic.config.name)
    streamed = (len(transaction.parts), transaction.size_bytes, transaction.checksum) if transaction else (0, 0, 0)
    stated = tuple(int(given.get(name, 0)) for name in (b"parts", b"bytes", b"crc"))
    if streamed != stated:
        raise TransactionConflictError(f"(parts, bytes, crc) streamed {streamed} but stated {stated}")


def decided_elsewhere(context: Context, given: Given) -> dict[str, Any]:
    """What ``of=`` and ``held`` say of a part, for its meta; nothing if the transaction is this home's alone.

    Raises:
        BadRequestError: it is not the id of another home's transaction.
    """
    text = given.get(b"of")
    if text is None:
        if b"held" in given:
            raise BadRequestError("held is said of a part of another home's transaction: of=<txid>")
        return {}
    _elsewhere(context, text, "of=")
    stated: dict[str, Any] = {"of": text.decode()}  # an id has one form
    if b"held" in given:
        stated["held"] = True
    return stated


def branches_at_homes(context: Context, given: Given) -> dict[str, Any]:
    """What ``homes=`` says of a transaction, for its meta; nothing if it has no branch at another home.

    Raises:
        BadRequestError: they are not ids of other homes' transactions, one each.
    """
    text = given.get(b"homes")
    if text is None:
        return {}
    listed = text.split(b",")
    known = {_elsewhere(context, word, "homes=").home for word in listed}
    if len(listed) > HOMES_MAX:
        raise BadRequestError(f"homes= has {len(listed)} branches, at most {HOMES_MAX}")
    if len(known) != len(listed):
        raise BadRequestError("homes= has two branches of one home")
    return {"homes": text.decode().split(",")}


def branches_in_databases(
    context: Context, client: ClientConnection, body: bytes | bytearray, given: Given
) -> tuple[list[dict[str, Any]], int]:
    """The branches in databases of a decision, and where its parts begin.

    Raises:
        BadRequestError: they are malformed.
        ForbiddenError: the connection's user may have no transactions with one of the databases.
    """
    branches, start = split_branches(body, int(given.get(b"branches", 0)))
    if client.permissions is not None:
        for branch in branches:
            require(context, client, INSTALL, RESOURCE, branch["uuid"])
    return branches, start


def _elsewhere(context: Context, text: bytes, word: str) -> TxId:
    if context.cluster is None:
        raise BadRequestError(f"{word} needs other homes: this broker is alone")
    try:
        txid = TxId.parse(text.decode("ascii", "replace"))
    except ValueError as error:
        raise BadRequestError(f"{word} {error}") from None
    if txid.cluster != context.identity.cluster or txid.home == context.identity.node or txid.counter < 1:
        raise BadRequestError(f"{word} {txid} is not a transaction of another home of this cluster")
    return txid
