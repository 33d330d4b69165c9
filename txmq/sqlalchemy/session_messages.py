"""What the open transactions of a session keep for its COMMIT.

Theory of operation. A message is kept under the innermost savepoint of its session, or the transaction. A savepoint
that is released hands its messages to what is around it; what ends otherwise drops them. When the transaction commits,
the session is flushed, and all that is kept is written: so the ids of messages are taken after the locks of the rows.
Later listeners may still send, and the last flush may call more of them: what comes after the write is written at once.

The listeners are those of the class ``Session``, so that every session has them before its first message. One added
by a send within a commit would not be called for that commit any more.

Invariants:
    * ``kept`` names open transactions only, the outermost first;
    * the messages of a transaction that go to one table have one unit;
    * a row that was written is kept no more, so that a COMMIT that failed and is called again writes it once.

Source: SQLAlchemy 2.0 and 2.1, ``SessionEvents``, ``SessionTransaction``: ``before_commit`` and ``after_commit`` are
called for savepoints, too, ``before_commit`` before the last flush; ``after_soft_rollback`` is not called for a
savepoint whose flush failed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from sqlalchemy import Connection, Engine, event
from sqlalchemy.orm import Session, SessionTransaction

from txmq.errors import TransactionStateError
from txmq.outbox.outbox import OutboxTransaction, new_row, new_unit, require_unit
from txmq.outbox.tables import ROWS_PER_STATEMENT

if TYPE_CHECKING:
    from txmq.sqlalchemy.outbox import Outbox

_KEY: Final = "txmq.outbox"
Headers = Mapping[str, bytes]


class Place(NamedTuple):
    """Where a message is written: the outbox, and the engine or connection."""

    outbox: Outbox
    bind: Engine | Connection


class SessionMessages:
    """See the module's docstring. Made for one transaction of a session, and gone with it.

    Thread safety: the session's.
    """

    def __init__(self) -> None:
        self._kept: dict[SessionTransaction, dict[Place, OutboxTransaction]] = {}
        self._units: dict[Place, int] = {}
        self._written: Counter[Place] = Counter()
        self._written_bytes: Counter[Place] = Counter()
        self._is_late = False

    @classmethod
    def of(cls, session: Session) -> SessionMessages:
        """Those of the session's open transaction."""
        found: SessionMessages | None = session.info.get(_KEY)
        if found is None:
            found = session.info[_KEY] = cls()
        return found

    def add(
        self, session: Session, place: Place, topic: str, value: bytes, key: bytes | None, headers: Headers | None
    ) -> None:  # fmt: skip
        """Keep a message, or write it if the COMMIT that is running has no later moment for it.

        Raises:
            TransactionStateError: the transaction takes no more.
            ConfigError: it cannot be sent, or there are too many.
        """
        transaction = session.get_nested_transaction() or session.get_transaction()
        if transaction is None or not transaction.is_active:
            raise TransactionStateError(
                f"outbox {place.outbox.name!r}: the session's transaction has ended or was rolled back, the message "
                "would be lost: call rollback() of the session (or of the savepoint) first, then send"
            )
        row, kept = new_row(topic, value, key, headers), list(self._kept_for(place))
        require_unit(
            1 + self._written[place] + sum(len(messages.rows) for messages in kept),
            row.size_bytes + self._written_bytes[place] + sum(messages.size_bytes for messages in kept),
            place.outbox.unit_bytes_max,
        )
        self._kept.setdefault(transaction, {}).setdefault(place, OutboxTransaction()).add([row], row.size_bytes)
        if self._is_late and _is_committing(session):
            self._write(session, transaction)

    def before_commit(self, session: Session, transaction: SessionTransaction) -> None:
        """Flush, then write what is kept; what comes later is written at once."""
        if session.in_nested_transaction():
            self._is_late = True  # a savepoint that is open commits first: see ``ended``
            return
        if self._kept:
            session.flush()
            self._write(session, transaction)
        self._is_late = True

    def hand_over(self, savepoint: SessionTransaction) -> None:
        """A savepoint was released: its messages are those of the transaction around it."""
        outer = savepoint.parent
        while outer is not None and not outer.nested and outer.parent is not None:
            outer = outer.parent  # a flush has a transaction of its own
        if outer is None:
            return
        around = self._kept.setdefault(outer, {})
        for place, messages in self._kept.pop(savepoint, {}).items():
            around.setdefault(place, OutboxTransaction()).add(messages.rows, messages.size_bytes)

    def ended(self, session: Session, savepoint: SessionTransaction) -> None:
        """A savepoint has ended; its messages were handed over, or are dropped."""
        self._kept.pop(savepoint, None)
        transaction = session.get_transaction()
        is_last = self._is_late and _is_committing(session) and not session.in_nested_transaction()
        if is_last and transaction is not None:
            self._write(session, transaction)

    def committed(self) -> None:
        """The transaction is committed: relays look at once.

        Raises:
            TransactionStateError: messages were not written.
        """
        left = sum(len(messages.rows) for kept in self._kept.values() for messages in kept.values())
        if left:
            raise TransactionStateError(
                f"the session has committed its rows without {left} messages that were sent too late: send before "
                "the commit, or in a listener of before_commit"
            )
        for outbox in {place.outbox for place in self._written}:
            outbox.wake()

    def _write(self, session: Session, transaction: SessionTransaction) -> None:
        for place, messages in self._kept.get(transaction, {}).items():
            if not messages.rows:
                continue
            unit = self._units.setdefault(place, new_unit())
            connection = session.connection(bind_arguments={"bind": place.bind})
            place.outbox.require_room(connection)
            while some := messages.rows[:ROWS_PER_STATEMENT]:
                place.outbox.write(connection, some, unit)
                size_bytes = sum(row.size_bytes for row in some)
                messages.size_bytes -= size_bytes
                del messages.rows[: len(some)]
                self._written[place] += len(some)
                self._written_bytes[place] += size_bytes

    def _kept_for(self, place: Place) -> Iterator[OutboxTransaction]:
        return (kept[place] for kept in self._kept.values() if place in kept)


def _is_committing(session: Session) -> bool:
    """Whether ``commit`` or ``prepare`` of the session's transaction is running, rather than a savepoint's.

    Both call the same listeners, which are told the session only.
    """
    return getattr(session.get_transaction(), "_current_fn", None) is not None


@event.listens_for(Session, "before_commit")
def _before_commit(session: Session) -> None:
    transaction = session.get_transaction()
    if transaction is not None and (_is_committing(session) or not session.in_nested_transaction()):
        SessionMessages.of(session).before_commit(session, transaction)


@event.listens_for(Session, "after_commit")
def _after_commit(session: Session) -> None:
    messages: SessionMessages | None = session.info.get(_KEY)
    if messages is None:
        return
    savepoint = session.get_nested_transaction()
    if savepoint is not None:
        messages.hand_over(savepoint)
    else:
        messages.committed()


@event.listens_for(Session, "after_transaction_end")
def _after_transaction_end(session: Session, transaction: SessionTransaction) -> None:
    messages: SessionMessages | None = session.info.get(_KEY)
    if messages is None:
        return
    if transaction.parent is None:
        del session.info[_KEY]
    else:
        messages.ended(session, transaction)
