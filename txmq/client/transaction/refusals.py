"""What a caller is told of a refusal before the decision."""

from __future__ import annotations

from typing import NoReturn

from txmq.errors import (
    ConnectionLostError,
    FencedError,
    RequestTimeoutError,
    RolledBackError,
    StaleTopicError,
    TransactionAwayError,
    TransactionConflictError,
    TransactionTimeoutError,
    TxmqError,
    UnavailableError,
    UnknownTransactionError,
)

LOST = (ConnectionLostError, UnavailableError)  # not answered, and the broker may be away
# Refusals of a transaction's id, or its topics': the block has others when it is run again.
_OF_THESE_IDS = (TransactionConflictError, FencedError, UnknownTransactionError, StaleTopicError)


def rolled_back(error: TxmqError, txid: str | None) -> RolledBackError:
    """The caller's error for a refusal before the decision: nothing happened. The refusal is its cause."""
    if isinstance(error, RolledBackError):
        return error
    if isinstance(error, LOST):
        wrapped: RolledBackError = TransactionAwayError(f"the broker is away: {error}; nothing happened", txid)
    elif isinstance(error, RequestTimeoutError):
        wrapped = TransactionTimeoutError(f"no answer before the deadline: {error}", txid)
    else:
        text = f"refused: {error}" if str(error) else f"refused: {type(error).__name__}"
        wrapped = RolledBackError(text, txid, retriable=error.retriable or isinstance(error, _OF_THESE_IDS))
    wrapped.__cause__ = error
    return wrapped


def raise_rolled_back(error: TxmqError, txid: str | None) -> NoReturn:
    """Raise what ``rolled_back`` makes of the error that is being handled.

    Not ``raise rolled_back(error, ...) from error``: an error that needs no wrapping would become its own cause.
    """
    raise rolled_back(error, txid)
