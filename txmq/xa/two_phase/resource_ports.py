"""An XA resource, as coordinator and resolver see it: ports, and the xids of branches.

Theory of operation. A resource ``enlist``s: the branch that comes of it is one transaction's side in one database, from
XA START to its end, on the owner's connection. A resolver, which finishes for owners that have gone, opens a
``Recovery``: a connection of its own that lists, commits and rolls back prepared branches of this database.

Xid of a branch::

    format id   xid.FORMAT_ID
    gtrid       the txid's text (ASCII, at most 64 bytes)
    bqual       <uuid of the database, 32 hex>.<deadline in ms on the database's clock, hex>.<connection id, hex>

So XA RECOVER tells the transaction, the resource, the deadline, and the connection that holds the branch.

Invariants:
    * an xid is never used twice: a txid is not, and one resource takes part in a transaction once;
    * "not known" (XAER_NOTA) is not "done": a branch whose owner's connection lives is not known to others, and listed.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from txmq.errors import TransactionError
from txmq.runtime.call_limits import CallLimit
from txmq.xa.database.marker_sweep import Markers
from txmq.xa.database.marker_table import TokenRow
from txmq.xid import FORMAT_ID, TxId, Xid

_BQUAL = re.compile(rb"([0-9a-f]{32})\.([0-9a-f]{1,15})\.([0-9a-f]{1,14})\Z")


class PrepareUnknownError(TransactionError):
    """XA PREPARE was sent, and not answered or not as it should be: the branch may be prepared."""


class Ended(enum.Enum):
    """A database's answer when a prepared branch should end."""

    DONE = "done"
    NOT_KNOWN = "not known"  # XAER_NOTA: ended before, or its owner's connection lives
    ROLLED_BACK = "rolled back"  # XA_RB*: it was read-only, or the database gave it up; it has ended


class Bqual(NamedTuple):
    """The content of a bqual."""

    uuid: str
    deadline_ms: int
    connection: int


class ListedXid(NamedTuple):
    """A prepared branch of ours, as a database lists it.

    Attributes:
        deadline_ms: of the transaction, on the database's clock.
        connection: the database's number for the connection that began it.
    """

    xid: Xid
    txid: TxId
    uuid: str
    deadline_ms: int
    connection: int


def encode_bqual(bqual: Bqual) -> bytes:
    """The bytes of a bqual."""
    return f"{bqual.uuid}.{bqual.deadline_ms:x}.{bqual.connection:x}".encode("ascii")


def decode_bqual(text: bytes) -> Bqual | None:
    """Read a bqual; None if it is not one of ours."""
    match = _BQUAL.match(text)
    return None if match is None else Bqual(match[1].decode(), int(match[2], 16), int(match[3], 16))


def listed_xid(xid: Xid) -> ListedXid | None:
    """Read an xid; None for one of another transaction manager."""
    bqual = decode_bqual(xid.bqual) if xid.format_id == FORMAT_ID else None
    if bqual is None:
        return None
    try:
        txid = TxId.parse(xid.gtrid.decode("ascii"))
    except ValueError:
        return None
    return ListedXid(xid, txid, *bqual)


