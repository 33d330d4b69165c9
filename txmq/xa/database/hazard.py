"""The report to the broker of a database in which the body of a block ended the transaction by itself.

The rows that it wrote before may be committed, and the messages were never sent: that cannot be known, and nothing can
be taken back. So the broker keeps it (``rollback ... hazard=``) and lists it until an operator forgets it.
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
