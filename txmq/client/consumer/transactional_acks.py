"""Messages of a consumer that transactions acknowledge: ``tx.ack(message)``, ``message.ack(connection)``.

Theory of operation. Such an acknowledgement is *pending*: the message is still under way, and only that transaction may
acknowledge it. When the transaction is sent, the offset that it saves is fixed, and until its outcome is known nothing
else of that partition is saved. If it commits, the messages are acknowledged. If it rolls back, they are the
application's again: it may run the block once more, or reject them.

If the outcome cannot be known at the block's end, the partition is *in doubt* and nothing of it is delivered. A thread
asks the broker, and fences the id, so that the answer is final. Then the messages count as acknowledged or are
delivered again. If the broker no longer keeps the outcome, the partition is loaded anew: the saved offset is the truth.

A message that is acknowledged in a transaction of the application's own database counts when its offset is seen there,
committed. After a rollback it stays under way: if it is rejected, it is delivered again; otherwise the next owner of
the partition gets it. A COMMIT without an answer may still be under way when the application rejects the message. The
message is delivered again, because its next transaction finds out. But nothing of the partition is saved, and the
message is not given up, before a look with the row's lock has shown that the transaction is over
(``ConsumedPartition.in_doubt``).

Invariants:
    * messages of a partition are acknowledged in order: nothing before them is left unacknowledged; one that is refused
      for that has not failed (``ConsumedPartition.out_of_turn``);
    * a pending acknowledgement counts only when its transaction is known to have committed;
    * while an outcome is not known, nothing of that partition is saved or delivered by this member.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.client.consumer.assigned_partitions import AssignedPartitions
from txmq.client.consumer.consumed_partition import ConsumedPartition, PendingAck
from txmq.client.consumer.offsets.offset_store import (
    OffsetPosition,
    OffsetStore,
    OffsetStoreWithTransactions,
    StoredOffset,
    asked,
    called,
    is_of_loop,
    next_order,
)
from txmq.client.consumer.retry.deferred import deferred_text_with, parsed
from txmq.errors import (
    ClosedError,
    ConfigError,
    FencedError,
    RolledBackError,
    StorageError,
    TransactionStateError,
    TxmqError,
)
from txmq.model import Message, Outcome
from txmq.protocol.group_rows import OffsetRow
from txmq.protocol.transaction_bodies import parse_outcome
from txmq.runtime.threads import off_loop, start_daemon, to_end
from txmq.xid import TxId

if TYPE_CHECKING:
    from txmq.client.client import Client
    from txmq.client.consumer.consumer_homes import ConsumerHomes

ASK_TIMEOUT_S = 5.0
ASK_AGAIN_S, ASK_AGAIN_S_MAX = 0.05, 1.0
_ENDS = {outcome.value: outcome for outcome in (Outcome.COMMITTED, Outcome.ROLLED_BACK)}


class _From(NamedTuple):
    """Conditions on the saved offset when a message is acknowledged; see ``OffsetStoreWithTransactions.save_in``."""

    above: int | None = None
    most: int | None = None
    beside: StoredOffset | None = None


class PendingAcks:
    """See the module's docstring. Thread safety: any thread.

    Args:
        group: the offsets are saved under it.
        store: where; None for the broker.
    """

    def __init__(
        self, client: Client, assignment: AssignedPartitions, homes: ConsumerHomes, group: str,
        store: OffsetStore | OffsetStoreWithTransactions | None,
    ) -> None:  # fmt: skip
        self.client, self.group = client, group
        self._assignment, self._homes = assignment, homes
        self._is_in_broker = store is None
        self._store = store if isinstance(store, OffsetStoreWithTransactions) else None

    # --- transactions of the broker ----------------------------------------------------------------------------------

    def saving(self, message: Message) -> object | None:
        """The transaction that saves the offset of the message's partition, and whose outcome is not known here yet."""
        with self._assignment.changed:
            consumed = self._assignment.partitions.get((message.topic, message.partition))
            return None if consumed is None else consumed.saving

    def pending_ack(self, message: Message, owner: object) -> ConsumedPartition:
        """Acknowledge a message in a transaction of the broker.

        Raises:
            ConfigError: the broker does not have this consumer's offsets.
            TransactionStateError: the message is not under way, another transaction's, or not the next one.
            RolledBackError: its partition is somebody else's now, or an earlier transaction's outcome is not known.
        """
        if not self._is_in_broker:
            raise ConfigError("tx.ack needs a consumer whose offsets are in the broker; see message.ack(connection)")
        with self._assignment.changed:
            return self._pending_ack(message, owner)

    def _pending_ack(self, message: Message, owner: object) -> ConsumedPartition:
        consumed = self._assignment.partitions.get((message.topic, message.partition))
        name = f"message {message.offset} of {message.topic}-{message.partition}"
        if consumed is None or consumed.is_of_another(message):
            raise RolledBackError(f"{name}: the partition is not this consumer's any more", retriable=False)
        if consumed.saving is not None:
            consumed.out_of_turn.add(message.offset)
            raise RolledBackError(f"{name}: the outcome of a transaction before this one is not known yet")
        known = consumed.pending_acks.get(message.offset)
        if known is not None and known.owner is not owner:
            raise TransactionStateError(f"{name}: another transaction acknowledges it")
        if consumed.deferred_in_hand(message.offset) is None:
            if not consumed.is_under_way(message.offset):
                raise TransactionStateError(f"{name} is acknowledged already, or was taken back by a seek")
            lower = consumed.lowest_before(message.offset, owner)
            if lower is not None:
                consumed.out_of_turn.add(message.offset)
                raise TransactionStateError(f"{name}: acknowledge message {lower} before it, too: in order of offsets")
        consumed.pending_acks[message.offset] = PendingAck(owner, message)
        consumed.out_of_turn.discard(message.offset)
        return consumed

    def look(self, partitions: Iterable[ConsumedPartition], owner: object) -> tuple[int, list[OffsetRow]]:
        """Fix what a transaction saves, when it is sent; from then on nothing else of these partitions is saved.

        Raises:
            RolledBackError: a partition was lost, or a seek went elsewhere, since the message was acknowledged.
        """
        with self._assignment.changed:
            for consumed in partitions:
                is_ours = self._assignment.partitions.get(consumed.slot) is consumed
                if not is_ours or all(pending_ack.owner is not owner for pending_ack in consumed.pending_acks.values()):
                    lost = f"{consumed.slot[0]}-{consumed.slot[1]}"
                    raise RolledBackError(f"{lost} is not this consumer's any more", retriable=False)
            rows = []
            for consumed in partitions:
                consumed.saving, offset = owner, consumed.position_with(owner)
                text = deferred_text_with(consumed, offset, owner)
                rows.append(OffsetRow(*consumed.slot, consumed.generation, offset, text))
            return next_order(), rows

    def end(
        self, partitions: Iterable[ConsumedPartition], owner: object, outcome: Outcome, rows: Iterable[OffsetRow] = ()
    ) -> None:
        """Acknowledge the messages of a transaction, or give them back: its outcome is known."""
        committed = {(row.topic, row.partition): row for row in rows if outcome is Outcome.COMMITTED}
        for consumed in partitions:
            with self._assignment.changed:
                for message in _released(consumed, owner):
                    if outcome is Outcome.COMMITTED:
                        _acknowledge(consumed, message.offset)
                    elif consumed.is_in_doubt:
                        consumed.deliver_again(message, self.client.clock.monotonic())
                if consumed.saving is owner:
                    consumed.saving, consumed.is_in_doubt = None, False
                self._assignment.changed.notify_all()
            row = committed.get(consumed.slot)
            if row is not None:
                self._homes.were_saved([OffsetPosition(consumed.slot, row.generation, row.offset, row.deferred)])
        self._homes.more()

    def doubt(self, partitions: list[ConsumedPartition], owner: object, txid: str, rows: list[OffsetRow]) -> None:
        """Deliver nothing more of these partitions, and ask for the outcome in a thread until it is known."""
        with self._assignment.changed:
            for consumed in partitions:
                consumed.is_in_doubt = True
        start_daemon("txmq-doubt", lambda: self._resolve(partitions, owner, txid, rows))

    def _resolve(self, partitions: list[ConsumedPartition], owner: object, txid: str, rows: list[OffsetRow]) -> None:
        pause_s = ASK_AGAIN_S
        while not self._assignment.is_left:
            try:
                outcome = self._ask(txid)
            except FencedError:
                for consumed in partitions:
                    self._assignment.lost(consumed.slot)  # and given anew, with the offset that is saved
                return
            except ClosedError:
                return
            except TxmqError:
                outcome = None
            if outcome is not None:
                self.end(partitions, owner, outcome, rows)
                return
            self.client.clock.sleep(pause_s)
            pause_s = min(2 * pause_s, ASK_AGAIN_S_MAX)

    def _ask(self, txid: str) -> Outcome | None:
        control = self.client.routes.link_of_home(TxId.parse(txid).home).control
        reported: Outcome | None = control.known_outcome(TxId.parse(txid))
        if reported is not None:
            return reported
        reply = control.call("outcome", txid, extensions={"fence": None}, timeout=ASK_TIMEOUT_S)
        return _ENDS.get(parse_outcome(reply)[0])

    # --- transactions of the application's database ------------------------------------------------------------------

    @property
    def _database(self) -> OffsetStoreWithTransactions:
        if self._store is None:
            raise ConfigError(
                "ack(connection) needs a consumer with an offset_store in that database: DatabaseOffsetStore"
            )
        return self._store

    def pending_ack_in(self, message: Message, given: Any) -> None:
        """Acknowledge a message in a transaction of the application's database, where its offset is saved.

        On an event loop it goes to its end, unless the connection is an asynchronous one: a task that is cancelled
        there ends it, and with it the transaction.

        Args:
            given: a connection, or a session of a framework's.

        Raises:
            ConfigError: the consumer's offsets are not in that database.
            FencedError, TransactionStateError, RolledBackError: as ``pending_ack``; the transaction is doomed.
        """
        store = self._database
        connection = store.connection_of(given)
        if is_of_loop(connection):
            self._ack_in(message, connection, store)
        else:
            to_end(lambda: self._ack_in(message, connection, store))

    def _ack_in(self, message: Message, connection: Any, store: OffsetStoreWithTransactions) -> None:
        try:
            if self._is_acknowledged_in(message, connection, store):
                return
            self._look_up_before(message)
            position, from_, consumed = self._pending(message)
            self._homes.wait_saved()  # a save that is under way must not land after this one
            try:
                if consumed.deferred_in_hand(message.offset) is not None:
                    from_ = _From(beside=self._still_deferred(consumed, message.offset))
                called(
                    lambda: store.save_in(
                        connection, self.group, position, from_.above, most=from_.most, beside=from_.beside
                    ),
                    connection,
                )
            except BaseException as error:
                if isinstance(error, TransactionStateError):
                    with self._assignment.changed:
                        consumed.out_of_turn.add(message.offset)
                    self._try_look_up(consumed)  # it may be committed already
                with self._assignment.changed:
                    consumed.pending_acks.pop(message.offset, None)
                raise
            with self._assignment.changed:
                consumed.in_doubt.discard(message.offset)  # the row's lock is granted after every earlier transaction
        except BaseException as error:
            doom = partial(store.doom, connection, error)
            doom() if is_of_loop(connection) else off_loop(doom)
            raise

    def _is_acknowledged_in(self, message: Message, connection: Any, store: OffsetStoreWithTransactions) -> bool:
        """Whether this transaction, and not one that was rolled back, has acknowledged the message before."""
        with self._assignment.changed:
            consumed = self._assignment.partitions.get((message.topic, message.partition))
            pending_ack = consumed.pending_acks.get(message.offset) if consumed is not None else None
        if consumed is None or pending_ack is None or pending_ack.owner is not self or consumed.is_of_another(message):
            return False
        # In this order: with the row's lock no other transaction can commit between the two looks.
        inside = asked(lambda: store.settled(self.group, consumed.slot, connection), connection)
        outside = asked(lambda: store.saved(self.group, consumed.slot))
        return _has(consumed, inside, message.offset) and not _has(consumed, outside, message.offset)

    def _pending(self, message: Message) -> tuple[OffsetPosition, _From, ConsumedPartition]:
        with self._assignment.changed:
            known = self._assignment.partitions.get((message.topic, message.partition))
            if known is None:
                raise FencedError(f"{message.topic}-{message.partition} is not this consumer's any more")
            is_deferred = known.deferred_in_hand(message.offset) is not None
            if is_deferred and known.pending_acks.keys() - {message.offset}:
                known.out_of_turn.add(message.offset)
                raise RolledBackError(
                    "an earlier message of the partition is acknowledged in a transaction: commit first"
                )
            consumed = self._pending_ack(message, self)
            found = _From() if is_deferred else _goes_on_from(consumed, message.offset)
            offset = consumed.position if is_deferred else message.offset + 1
            text = deferred_text_with(consumed, offset, self)
            position = OffsetPosition(consumed.slot, consumed.generation, offset, text, next_order(), consumed.log_text)
            consumed.pending_acks[message.offset] = PendingAck(self, message, position)
        return position, found, consumed

    def _look_up_before(self, message: Message) -> None:
        """Look whether earlier messages are committed: a deferred one is acknowledged alone."""
        with self._assignment.changed:
            consumed = self._assignment.partitions.get((message.topic, message.partition))
            waits = (
                consumed is not None
                and bool(consumed.pending_acks)
                and consumed.deferred_in_hand(message.offset) is not None
            )
        if waits and consumed is not None:
            self._look_up(consumed)

    def _still_deferred(self, consumed: ConsumedPartition, offset: int) -> StoredOffset | None:
        """The saved offset, which must be the same when the transaction has the row's lock.

        Raises:
            TransactionStateError: it no longer names the message: an earlier transaction was committed after all.
        """
        store = self._database
        found: StoredOffset | None = asked(lambda: store.saved(self.group, consumed.slot))
        if found is not None and offset < found.offset and offset not in parsed(found.deferred):
            raise TransactionStateError(f"message {offset} was deferred: its transaction was committed after all")
        return found

    def resolve(self) -> None:
        """Look which pending acks are committed; a store that is away is asked again later."""
        with self._assignment.changed:
            partitions = list(self._assignment.partitions.values())
            waiting = [(one, bool(one.in_doubt)) for one in partitions if one.in_doubt or self._has_pending_acks(one)]
        for consumed, is_in_doubt in waiting:
            self._try_look_up(consumed, is_final=is_in_doubt)

    def _has_pending_acks(self, consumed: ConsumedPartition) -> bool:
        return any(pending_ack.owner is self for pending_ack in consumed.pending_acks.values())

    def _try_look_up(self, consumed: ConsumedPartition, *, is_final: bool = False) -> None:
        with suppress(StorageError):
            self._look_up(consumed, is_final=is_final)

    def _look_up(self, consumed: ConsumedPartition, *, is_final: bool = False) -> None:
        """Acknowledge committed messages; with ``is_final`` also take the others back for certain."""
        store = self._database
        with self._assignment.changed:
            in_doubt = consumed.in_doubt.copy()  # what comes back from now on may be committed after this look
        found = asked(lambda: (store.settled if is_final else store.saved)(self.group, consumed.slot))
        with self._assignment.changed:
            for offset, pending_ack in list(consumed.pending_acks.items()):
                if pending_ack.owner is self and _has(consumed, found, offset):
                    del consumed.pending_acks[offset]
                    _acknowledge(consumed, offset)
            for offset in consumed.in_doubt & in_doubt:
                if _has(consumed, found, offset):
                    _acknowledge(consumed, offset)
                elif not is_final:
                    continue
                consumed.in_doubt.discard(offset)
            is_all = not (self._has_pending_acks(consumed) or consumed.in_doubt)
            self._assignment.changed.notify_all()
        if found is not None and is_all and consumed.position == found.offset:
            self._homes.were_saved([OffsetPosition(consumed.slot, consumed.generation, found.offset, found.deferred)])

    def rejected(self, message: Message) -> bool:
        """Note that the application rejects a message; whether a transaction decides what becomes of it."""
        with self._assignment.changed:
            consumed = self._assignment.partitions.get((message.topic, message.partition))
            pending_ack = consumed.pending_acks.get(message.offset) if consumed is not None else None
        if consumed is None or pending_ack is None:
            return False
        if pending_ack.owner is not self:
            return True
        self._try_look_up(consumed)
        with self._assignment.changed:
            if consumed.pending_acks.pop(message.offset, None) is None:
                return True  # it was committed
            consumed.in_doubt.add(message.offset)
            return False

    def is_store_away(self, message: Message) -> bool:
        """Whether the database that keeps the offsets does not answer, so that nothing could be acknowledged in it."""
        store = self._store
        if store is None:
            return False
        try:
            asked(lambda: store.saved(self.group, (message.topic, message.partition)))
        except TxmqError:
            return True
        return False

    def may_give_up(self, message: Message) -> bool:
        """Whether it is certain that no transaction has dealt with a message, nor will."""
        with self._assignment.changed:
            consumed = self._assignment.partitions.get((message.topic, message.partition))
            is_in_doubt = consumed is not None and message.offset in consumed.in_doubt
        if consumed is None or not is_in_doubt:
            return True
        self._try_look_up(consumed, is_final=True)
        with self._assignment.changed:
            is_here = consumed.is_under_way(message.offset) or consumed.deferred_in_hand(message.offset) is not None
            return is_here and message.offset not in consumed.in_doubt


