"""Every error txmq raises, in one tree.

Each error says what the caller may do next: ``retriable`` is true if the same call may be repeated unchanged.
Errors that travel over the wire carry a ``wire_name`` (the first word of an error answer's body) and a ``code``
(HTTP-like); ``protocol.answers.broker_error`` turns such an answer back into its class.

This module is not compiled: compiled ones have no classes with two bases (``docs/compiled.md``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

_Error = TypeVar("_Error", bound="TxmqError")
_Raised = TypeVar("_Raised", bound=BaseException)


class TxmqError(Exception):
    """Base of all errors of txmq. They can be pickled: another process gets them with text and attributes."""

    retriable: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _bare, (type(self), self.args), self.__dict__  # its constructor may take other arguments


def _bare(kind: type[_Error], args: tuple[object, ...]) -> _Error:
    return kind.__new__(kind, *args)


def anew(error: _Error) -> _Error:
    """The same error, to be raised once more.

    One that is kept and raised twice may get into its own chain: Python writes into each raised error what was
    being handled. Error trackers walk such a circle for ever.
    """
    fresh = _bare(type(error), error.args)
    fresh.__dict__.update(error.__dict__)
    fresh.__cause__ = error.__cause__
    return fresh


def caused(error: _Raised, cause: BaseException) -> _Raised:
    """The same error, because of another one; for ``raise caused(...) from cause``.

    In compiled code ``from`` sets no cause.
    """
    error.__cause__ = cause
    return error


class ConfigError(TxmqError):
    """A setting is unknown or out of range; the text names key, value, allowed range and the nearest known key."""


class ProtocolError(TxmqError):
    """Bytes that break the wire protocol."""


class LocalProtocolError(ProtocolError):
    """This side was asked to send something the protocol cannot carry; nothing was sent. Correct the call."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something the protocol does not allow; the connection is closed, the next call opens another."""


class ConnectionLostError(TxmqError):
    """The connection ended (or could not be made); whether an unanswered request was executed is not known.

    The next call connects anew.
    """

    retriable: bool = True


class BrokenAnswerError(ConnectionLostError, RemoteProtocolError):
    """The broker's answers cannot be read: a fault of the broker, and a lost connection for the callers that wait."""


class BrokerAwayError(ConnectionLostError):
    """The broker cannot be reached: nothing was sent, nothing happened. The same call may be repeated.

    Raised by every call that needs the broker: ``connect``, ``send``, the beginning and the end of a transaction's
    block, half messages. In a transaction it is a ``RolledBackError`` as well.
    """


