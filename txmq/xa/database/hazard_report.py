"""The report to the broker of a database whose rows may be committed, or are, without their messages.

The body of a block ended the transaction by itself: whether its rows are committed cannot be known, and the messages
were never sent. Or a committed marker proves the rows, and the broker knows nothing of the transaction: it was restored
from an older copy. Nothing can be taken back. So the broker keeps it (``rollback ... hazard=``) and lists it until an
operator forgets it; as long as it is listed, the marker stays.
"""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import quote

from txmq.model import TransactionKind

_REASON_LENGTH_MAX = 200  # characters; of 12 bytes at most, so that the line is not too long


class Hazard(NamedTuple):
    """One such transaction."""

    txid: str
    kind: TransactionKind
    resource: str
    uuid: str
    reason: str

    def extensions(self) -> dict[str, str | int | bytes | None]:
        """Its fields in ``rollback``."""
        reason = self.reason.encode("utf-8", "replace").decode()[:_REASON_LENGTH_MAX]
        return {
            "hazard": quote(reason, safe=""), "resource": self.resource, "uuid": self.uuid, "kind": self.kind.value,
        }  # fmt: skip


def lost_messages(txid: str, kind: TransactionKind, resource: str, uuid: str) -> Hazard:
    """Of a transaction that a marker proves, and of which the broker knows nothing though it has its session."""
    reason = "the rows are committed, and the broker has lost the messages: was it restored from an older copy?"
    return Hazard(txid, kind, resource, uuid, reason)