def _released(consumed: ConsumedPartition, owner: object) -> list[Message]:
    messages = [pending_ack.message for pending_ack in consumed.pending_acks.values() if pending_ack.owner is owner]
    for message in messages:
        del consumed.pending_acks[message.offset]
    return messages


def _goes_on_from(consumed: ConsumedPartition, offset: int) -> _From:
    others = {at: pending_ack.position for at, pending_ack in consumed.pending_acks.items() if at != offset}
    beside = None
    if not consumed.deferred.keys().isdisjoint(others):
        # The text that is saved names none of these: each must be in this transaction, or committed.
        last = max((position for position in others.values() if position is not None), key=lambda one: one.order)
        beside = StoredOffset(last.offset, last.deferred)
    # The saved offset is above the message only if a seek went back from there.
    return _From(max((at for at in others if at < offset), default=None), max(offset, consumed.saved or 0), beside)


def _has(consumed: ConsumedPartition, found: StoredOffset | None, offset: int) -> bool:
    """Whether the saved offset acknowledges a message. It names a deferred one from the save on that passes it."""
    if found is None or offset >= found.offset:
        return False
    return not (offset in consumed.deferred and offset in parsed(found.deferred))


def _acknowledge(consumed: ConsumedPartition, offset: int) -> None:
    consumed.give_up_retry(offset)
    if consumed.forget_deferred(offset) is None:
        consumed.ack(offset)
