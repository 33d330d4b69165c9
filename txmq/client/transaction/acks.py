"""What a transaction acknowledges: its messages by consumer, the offsets they come to, and what becomes of them.

No I/O but for what ``claims`` does when the outcome is not known.
"""

from __future__ import annotations

from typing import Any

from txmq.client.consumer.partition import ConsumedPartition
from txmq.client.consumer.transactional_acks import Claims
from txmq.errors import TransactionStateError
from txmq.model import Message, Outcome
from txmq.protocol.offsets import GroupOffsets, OffsetRow, encode_offsets


class TransactionAcks:
    """See the module's docstring. Thread safety: the transaction's lock."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._partitions: dict[Claims, dict[ConsumedPartition, None]] = {}
        self._rows: dict[Claims, list[OffsetRow]] = {}
        self._stated: bytes | None = None

    def __bool__(self) -> bool:
        return bool(self._partitions)

    def add(self, message: Message) -> None:
        """Acknowledge one. Raises as ``Claims.claim``."""
        consumer = getattr(message, "consumer", None)
        if consumer is None:
            raise TransactionStateError("tx.ack takes messages that a consumer delivered")
        claims: Claims = consumer.claims
        if claims.client is not self._client:
            raise TransactionStateError("tx.ack takes messages of consumers of the transaction's own client")
        if self._stated is not None:
            raise TransactionStateError("the transaction is being decided")
        consumed = claims.claim(message, self)
        self._partitions.setdefault(claims, {})[consumed] = None

    def stated(self) -> bytes:
        """The offsets, as they stand in front of the parts; looked at once, so that a repeated request is the same.

        Raises:
            RolledBackError: a partition was lost meanwhile.
        """
        if self._stated is None:
            groups: dict[str, tuple[int, list[OffsetRow]]] = {}
            for claims, partitions in self._partitions.items():
                order, rows = claims.look(partitions, self)
                self._rows[claims] = rows
                _, others = groups.get(claims.group, (0, []))
                groups[claims.group] = order, others + rows
            self._stated = encode_offsets([GroupOffsets(name, *found) for name, found in _tupled(groups).items()])
        return self._stated

    def ended(self, outcome: Outcome, txid: str | None) -> None:
        """The block is over.

        Args:
            outcome: what the broker is known to have made of it; UNKNOWN where that is not known.
            txid: None where nothing was sent under one.
        """
        is_known = outcome is not Outcome.UNKNOWN or txid is None or self._stated is None
        for claims, partitions in self._partitions.items():
            rows = self._rows.get(claims, [])
            if is_known or txid is None:
                known = Outcome.ROLLED_BACK if outcome is Outcome.UNKNOWN else outcome
                claims.end(partitions, self, known, rows)
            else:
                claims.doubt(list(partitions), self, txid, rows)


def _tupled(groups: dict[str, tuple[int, list[OffsetRow]]]) -> dict[str, tuple[int, tuple[OffsetRow, ...]]]:
    return {name: (order, tuple(rows)) for name, (order, rows) in groups.items()}
