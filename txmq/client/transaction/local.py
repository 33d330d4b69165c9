"""The end of a local transaction: the broker alone decides, in one request.

What an answer means:

=====================  ==========================  =====================================================================
answer to ``commit``   earlier attempt unanswered  then
=====================  ==========================  =====================================================================
200                    either                      COMMITTED, with the offsets
409, 400, 403, 404 ..  no                          not executed: ROLLED BACK
409, 400, 403, 404 ..  yes                         ``rollback``: 200 is ROLLED BACK, 409 may be COMMITTED: ``outcome``
410                    no                          not executed: ROLLED BACK
410                    yes                         UNKNOWN: nobody keeps the outcome
none till the deadline sent                        UNKNOWN
none till the deadline never sent                  ROLLED BACK (timeout)
=====================  ==========================  =====================================================================
"""

from __future__ import annotations

from txmq.client.transaction.broker_side import BrokerTransaction, raise_rolled_back
from txmq.client.transaction.messages import MessageBuffer
from txmq.errors import (
    ConnectionLostError,
    FencedError,
    OutcomeUnknownError,
    RequestTimeoutError,
    RolledBackError,
    TransactionConflictError,
    TxmqError,
    UnavailableError,
)
from txmq.model import Outcome
from txmq.protocol.parts import PartResult


def commit(broker: BrokerTransaction, messages: MessageBuffer) -> list[PartResult]:
    """Commit everything.

    Returns:
        Where every part went.

    Raises:
        RolledBackError: nothing happened; TransactionTimeoutError or TransactionAwayError if that was the reason.
        OutcomeUnknownError: ask for the outcome by id.

    Durability: what ``sync`` promises, when this returns.
    """
    try:
        broker.check_deadline()
        broker.reach()
        parts = broker.take_parts(messages, keyed=False)
        if broker.streamed.parts or not broker.fits_one_request(parts):
            broker.stream(parts)
            parts = []
        return broker.commit_local(parts)
    except RolledBackError:
        withdraw(broker)
        raise
    except (ConnectionLostError, RequestTimeoutError, UnavailableError) as error:
        if broker.may_have_arrived:
            raise OutcomeUnknownError(f"no answer to commit: {error}", broker.txid) from error
        withdraw(broker)
        raise_rolled_back(error, broker.txid if broker.has_txid else None)
    except TxmqError as error:
        return _refused(broker, error)


def withdraw(broker: BrokerTransaction) -> None:
    """Let the broker forget what was streamed. It does so by itself when the connection is lost."""
    if broker.streamed.parts:
        broker.try_rollback()


def _refused(broker: BrokerTransaction, error: TxmqError) -> list[PartResult]:
    """See the table above; ``error`` is what the last attempt was refused with."""
    if not broker.may_have_arrived:
        withdraw(broker)
    elif isinstance(error, FencedError):
        raise OutcomeUnknownError(f"an attempt to commit was not answered, then: {error}", broker.txid) from error
    else:
        lines = _settled(broker, error)
        if lines is not None:
            return lines
    raise_rolled_back(error, broker.txid if broker.has_txid else None)


def _settled(broker: BrokerTransaction, error: TxmqError) -> list[PartResult] | None:
    """Fence the transaction id; None if that rolled it back, else where the parts went."""
    try:
        try:
            broker.rollback()
        except TransactionConflictError:
            word, lines = broker.outcome()
            if word == Outcome.COMMITTED.value:
                return lines
            if word != Outcome.ROLLED_BACK.value:
                raise
    except TxmqError as failure:
        raise OutcomeUnknownError(f"commit was refused ({error}), rollback, too", broker.txid) from failure
    return None
