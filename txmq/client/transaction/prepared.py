"""Transactions that are decided outside of txmq: prepares one, and reports its decision to the broker.

Used by half messages and by the XA resource. Both requests are repeated under the same id until they are answered:
the broker executes them once and gives the same answer. Messages for other homes are prepared there before, and the one
request lists them: the decision at the one home is that of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from txmq.client.transaction.conversation import LOST, RETRY_S, Conversation, Extensions
from txmq.client.transaction.homes import TransactionHomes
from txmq.client.transaction.messages import EncodedPart, MessageBuffer
from txmq.errors import (
    NotOwnerError,
    OverloadedError,
    SessionFullError,
    StaleTopicError,
    TransactionConflictError,
)
from txmq.model import Resolution
from txmq.protocol.transaction_bodies import PartResult, parse_result_lines
from txmq.runtime.crashpoints import crash_point
from txmq.xa.resolver_ports import Answer

if TYPE_CHECKING:
    from txmq.client.home_link import HomeLink

_PASSING = (*LOST, OverloadedError)


def prepare(homes: TransactionHomes, kind: str, fields: Extensions, messages: MessageBuffer) -> None:
    """Prepare all messages that were not sent ahead.

    Raises:
        TransactionTimeoutError, RequestTimeoutError: the deadline passed; it may be prepared. ConnectionLostError,
        UnavailableError: the broker is away; ``decider.may_have_arrived`` says if it may be prepared. TxmqError:
        refused, not prepared; parts at other homes may be.

    Durability: the messages are in the broker's journal when this returns, and stay until they are decided.
    """
    homes.find(messages)
    homes.let_pass(messages)
    homes.decider.begin()
    homes.take(messages, keyed=False)
    homes.stream_if_large()
    others = homes.prepare_others()
    if others:
        fields = {**fields, "homes": ",".join(others)}
    repeat_prepare(homes.decider, kind, fields, homes.decider.parts)


def repeat_prepare(
    part: Conversation,
    kind: str,
    fields: Extensions,
    parts: Sequence[EncodedPart],
    *,
    waits_for_broker: bool = False,
) -> None:
    """Prepare parts that fit one request, again until it is answered.

    Args:
        waits_for_broker: a broker that is away is asked again until the deadline: no row is locked meanwhile.

    Raises as ``prepare``; the cause of a timeout is what kept the broker from answering.
    """

    def submit() -> Answer:
        reply = part.submit_prepare_as(kind, fields, parts)
        part.may_have_arrived = True
        crash_point("client.prepare.sent")
        return reply

    try:
        part.await_prepare(submit, waits_for_room=True, waits_for_broker=waits_for_broker)
    except (SessionFullError, StaleTopicError, NotOwnerError, TransactionConflictError) as error:
        part.was_refused(error)
        raise


def resolve(home: HomeLink, txid: str, resolution: Resolution, timeout_s: float) -> list[PartResult]:
    """Report COMMIT or ROLLBACK of a prepared transaction to the broker.

    Args:
        home: the broker that the id names.
        timeout_s: until then the request is repeated after a lost answer.

    Returns:
        Where the messages went; none after a rollback.

    Raises:
        TransactionConflictError: it ended the other way.
        FencedError, UnknownTransactionError, NotOwnerError: this broker does not know (any more).
        ConnectionLostError, RequestTimeoutError, ...: not sent, or sent and not answered.

    Durability: resolved, in the broker's journal, when this returns.
    """
    deadline = home.clock.monotonic() + timeout_s
    named: dict[str, Any] = {"body": ()} if resolution is Resolution.COMMIT else {}
    while True:
        remaining = max(deadline - home.clock.monotonic(), RETRY_S)
        try:
            answer = home.control.call(resolution.value, txid, timeout=remaining, **named)
        except _PASSING:
            if home.clock.monotonic() >= deadline:
                raise
            home.clock.sleep(RETRY_S)
        else:
            return parse_result_lines(answer)
