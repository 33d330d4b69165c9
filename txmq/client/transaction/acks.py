"""The messages that a transaction acknowledges, by consumer, and the offsets that are saved with it.

No I/O, except in ``pending_acks`` if the outcome is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from txmq.client.consumer.consumed_partition import ConsumedPartition
from txmq.client.consumer.transactional_acks import PendingAcks
from txmq.errors import TransactionError, TransactionStateError
from txmq.model import Message, Outcome
from txmq.protocol.transaction_offsets import GroupOffsets, OffsetRow, encode_offsets

if TYPE_CHECKING:
    from txmq.client.client import Client


class TransactionAcks:
    """See the module's docstring. Thread safety: the transaction's lock.

    Args:
        await_end: waits for the broker's answer, until a time, if the transaction has ended before it came.
    """

    def __init__(self, client: Client, await_end: Callable[[float], None]) -> None:
        self._client, self._await_end = client, await_end
        self._partitions: dict[PendingAcks, dict[ConsumedPartition, None]] = {}
        self._rows: dict[PendingAcks, list[OffsetRow]] = {}
        self._groups: list[GroupOffsets] | None = None  # looked at
        self._encoded: bytes | None = None

    def __bool__(self) -> bool:
        return bool(self._partitions)

    def add(self, message: Message) -> None:
        """Acknowledge one. Raises as ``PendingAcks.pending_ack``."""
        consumer = getattr(message, "consumer", None)
        if consumer is None:
            raise TransactionStateError("tx.ack takes messages that a consumer delivered")
        pending_acks: PendingAcks = consumer.pending_acks
        if pending_acks.client is not self._client:
            raise TransactionStateError("tx.ack takes messages of consumers of the transaction's own client")
        if self._groups is not None:
            raise TransactionStateError("the transaction is being decided")
        earlier = pending_acks.saving(message)
        if isinstance(earlier, TransactionAcks) and earlier is not self:
            with suppress(TransactionError):
                earlier._await_end(self._client.clock.monotonic() + self._client.timeout)  # noqa: SLF001
        consumed = pending_acks.pending_ack(message, self)
        self._partitions.setdefault(pending_acks, {})[consumed] = None

    def slots(self) -> Sequence[tuple[str, int]]:
        """See ``SavedOffsets``."""
        return [consumed.slot for partitions in self._partitions.values() for consumed in partitions]

    def of_home(self, slots: frozenset[tuple[str, int]]) -> AcksOfHome:
        """See ``SavedOffsets``."""
        return AcksOfHome(self, slots)

    def encoded(self) -> bytes:
        """See ``SavedOffsets``; looked at once."""
        if self._encoded is None:
            self._encoded = encode_offsets(self._looked_at())
        return self._encoded

    def encoded_of(self, slots: Container[tuple[str, int]]) -> bytes:
        """The same, of some partitions."""
        found = []
        for name, order, rows in self._looked_at():
            own = tuple(row for row in rows if (row.topic, row.partition) in slots)
            if own:
                found.append(GroupOffsets(name, order, own))
        return encode_offsets(found)

    def _looked_at(self) -> list[GroupOffsets]:
        if self._groups is None:
            groups: dict[str, tuple[int, list[OffsetRow]]] = {}
            for pending_acks, partitions in self._partitions.items():
                order, rows = pending_acks.look(partitions, self)
                self._rows[pending_acks] = rows
                _, others = groups.get(pending_acks.group, (0, []))
                groups[pending_acks.group] = order, others + rows
            self._groups = [GroupOffsets(name, order, tuple(rows)) for name, (order, rows) in groups.items()]
        return self._groups

    def ended(self, outcome: Outcome, txid: str | None) -> None:
        """The block is over.

        Args:
            outcome: in the broker; UNKNOWN if it is not known.
            txid: None if nothing was sent under one.
        """
        is_known = outcome is not Outcome.UNKNOWN or txid is None or self._groups is None
        for pending_acks, partitions in self._partitions.items():
            rows = self._rows.get(pending_acks, [])
            if is_known or txid is None:
                known = Outcome.ROLLED_BACK if outcome is Outcome.UNKNOWN else outcome
                pending_acks.end(partitions, self, known, rows)
            else:
                pending_acks.doubt(list(partitions), self, txid, rows)


class AcksOfHome:
    """The offsets of the partitions that one home owns, as it saves them."""

    def __init__(self, whole: TransactionAcks, slots: frozenset[tuple[str, int]]) -> None:
        self._whole, self._slots = whole, slots
        self._encoded: bytes | None = None

    def __bool__(self) -> bool:
        return bool(self._slots)

    def slots(self) -> Sequence[tuple[str, int]]:
        """See ``SavedOffsets``."""
        return [*self._slots]

    def of_home(self, slots: frozenset[tuple[str, int]]) -> AcksOfHome:
        """See ``SavedOffsets``."""
        return AcksOfHome(self._whole, slots)

    def encoded(self) -> bytes:
        """See ``SavedOffsets``."""
        if self._encoded is None:
            self._encoded = self._whole.encoded_of(self._slots)
        return self._encoded
