r"""``client.xa_resource()``: the broker as a resource of an external transaction manager (X/Open XA).

Theory of operation. Between ``start`` and ``end`` what the calling thread sends with a producer of this client joins
the branch. ``prepare`` forces its messages in the broker's journal, under a transaction id of ours that carries the
external xid; from then on any client's ``commit``, ``rollback``, ``recover`` and ``forget`` find it by its xid.
``commit`` and ``rollback`` look the xid up in the broker first, so that they are the same for the process that prepared
and for one that recovers.

If the messages are on several homes, one of them has the branch and its xid. What goes to the others is prepared there
first (``homes``); the resolution at the one home is that of all, and the others are told, or ask.

A branch that is not prepared is an ``ExternalBranch``: its messages, and its state by ``TRANSITIONS``:

```
             start            end(TMSUCCESS)            prepare               commit, rollback
  (none) -----------> ACTIVE -----------------> IDLE -----------> PREPARED -------------------> (none)
                      | ^  \                    | ^ |
  end(TMSUSPEND)      | |   \ end(TMFAIL)       | | | commit(TMONEPHASE), rollback, prepare of nothing --> (none)
                      v |    v                   | |
                   SUSPENDED  ROLLBACK_ONLY      +-+ start(TMJOIN): ACTIVE
```

IN_DOUBT: prepare, or a commit in one phase, was sent and not answered. A pair that is missing from ``TRANSITIONS`` is
XAER_PROTO and changes nothing. From PREPARED on the broker's journal is the branch.

Calls answer an ``XACode`` or raise ``XAError`` with one, as the specification lists them. XAER_RMFAIL: the broker
cannot be reached; nothing is known, call again.

Invariants:
    * a branch that is not prepared lives in this client (and in parts streamed ahead): it is rolled back when the
      client or its connection goes away; a prepared one stays until it is resolved;
    * "not there" (XAER_NOTA) is answered only by the broker, or for a branch that never left this process;
    * a heuristic outcome is answered (XA_HEURCOM, XA_HEURRB) each time, until ``forget``.

Source: X/Open CAE Specification, The XA Specification, chapters 5 and 6 (tables 6-2 and 6-4).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from txmq.client.transaction import local_ending
from txmq.client.transaction.conversation import LOST, raise_rolled_back
from txmq.client.transaction.current import associate, associated_branch, current_transaction, dissociate, is_associated
from txmq.client.transaction.homes import TransactionHomes
from txmq.client.transaction.messages import MessageBuffer
from txmq.client.transaction.prepared import prepare, resolve
from txmq.errors import (
    ClosedError,
    ConnectionLostError,
    FencedError,
    OtherSessionError,
    OutcomeUnknownError,
    PartialResultError,
    RequestTimeoutError,
    RolledBackError,
    TransactionConflictError,
    TransactionStateError,
    TransactionTimeoutError,
    TxmqError,
    UnavailableError,
    UnknownTransactionError,
    XAError,
)
from txmq.model import Resolution, SendResult, TransactionKind
from txmq.protocol.transaction_bodies import PartResult
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.threads import Lock
from txmq.state_machine import next_step
from txmq.xa.resolver_ports import Wanted, recover_rows
from txmq.xa.xopen import XACode, XAFlag
from txmq.xid import FORMAT_ID_MAX, XID_PART_BYTES_MAX, TxId, Xid

if TYPE_CHECKING:
    from txmq.client.client import Client
    from txmq.client.home_link import HomeLink

Row = dict[str, Any]
_LOST_SESSION = (TransactionConflictError, FencedError, OtherSessionError)
_STREAM_AT_BYTES = 8 << 20  # buffered messages beyond this go ahead
_UNREACHABLE = (ConnectionLostError, RequestTimeoutError, UnavailableError, ClosedError)
_RECOVER_LIMIT = 1000
_HEURISTICS = {"committed": XACode.XA_HEURCOM, "rolled-back": XACode.XA_HEURRB}


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
    """A branch of an external transaction manager in this client: its messages until they are prepared, and its state.

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