class PartialResultError(BrokerAwayError):
    """Homes of the cluster did not answer; ask again when they are back, or use what the others told.

    Attributes:
        found: what the other homes told.
        away: the homes that did not answer, by name and id.
    """

    def __init__(self, text: str, found: Sequence[Any] = (), away: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.found, self.away = [*found], [*away]


class RequestTimeoutError(TxmqError):
    """No answer in time; whether the request was executed is not known. Ask again, or allow more time."""

    retriable: bool = True


class DeliveryUnknownError(TxmqError):
    """It is not known whether a message sent outside a transaction was stored; sending it again may store it twice."""


class ClosedError(TxmqError):
    """The client, producer or transaction was used after it was closed; open another."""


class DataLossError(TxmqError):
    """Messages that were due to be read are gone; the text says why. Spark's ``failOnDataLoss=false`` reads on."""


class InvariantError(TxmqError):
    """A defect in txmq: something that must always hold does not. The broker stops; the journal is what is true."""


class StorageError(TxmqError):
    """The disk refused or damaged something."""


class OffsetStoreAwayError(StorageError):
    """A consumer's offset store does not answer: what was asked may have happened. It is asked again by itself.

    A store of your own raises it where waiting helps; a consumer that begins then waits.
    """

    retriable: bool = True


class CorruptRecordError(StorageError):
    """Bytes on disk fail their check; the text names path, position and reason, and nothing was changed.

    ``txmq journal verify`` and ``txmq log verify`` say what else is damaged.
    """

    def __init__(self, path: str, position: int, reason: str) -> None:
        super().__init__(f"{path}: damaged at byte {position}: {reason}")
        self.path, self.position, self.reason = path, position, reason


class JournalFullError(StorageError):
    """The journal cannot grow: free disk space; decisions are still served."""


class JournalFailedError(StorageError):
    """A write or sync of the journal failed; it is never retried. Restart the broker: it reads what the disk holds."""


class OutboxStoppedError(TxmqError):
    """The relay of an outbox sends nothing: database and broker do not agree on the newest page. Nothing is lost."""


class OutboxFullError(TxmqError):
    """Too many messages wait in an outbox: no relay runs, or it has stopped."""

    retriable: bool = True


class SpoolFullError(StorageError):
    """The local spool is at its limit: nothing was stored; it empties when its partitions can be written."""

    retriable: bool = True


class DirectoryInUseError(StorageError):
    """Another process holds the data directory, or it belongs to another node: stop that one, or take another."""


# --- the registry ----------------------------------------------------------------------------------------------------


class RegistryError(TxmqError):
    """The registry refuses a call, or holds what cannot be read; nothing was changed, and the text says what to do."""


class RegistryAwayError(RegistryError):
    """ZooKeeper does not answer: whether a change was made is not known. Repeat the call: none has effect twice."""

    retriable: bool = True


class RegistryConflictError(RegistryError):
    """Others changed the registry first, or after a lost connection; the text says which. Read again, then decide."""


class DeletionPendingError(RegistryError):
    """A deleted topic had the name, and homes have yet to drop its messages: repeat when their brokers have done so."""

    retriable: bool = True


class ForeignClusterError(RegistryError):
    """The data directory is another cluster's: correct the registry's address, or start with an empty directory."""


class DuplicateBrokerError(RegistryError):
    """Another home has this broker's name: give one of the two another ``broker_name``."""


class HomeInUseError(RegistryError):
    """Another process leads the home, or its ZooKeeper session has not expired yet: stop it, or wait, then repeat."""

    retriable: bool = True


class HomeSupersededError(RegistryError):
    """A process that this directory does not know has led the home since: it is a copy, or was restored.

    Stop, and start the newer directory. If that one is lost, start with an empty directory: a new home.
    """


# --- errors a broker answers -----------------------------------------------------------------------------------------


class BrokerError(TxmqError):
    """The broker refused a request; ``code`` is HTTP-like, ``wire_name`` is the first word of the answer's body.

    As this class itself the broker failed at it: its log says why.
    """

    code: ClassVar[int] = 500
    wire_name: ClassVar[str] = "internal-error"


class BadRequestError(BrokerError):
    """The request breaks the grammar or a limit of a field; correct it."""

    code, wire_name = 400, "bad-request"


class InvalidBatchError(BrokerError):
    """A record batch fails its CRC or contradicts itself. Sent: nothing was written. Read: see ``txmq log verify``."""

    code, wire_name = 400, "invalid-batch"


class InvalidNameError(BrokerError):
    """A name is not allowed: 1 to 200 of ``A-Z a-z 0-9 . _ -``, not starting with ``.`` or ``-``."""

    code, wire_name = 400, "invalid-name"


class UnknownTopicError(BrokerError):
    """No such topic or partition; create it with ``txmq topic create`` or ``client.topics.create``."""

    code, wire_name = 404, "unknown-topic"


class OffsetOutOfRangeError(BrokerError):
    """The offset is before the log start or beyond the high watermark; ``client.offsets`` says what can be read."""

    code, wire_name = 404, "offset-out-of-range"


class UnknownTransactionError(BrokerError):
    """No such transaction is open or prepared here; ``client.outcome(txid)`` says what became of it."""

    code, wire_name = 404, "unknown-transaction"


class UnknownGroupError(BrokerError):
    """No consumer group of that name has members or saved offsets."""

    code, wire_name = 404, "unknown-group"


class UnknownMemberError(BrokerError):
    """The group does not know this member (any more): it joins again, under its name."""

    code, wire_name = 404, "unknown-member"


class UnknownQueryError(BrokerError):
    """No driver has opened a query of that name, or it was deleted; its driver opens it when it begins."""

    code, wire_name = 404, "unknown-query"


class UnknownUserError(BrokerError):
    """No user of that name exists; ``txmq user list`` names those that do."""

    code, wire_name = 404, "unknown-user"


class UserExistsError(BrokerError):
    """A user of that name exists: give that one another password with ``txmq user passwd``, or take another name."""

    code, wire_name = 409, "user-exists"


class GroupActiveError(BrokerError):
    """The group has members: stop them first."""

    code, wire_name = 409, "group-active"


class TopicExistsError(BrokerError):
    """A topic of that name exists: use it, or alter it."""

    code, wire_name = 409, "topic-exists"


class UnauthenticatedError(BrokerError):
    """The broker has users, and the connection's is not known: user or password is wrong, or none was given.

    Give ``connect`` a user and a password, or a client certificate that is a user's.
    """

    code, wire_name = 401, "unauthenticated"


class TopicClosedError(BrokerError):
    """The topic is closed for publishing or for reading, by an operator; ``txmq topic open`` opens it."""

    code, wire_name = 403, "topic-closed"


class ForbiddenError(BrokerError):
    """Its user lacks a grant, which the text names (an administrator adds it); or what it names is another user's."""

    code, wire_name = 403, "forbidden"


class OtherSessionError(ForbiddenError):
    """The connection does not speak for the session that the request is for: say ``hello`` with it first."""

    code, wire_name = 403, "other-session"


class NotOwnerError(BrokerError):
    """This broker does not own the partition or the transaction; look up the owner and repeat."""

    retriable: bool = True
    code, wire_name = 409, "not-owner"


class StaleTopicError(BrokerError):
    """Another topic has that name now: the one that was meant was deleted. Look the topic up again, then decide."""

    code, wire_name = 409, "stale-topic"


class SequenceError(BrokerError):
    """A batch's sequence leaves a gap, or repeats a number with other content; nothing was written.

    Producers of this library deal with it themselves. A client that numbers by hand goes on at the number in the text.
    """

    code, wire_name = 409, "sequence"


class TransactionConflictError(BrokerError):
    """The transaction's state does not allow this request (already decided the other way, wrong parts, ...).

    ``client.outcome(txid)`` says what became of it.
    """

    code, wire_name = 409, "transaction-conflict"


class OtherTokenError(BrokerError):
    """The fencing token is not the successor of the newest one that the broker knows of the database: a copy has gone
    on, or one of the two was restored."""

    code, wire_name = 409, "other-token"


class OutboxConflictError(BrokerError):
    """The page does not follow the newest one that the broker knows of the outbox: another relay has gone on, or the
    outbox is a copy, or the database or the broker was restored."""

    code, wire_name = 409, "outbox-conflict"


class StaleLogError(BrokerError):
    """The position is of another log: its topic was made anew, or the broker has started since. Ask for the log."""

    code, wire_name = 409, "stale-log"


class JournalReleasedError(BrokerError):
    """The home's journal does not reach back to what a replica asks for: its directory must be made anew."""

    code, wire_name = 404, "journal-released"


class DivergedError(BrokerError):
    """A replica has records that its home's journal has not: it is no copy of it any more."""

    code, wire_name = 409, "diverged"


class FencedError(BrokerError):
    """The session, epoch or transaction id is fenced or no longer kept: never executed, never called rolled back.

    Connect anew, and look up what the transaction wrote in the database.
    """

    code, wire_name = 410, "fenced"


class NeverIssuedError(FencedError):
    """The broker has never issued the session of that transaction: it was restored from an older copy, which lacks it.

    If its rows are committed, its messages are lost: docs/how-to/in-doubt-at-3am.md.
    """

    code, wire_name = 410, "never-issued"


class TooLargeError(BrokerError):
    """A message, batch, request or transaction is over its limit: send less at a time, or raise the limit."""

    code, wire_name = 413, "too-large"


class OverloadedError(BrokerError):
    """A limit on work in progress is reached; try again later."""

    retriable: bool = True
    code, wire_name = 429, "overloaded"


class SessionFullError(OverloadedError):
    """A session keeps too many outcomes that its client has not called finished; nothing was executed.

    A client of this library goes on in another session by itself: run the block again.
    """

    code, wire_name = 429, "session-full"


class UnavailableError(BrokerError):
    """The broker is starting, stopping or has failed; whether the request was executed is not known."""

    retriable: bool = True
    code, wire_name = 503, "unavailable"


class DiskFullError(BrokerError):
    """The broker's disk is nearly full: new work is refused, decisions are served. Free space, it resumes by itself."""

    retriable: bool = True
    code, wire_name = 507, "disk-full"


# --- transactions ----------------------------------------------------------------------------------------------------


class XAError(TxmqError):
    """A resource manager refused an XA call; ``xa_code`` is the XA specification's, the cause is the driver's error.

    XAER_RMFAIL and XA_RETRY: call again later. XA_RB*: the branch is rolled back.
    """

    def __init__(self, xa_code: int, text: str) -> None:
        super().__init__(text)
        self.xa_code = xa_code


class TransactionError(TxmqError):
    """Something about one transaction; ``txid`` names it, or is None before it got one."""

    def __init__(self, text: str, txid: str | None = None) -> None:
        super().__init__(text if txid is None else f"{text} (transaction {txid})")
        self.txid = txid


class TransactionStateError(TransactionError):
    """The call does not fit the transaction's state, such as a ``tx`` used after its block."""


class RolledBackError(TransactionError):
    """Nothing happened: no row, no message.

    ``retriable`` says whether the block may succeed when it is run again unchanged, as far as the cause tells: True
    after a deadlock, a lost connection, a full disk; False after a duplicate key or a message that is too large.

    Args:
        retriable: None is True.
    """

    retriable: bool = True

    def __init__(self, text: str, txid: str | None = None, *, retriable: bool | None = None) -> None:
        super().__init__(text, txid)
        if retriable is not None:
            self.retriable = retriable


class TransactionTimeoutError(RolledBackError):
    """The deadline passed before the decision; nothing happened. Run the block again, with more time if it needs it."""


class TransactionAwayError(RolledBackError, BrokerAwayError):
    """``BrokerAwayError`` as a transaction tells it: no row, no message. The block may be run again."""


class OutcomeUnknownError(TransactionError):
    """It is not known here whether it committed: ask ``client.outcome(txid)``, never run the block again blindly."""


class HeuristicError(TransactionError):
    """A resource decided by itself; recorded until an operator forgets it.

    Compare rows and messages, mend what differs, then ``txmq tx forget``: docs/how-to/in-doubt-at-3am.md.
    """


class HeuristicMixedError(HeuristicError):
    """Some parts committed, some rolled back."""


class HeuristicRollbackError(HeuristicError):
    """Decided to commit, a resource rolled back."""


class HeuristicCommitError(HeuristicError):
    """Decided to roll back, a resource committed."""


class HeuristicHazardError(HeuristicError):
    """A resource ended its part of a transaction, and nothing can say how."""