class XABranch(Protocol):
    """One transaction's side in one database, on the owner's connection.

    Used by one thread at a time, not always the same. After any exception it can still be rolled back. Each of
    ``commit``, ``roll_back``, ``finish`` and ``abandon`` gives the connection back or closes it, once.
    """

    @property
    def resource(self) -> XAResource:
        """The resource that it is a branch of."""

    @property
    def connection(self) -> Any:
        """The connection for the body of the block."""

    @property
    def xid(self) -> Xid:
        """Its name in the database."""

    def details(self) -> dict[str, Any]:
        """Its fields in ``decide``: bqual, connection, wrote, marker. True to the end once prepared."""

    def end_body(self) -> None:
        """Take the connection from the body.

        Raises:
            RolledBackError: a statement failed: not prepared, never will be.
        """

    def prepare(self) -> None:
        """Put the marker row in, end the branch's work, and prepare it.

        Durability: when this returns the branch survives a crash of any process.

        Raises:
            RolledBackError: surely not prepared, and never will be.
            HeuristicError: the same; the body ended the branch by itself: its rows may be committed.
            PrepareUnknownError: it may be prepared, with or without its marker. If there is a reason that the caller of
                the transaction is to see (the deadline has passed), it is the cause, a RolledBackError.
        """

    def commit(self) -> bool:
        """Commit the prepared branch; the decision is durable. Never raises Exception.

        Returns:
            True: done, durably. False: not known; the resolver finishes it.
        """

    def roll_back(self, prepared: bool) -> bool:
        """Roll the branch back. Never raises Exception.

        Args:
            prepared: it is or may be prepared; the broker has fenced the transaction.

        Returns:
            True: it has ended and will not come back. False: left to the resolver.
        """

    @property
    def ended_by_body(self) -> bool:
        """After ``roll_back``: there was no branch, so the body had ended it by itself, and may have committed it."""

    def finish(self) -> None:
        """The branch has ended: the connection may be used again."""

    def abandon(self) -> None:
        """Close the connection. A branch that is not prepared is rolled back by that; a prepared one stays."""


class UsedXAConnection(NamedTuple):
    """A resource together with the caller's connection (``MySQLResource.using``)."""

    resource: XAResource
    connection: Any


class Recovery(Markers, Protocol):
    """A connection of a resolver, to the identified database. Used by one thread at a time.

    Any method may raise the driver's own error: nothing is known then, and the connection should be given up.
    """

    @property
    def limit(self) -> CallLimit:
        """How long its calls may wait."""

    def prepared(self) -> list[ListedXid]:
        """Prepared branches of ours in this database; never those of other transaction managers."""

    def commit(self, xid: Xid) -> Ended:
        """Commit a prepared branch; durable if the answer is DONE."""

    def rollback(self, xid: Xid) -> Ended:
        """Roll a prepared branch back. Not durable before ``force``, DONE or not: it may come back, prepared."""

    def force(self) -> None:
        """Make earlier rollbacks durable."""

    def marker_outcome(self, txid: str) -> str | None:
        """``committed`` or ``rolled-back`` as the marker row says, durably; None without a row."""

    def token_row(self, home: str) -> TokenRow:
        """See ``Drawn``."""

    def draw_token(self, home: str, before: TokenRow, after: TokenRow, rolled_back: Sequence[str] = ()) -> bool:
        """See ``Drawn``: in a forced commit on this connection."""

    def kill(self, connection: int) -> bool:
        """End an owner's session, if it is there and in a transaction, and wait for its end; whether that was done."""

    def now_ms(self) -> int:
        """The database's clock, to compare deadlines with."""

    def close(self) -> None:
        """End the session."""


class XAResource(Protocol):
    """A database that takes part in two-phase commits. Shared by threads."""

    @property
    def name(self) -> str:
        """As it is shown to people."""

    @property
    def uuid(self) -> str | None:
        """Identity of the database, 32 hex digits; None before the first connection."""

    def enlist(self, cluster: str, txid: str, timeout_s: float, connection: Any = None) -> XABranch:
        """Begin a branch.

        Args:
            cluster: the broker's cluster id, 16 hex digits.
            timeout_s: until the transaction's deadline.
            connection: the caller's own; None for one of the resource's.

        Raises:
            TransactionStateError: the connection is in autocommit or in a transaction.
            ConfigError: weak durability, tables that cannot roll back, missing privileges, not installed, or installed
                for another resource or cluster.
            Exception: the driver's own, if it cannot connect.
        """

    def open_recovery(self, cluster: str) -> Recovery:
        """A connection for a resolver.

        Raises:
            Exception: unreachable, in whatever way; nothing is known.
        """

    def new_token(self) -> str:
        """A fencing token, 32 hex digits."""

    def close(self) -> None:
        """Close the idle connections."""