_START = {XAFlag.TMNOFLAGS: None, XAFlag.TMJOIN: Call.JOIN, XAFlag.TMRESUME: Call.RESUME}
_END = {XAFlag.TMSUCCESS: Call.END, XAFlag.TMFAIL: Call.END_FAILED, XAFlag.TMSUSPEND: Call.SUSPEND}


class BrokerXAResource:
    """See the module's docstring. Made by ``client.xa_resource``.

    Args:
        timeout: seconds for each call that asks the broker.

    Thread safety: any thread; ``end`` belongs to the thread that called ``start``, unless it is suspended.
    """

    def __init__(self, client: Client, timeout: float) -> None:
        self._client, self._timeout = client, timeout
        self._branches: dict[Xid, ExternalBranch] = {}
        self._lock = Lock()
        self._scan: list[Xid] | None = None

    # --- association -------------------------------------------------------------------------------------------------

    def start(self, xid: Xid, flags: int = XAFlag.TMNOFLAGS) -> XACode:
        """Begin a branch, join one that is idle (TMJOIN), or resume one that is suspended (TMRESUME).

        Raises:
            XAError: XAER_DUPID, XAER_NOTA, XAER_PROTO, XAER_INVAL, XAER_OUTSIDE (the thread is in a transaction
                block), XA_RBROLLBACK (it can only be rolled back), XAER_RMFAIL.
        """
        xid, flag = checked_xid(xid), _flag(flags, _START)
        if current_transaction() is not None:
            raise XAError(XACode.XAER_OUTSIDE, "the thread is in a transaction block of txmq's")
        if associated_branch(self._client) is not None:
            raise XAError(XACode.XAER_PROTO, "the thread is associated with a branch already")
        call = _START[flag]
        branch = self._begin(xid) if call is None else self._known(xid)
        with self._lock:
            if call is not None:
                if branch.state is BranchState.ROLLBACK_ONLY:
                    raise XAError(XACode.XA_RBROLLBACK, "the branch can only be rolled back")
                branch.state = branch.next_state(call)
        associate(branch)
        return XACode.XA_OK

    def _begin(self, xid: Xid) -> ExternalBranch:
        if xid in self._branches or self._row(xid) is not None:
            raise XAError(XACode.XAER_DUPID, "a branch of that xid exists")
        branch = ExternalBranch(self._client, xid, self._timeout)
        with self._lock:
            if self._branches.setdefault(xid, branch) is not branch:
                raise XAError(XACode.XAER_DUPID, "a branch of that xid exists")
        return branch

    def end(self, xid: Xid, flags: int = XAFlag.TMSUCCESS) -> XACode:
        """End the association: TMSUCCESS, TMFAIL (it can only be rolled back then) or TMSUSPEND.

        Raises:
            XAError: XAER_NOTA, XAER_PROTO, XAER_INVAL, XA_RBROLLBACK (it is over, and can only be rolled back).
        """
        branch, call = self._known(checked_xid(xid)), _END[_flag(flags, _END)]
        with self._lock:
            if not is_associated(branch) and branch.state in (BranchState.ACTIVE, BranchState.ROLLBACK_ONLY):
                raise XAError(XACode.XAER_PROTO, "the thread is not associated with this branch")
            branch.state = branch.next_state(call)
        dissociate(branch)
        if branch.state is BranchState.ROLLBACK_ONLY and call is not Call.END_FAILED:
            raise XAError(XACode.XA_RBROLLBACK, "the broker refused what was sent: the branch can only be rolled back")
        return XACode.XA_OK

    # --- the two phases ----------------------------------------------------------------------------------------------

    def prepare(self, xid: Xid) -> XACode:
        """First phase.

        Returns:
            XA_OK, or XA_RDONLY if nothing was sent: the branch is over.

        Raises:
            XAError: XA_RB* (it is rolled back, and over), XAER_NOTA, XAER_PROTO, XAER_RMFAIL (unknown: roll back).

        Durability: the messages are in the broker's journal when this returns XA_OK, until the branch is resolved.
        """
        branch = self._known(checked_xid(xid))
        following = branch.next_state(Call.PREPARE)
        if branch.state is BranchState.ROLLBACK_ONLY:
            self._drop(branch)
            raise XAError(XACode.XA_RBROLLBACK, "the branch was rolled back")
        if not branch.messages:
            self._forget(branch)
            return XACode.XA_RDONLY
        branch.renew_deadline()
        try:
            prepare(branch.homes, TransactionKind.FOREIGN.value, {"xid": xid_text(branch.xid)}, branch.messages)
        except (RequestTimeoutError, TransactionTimeoutError) as error:
            branch.state = BranchState.IN_DOUBT
            raise XAError(XACode.XAER_RMFAIL, f"prepare was not answered: {error}") from error
        except TxmqError as error:
            if branch.homes.decider.may_have_arrived and isinstance(error, LOST):
                branch.state = BranchState.IN_DOUBT
                raise XAError(XACode.XAER_RMFAIL, f"prepare was not answered: {error}") from error
            self._refused(branch)
            raise XAError(rolled_back_code(error), f"the branch is rolled back: {error}") from error
        except BaseException:
            branch.state = BranchState.IN_DOUBT
            raise
        branch.state = following
        crash_point("client.foreign.prepared")
        return XACode.XA_OK

    def commit(self, xid: Xid, flags: int = XAFlag.TMNOFLAGS) -> XACode:
        """Second phase; or, with TMONEPHASE, both in one request.

        Raises:
            XAError: XA_HEURRB, XA_HEURCOM (until ``forget``), XA_RB* (one phase: it is rolled back), XAER_NOTA,
                XAER_PROTO, XAER_INVAL, XAER_RMFAIL (unknown: call again).

        Durability: readers see the messages when this returns; those of other homes when these have heard.
        """
        xid = checked_xid(xid)
        if _flag(flags, (XAFlag.TMNOFLAGS, XAFlag.TMONEPHASE)) is XAFlag.TMONEPHASE:
            return self._commit_one_phase(self._known(xid))
        branch = self._branches.get(xid)
        if branch is not None:
            branch.next_state(Call.COMMIT)
        row = self._required_row(xid)
        lines = self._resolve(row["txid"], Resolution.COMMIT, XACode.XA_HEURRB)
        if branch is None:
            self._tell(row, Resolution.COMMIT)
        else:
            branch.homes.decided(lines)
            branch.homes.commit_others()
        self._forget(branch)
        return XACode.XA_OK

    def rollback(self, xid: Xid) -> XACode:
        """Roll back, in any state but an association's.

        Raises:
            XAError: XA_HEURCOM, XA_HEURRB (until ``forget``), XAER_NOTA, XAER_PROTO, XAER_RMFAIL (unknown: again).
        """
        xid = checked_xid(xid)
        branch = self._branches.get(xid)
        if branch is not None:
            branch.next_state(Call.ROLLBACK)
            if branch.state in (BranchState.IDLE, BranchState.ROLLBACK_ONLY):
                self._drop(branch)
                return XACode.XA_OK
        if branch is not None and branch.state is BranchState.IN_DOUBT:
            # A prepare that was not answered may still arrive: it is fenced by its id.
            with _as_xa():
                branch.homes.decider.begin()
            row: Row = {"txid": branch.homes.decider.txid}
        else:
            row = self._required_row(xid)
        self._resolve(row["txid"], Resolution.ROLLBACK, XACode.XA_HEURCOM)
        if branch is None:
            self._tell(row, Resolution.ROLLBACK)
        else:
            branch.homes.roll_back_others()
        self._forget(branch)
        return XACode.XA_OK

    def recover(self, flags: int = XAFlag.TMSTARTRSCAN | XAFlag.TMENDRSCAN) -> list[Xid]:
        """Branches of all clients that are prepared, or were resolved by an operator alone.

        Args:
            flags: TMSTARTRSCAN begins a scan and answers all; without it the scan has nothing more; TMENDRSCAN ends it.

        Raises:
            XAError: XAER_INVAL (no scan was begun), XAER_RMFAIL (its text names the homes that do not answer).
        """
        known = XAFlag.TMSTARTRSCAN | XAFlag.TMENDRSCAN
        if int(flags) & ~int(known):
            raise XAError(XACode.XAER_INVAL, f"recover takes TMSTARTRSCAN and TMENDRSCAN, not {int(flags):#x}")
        if flags & XAFlag.TMSTARTRSCAN:
            with _as_xa():
                rows = self._rows()
            self._scan = [xid for row in rows if (xid := listed_xid(row)) is not None]
        elif self._scan is None:
            raise XAError(XACode.XAER_INVAL, "no scan was begun: TMSTARTRSCAN")
        found, self._scan = self._scan, None if flags & XAFlag.TMENDRSCAN else []
        return found

    def forget(self, xid: Xid) -> XACode:
        """Drop the heuristic outcome of a branch.

        Raises:
            XAError: XAER_NOTA (none is kept), XAER_PROTO (it is prepared), XAER_RMFAIL.
        """
        row = self._row(checked_xid(xid))
        if row is None:
            raise XAError(XACode.XAER_NOTA, "no such branch")
        if row["state"] != "heuristic":
            raise XAError(XACode.XAER_PROTO, "the branch is prepared")
        with _as_xa(), _absent_is_over():
            self._home_of(row["txid"]).control.repeat("forget", row["txid"], timeout=self._timeout)
        return XACode.XA_OK

    # --- how -------------------------------------------------------------------------------------------------------

    def _commit_one_phase(self, branch: ExternalBranch) -> XACode:
        branch.next_state(Call.COMMIT_ONE_PHASE)
        if branch.state is BranchState.ROLLBACK_ONLY:
            self._drop(branch)
            raise XAError(XACode.XA_RBROLLBACK, "the branch was rolled back")
        if branch.state is BranchState.IN_DOUBT:
            return self._look_up(branch)
        branch.renew_deadline()
        try:
            if branch.messages:
                branch.homes.find(branch.messages)
                if branch.homes.others:
                    local_ending.commit_over_homes(branch.homes, branch.messages)
                else:
                    local_ending.commit(branch.homes, branch.messages)
        except RolledBackError as error:
            self._forget(branch)
            raise XAError(rolled_back_code(error), f"rolled back: {error}") from error
        except OutcomeUnknownError as error:
            branch.state = BranchState.IN_DOUBT
            raise XAError(XACode.XAER_RMFAIL, f"commit was not answered: {error}") from error
        except BaseException:
            branch.state = BranchState.IN_DOUBT
            raise
        self._forget(branch)
        return XACode.XA_OK

    def _look_up(self, branch: ExternalBranch) -> XACode:
        """Make the outcome of a one-phase commit that was not answered final, and return it."""
        branch.renew_deadline()
        with _as_xa():
            branch.homes.decider.begin()  # a commit that was interrupted may not have begun
            try:
                branch.homes.decider.rollback()
            except TransactionConflictError:
                branch.homes.commit_others()
                self._forget(branch)
                return XACode.XA_OK
        branch.homes.roll_back_others()
        self._forget(branch)
        raise XAError(XACode.XA_RBCOMMFAIL, "the commit never arrived: the branch is rolled back")

    def _resolve(self, txid: str, resolution: Resolution, contrary: XACode) -> list[PartResult]:
        with _as_xa():
            try:
                lines = resolve(self._home_of(txid), txid, resolution, self._timeout)
            except TransactionConflictError as error:
                raise XAError(contrary, f"the branch ended otherwise: {error}") from error
            except (FencedError, UnknownTransactionError) as error:
                raise XAError(XACode.XAER_NOTA, str(error)) from error
        crash_point("client.foreign.resolved")
        return lines

    def _tell(self, row: Row, resolution: Resolution) -> None:
        """Tell other homes of the resolution of what another process prepared; no outcome depends on it."""
        for txid in row.get("homes", ()):
            with suppress(TxmqError):
                body = () if resolution is Resolution.COMMIT else None
                self._home_of(txid).control.submit(resolution.value, txid, body=body, timeout=self._timeout)

    def _required_row(self, xid: Xid) -> Row:
        """The prepared branch.

        Raises:
            XAError: XAER_NOTA, or its heuristic outcome.
        """
        row = self._row(xid)
        if row is None:
            self._forget(self._branches.get(xid))
            raise XAError(XACode.XAER_NOTA, "no branch of that xid is prepared here")
        if row["state"] == "heuristic":
            self._forget(self._branches.get(xid))
            outcome = row["outcome"]
            raise XAError(_HEURISTICS.get(outcome, XACode.XA_HEURHAZ), f"an operator decided alone: {outcome}")
        return row

    def _known(self, xid: Xid) -> ExternalBranch:
        branch = self._branches.get(xid)
        if branch is None:
            raise XAError(XACode.XAER_NOTA, "no branch of that xid was begun here")
        return branch

    def _drop(self, branch: ExternalBranch) -> None:
        """End a branch that was never prepared; the broker knows at most parts streamed ahead."""
        local_ending.withdraw(branch.homes)
        self._forget(branch)

    def _refused(self, branch: ExternalBranch) -> None:
        """End a branch whose prepare was refused; parts at other homes may be prepared."""
        homes = branch.homes
        if homes.others and homes.decider.may_have_arrived:
            try:  # an attempt may have been executed, and committed since by another process
                homes.decider.rollback()
            except TxmqError:
                homes.leave_others()
        self._drop(branch)

    def _forget(self, branch: ExternalBranch | None) -> None:
        if branch is not None:
            branch.state = BranchState.ENDED
            self._branches.pop(branch.xid, None)
            branch.homes.leave_others()
            branch.homes.finished()

    def _row(self, xid: Xid) -> Row | None:
        """The branch, which one home has; any that does not answer may be that one."""
        with _as_xa():
            try:
                rows = self._rows({"xid": xid_text(xid)})
            except PartialResultError as error:
                rows = error.found
                if not rows:
                    raise
        return next(iter(rows), None)

    def _rows(self, words: dict[str, str] | None = None) -> list[Row]:
        """What every home lists.

        Raises:
            PartialResultError: some do not answer; it has what the others list.
            TxmqError: as of a request.
        """
        wanted: Wanted = {"state": "all", "limit": _RECOVER_LIMIT, **(words or {})}
        routes = self._client.routes
        return routes.ask_each(routes.all_links(), lambda home, wait_s: [*self._rows_of(home, wanted, wait_s)])

    def _rows_of(self, home: HomeLink, wanted: Wanted, wait_s: float) -> Iterator[Row]:
        timeout_s = self._timeout if self._client.routes.is_single_home else min(wait_s, self._timeout)
        return recover_rows(lambda page: home.control.repeat("recover", extensions=page, timeout=timeout_s), wanted)

    def _home_of(self, txid: str) -> HomeLink:
        return self._client.routes.link_of_home(TxId.parse(txid).home)


@contextmanager
def _as_xa() -> Iterator[None]:
    try:
        yield
    except _UNREACHABLE as error:
        raise XAError(XACode.XAER_RMFAIL, str(error) or type(error).__name__) from error
    except XAError:
        raise
    except TxmqError as error:
        raise XAError(XACode.XAER_RMERR, str(error) or type(error).__name__) from error


@contextmanager
def _absent_is_over() -> Iterator[None]:
    try:
        yield
    except UnknownTransactionError as error:
        raise XAError(XACode.XAER_NOTA, str(error)) from error


def _flag(flags: int, allowed: Sequence[XAFlag] | dict[XAFlag, Any]) -> XAFlag:
    if int(flags) & int(XAFlag.TMASYNC):
        raise XAError(XACode.XAER_ASYNC, "no asynchronous calls")
    for flag in allowed:
        if int(flags) == int(flag):
            return flag
    names = ", ".join(str(flag.name) for flag in allowed)
    raise XAError(XACode.XAER_INVAL, f"flags {int(flags):#x}: expected one of {names}")
