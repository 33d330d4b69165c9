"""One branch of an external transaction manager in this client: its messages until they are prepared, and its state.

```
             start            end(TMSUCCESS)            prepare               commit, rollback
  (none) -----------> ACTIVE -----------------> IDLE -----------> PREPARED -------------------> (none)
                      | ^  \\                    | ^ |
  end(TMSUSPEND)      | |   \\ end(TMFAIL)       | | | commit(TMONEPHASE), rollback, prepare of nothing --> (none)
                      v |    v                   | |
                   SUSPENDED  ROLLBACK_ONLY      +-+ start(TMJOIN): ACTIVE
```

IN_DOUBT: prepare, or a commit in one phase, was sent and not answered. Source: X/Open XA, tables 6-2 and 6-4.

Laws:
    * a pair that is missing from ``TRANSITIONS`` is XAER_PROTO and changes nothing;
    * a branch that is not prepared lives in this client (and in parts streamed ahead): it is gone with its connection;
    * from PREPARED on the broker's journal is the branch; this object is not needed any more.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from txmq.client.transaction.homes import TransactionHomes
from txmq.client.transaction.messages import MessageBuffer
from txmq.client.transaction.refusals import raise_rolled_back
from txmq.errors import (
    ConnectionLostError,
    FencedError,
    OtherSessionError,
    RequestTimeoutError,
    RolledBackError,
    TransactionConflictError,
    TransactionStateError,
    TransactionTimeoutError,
    TxmqError,
    XAError,
)
from txmq.model import SendResult
from txmq.runtime.threads import Lock
from txmq.state_machine import next_step
from txmq.xa.xopen import XACode
from txmq.xid import FORMAT_ID_MAX, XID_PART_BYTES_MAX, Xid

if TYPE_CHECKING:
    from txmq.client.client import Client

Row = dict[str, Any]
_LOST_SESSION = (TransactionConflictError, FencedError, OtherSessionError)
_STREAM_AT_BYTES = 8 << 20  # buffered messages beyond this go ahead


class BranchState(enum.Enum):
    """See the drawing."""

    ACTIVE = "active"
    SUSPENDED = "suspended"
    IDLE = "idle"
    ROLLBACK_ONLY = "rollback only"
    PREPARED = "prepared"
    IN_DOUBT = "in doubt"
    ENDED = "ended"


class Call(enum.Enum):
    """Calls of a transaction manager on a branch that exists."""

    JOIN = "start(TMJOIN)"
    RESUME = "start(TMRESUME)"
    END = "end(TMSUCCESS)"
    END_FAILED = "end(TMFAIL)"
    SUSPEND = "end(TMSUSPEND)"
    PREPARE = "prepare"
    COMMIT = "commit"
    COMMIT_ONE_PHASE = "commit(TMONEPHASE)"
    ROLLBACK = "rollback"


_S, _C = BranchState, Call
TRANSITIONS: dict[tuple[BranchState, Call], BranchState] = {
    (_S.ACTIVE, _C.END): _S.IDLE,
    (_S.ACTIVE, _C.END_FAILED): _S.ROLLBACK_ONLY,
    (_S.ACTIVE, _C.SUSPEND): _S.SUSPENDED,
    (_S.SUSPENDED, _C.RESUME): _S.ACTIVE,
    (_S.SUSPENDED, _C.END): _S.IDLE,
    (_S.SUSPENDED, _C.END_FAILED): _S.ROLLBACK_ONLY,
    (_S.IDLE, _C.JOIN): _S.ACTIVE,
    (_S.IDLE, _C.PREPARE): _S.PREPARED,
    (_S.IDLE, _C.COMMIT_ONE_PHASE): _S.ENDED,
    (_S.IDLE, _C.ROLLBACK): _S.ENDED,
    (_S.ROLLBACK_ONLY, _C.END): _S.ROLLBACK_ONLY,
    (_S.ROLLBACK_ONLY, _C.END_FAILED): _S.ROLLBACK_ONLY,
    (_S.ROLLBACK_ONLY, _C.PREPARE): _S.ROLLBACK_ONLY,  # answered XA_RBROLLBACK
    (_S.ROLLBACK_ONLY, _C.COMMIT_ONE_PHASE): _S.ROLLBACK_ONLY,
    (_S.ROLLBACK_ONLY, _C.ROLLBACK): _S.ENDED,
    (_S.PREPARED, _C.COMMIT): _S.ENDED,
    (_S.PREPARED, _C.ROLLBACK): _S.ENDED,
    (_S.IN_DOUBT, _C.COMMIT): _S.ENDED,
    (_S.IN_DOUBT, _C.COMMIT_ONE_PHASE): _S.ENDED,
    (_S.IN_DOUBT, _C.ROLLBACK): _S.ENDED,
}


class ExternalBranch:
    """See the module's docstring.

    Attributes:
        state: moved by ``BrokerXAResource``, by way of ``next_state``.

    Thread safety: ``add`` from any thread.
    """

    def __init__(self, client: Client, xid: Xid, timeout_s: float) -> None:
        self.client, self.xid = client, xid
        self.state = BranchState.ACTIVE
        self.homes = TransactionHomes(client, client.clock, timeout_s)
        self.messages = MessageBuffer(None, client.routes.topic_id)
        self._lock = Lock()

    @property
    def is_ended(self) -> bool:
        """Whether it is over."""
        return self.state is BranchState.ENDED

    def next_state(self, call: Call) -> BranchState:
        """The state that a call leads to.

        Raises:
            XAError: XAER_PROTO.
        """
        try:
            return next_step(TRANSITIONS, self.state, call)
        except TransactionStateError as error:
            raise XAError(XACode.XAER_PROTO, str(error)) from None

    def add(
        self, topic: str, partition: int, key: bytes | None, value: bytes | None,
        headers: Sequence[tuple[str, bytes]], timestamp_ms: int,
    ) -> SendResult:  # fmt: skip
        """Append a message whose partition is chosen; for producers.

        Raises:
            TransactionStateError: the branch is not active.
            RolledBackError: it outgrew one request, and the broker refused a part sent ahead: it can only roll back.
        """
        with self._lock:
            if self.state is not BranchState.ACTIVE:
                raise TransactionStateError(f"the branch is {self.state.value}: send between start and end")
            result = self.messages.add(topic, partition, (key, value, headers, timestamp_ms))
            if self.messages.size_bytes > _STREAM_AT_BYTES:
                self._stream()
        return result

    def renew_deadline(self) -> None:
        """Each call of the transaction manager has the whole timeout."""
        decider = self.homes.decider
        deadline = self.client.clock.monotonic() + decider.timeout_s
        for part in (decider, *self.homes.others):
            part.deadline = deadline

    def _stream(self) -> None:
        self.renew_deadline()
        try:
            self.homes.find(self.messages)
            self.homes.decider.begin()
            self.homes.take(self.messages, keyed=False)
            self.homes.stream()
        except TxmqError as error:
            self.state = BranchState.ROLLBACK_ONLY
            raise_rolled_back(error, self.homes.decider.txid_or_none)


def xid_text(xid: Xid) -> str:
    """The xid as the broker has it."""
    return f"{xid.format_id}.{xid.gtrid.hex()}.{xid.bqual.hex()}"


def listed_xid(row: Row) -> Xid | None:
    """The xid of a transaction that ``recover`` lists; None if it has none, or one that no transaction manager has."""
    # If an operator has decided alone it is that of the note, until other homes have reported.
    notes = (row, *row.get("heuristics", ()))
    text = next((note["xid"] for note in notes if "xid" in note), None)
    if text is None:
        return None
    format_id, gtrid, bqual = text.split(".")
    if int(format_id) > FORMAT_ID_MAX:  # brokers up to 0.1.0 kept it
        return None
    return Xid(int(format_id), bytes.fromhex(gtrid), bytes.fromhex(bqual))


def rolled_back_code(error: BaseException) -> XACode:
    """Why a branch is rolled back, in the code of X/Open that fits the error."""
    if isinstance(error, RolledBackError) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, TransactionTimeoutError | RequestTimeoutError):
        return XACode.XA_RBTIMEOUT
    if isinstance(error, (*_LOST_SESSION, ConnectionLostError)):
        return XACode.XA_RBCOMMFAIL
    return XACode.XA_RBTRANSIENT if isinstance(error, TxmqError) and error.retriable else XACode.XA_RBOTHER


def checked_xid(xid: Xid) -> Xid:
    """It as an ``Xid``.

    Raises:
        XAError: XAER_INVAL.
    """
    try:
        found = Xid(*xid)
        is_sound = (
            0 <= found.format_id <= FORMAT_ID_MAX
            and 1 <= len(found.gtrid) <= XID_PART_BYTES_MAX
            and len(found.bqual) <= XID_PART_BYTES_MAX
        )
        if is_sound:
            return Xid(int(found.format_id), bytes(found.gtrid), bytes(found.bqual))
    except TypeError:
        pass
    raise XAError(XACode.XAER_INVAL, "not an xid: (format id, gtrid of 1 to 64 bytes, bqual of 0 to 64 bytes)")
