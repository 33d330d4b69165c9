"""``client.xa_resource()``: the broker as a resource of an external transaction manager (X/Open XA).

Theory of operation. Between ``start`` and ``end`` what the calling thread sends with a producer of this client joins
the branch. ``prepare`` forces its messages in the broker's journal, under a transaction id of ours that carries the
external xid; from then on any client's ``commit``, ``rollback``, ``recover`` and ``forget`` find it by its xid.
``commit`` and ``rollback`` look the xid up in the broker first, so that they are the same for the process that prepared
and for one that recovers.

If the messages are on several homes, one of them has the branch and its xid. What goes to the others is prepared there
first (``homes``); the resolution at the one home is that of all, and the others are told, or ask.

Calls answer an ``XACode`` or raise ``XAError`` with one, as the specification lists them. XAER_RMFAIL: the broker
cannot be reached; nothing is known, call again.

Invariants:
    * a branch that is not prepared is rolled back when the client goes away; a prepared one stays until it is resolved;
    * "not there" (XAER_NOTA) is answered only by the broker, or for a branch that never left this process;
    * a heuristic outcome is answered (XA_HEURCOM, XA_HEURRB) each time, until ``forget``.

Source: X/Open CAE Specification, The XA Specification, chapters 5 and 6.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from txmq.client.transaction import local_ending
from txmq.client.transaction.current import associate, associated_branch, current_transaction, dissociate, is_associated
from txmq.client.transaction.external_branch import (
    BranchState,
    Call,
    ExternalBranch,
    Row,
    checked_xid,
    listed_xid,
    rolled_back_code,
    xid_text,
)
from txmq.client.transaction.prepared import prepare, resolve
from txmq.client.transaction.refusals import LOST
from txmq.errors import (
    ClosedError,
    ConnectionLostError,
    FencedError,
    OutcomeUnknownError,
    PartialResultError,
    RequestTimeoutError,
    RolledBackError,
    TransactionConflictError,
    TransactionTimeoutError,
    TxmqError,
    UnavailableError,
    UnknownTransactionError,
    XAError,
)
from txmq.model import Resolution, TransactionKind
from txmq.protocol.transaction_parts import PartResult
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.threads import Lock
from txmq.xa.resolver_ports import Wanted, recover_rows
from txmq.xa.xopen import XACode, XAFlag
from txmq.xid import TxId, Xid

if TYPE_CHECKING:
    from txmq.client.client import Client
    from txmq.client.home_link import HomeLink

_UNREACHABLE = (ConnectionLostError, RequestTimeoutError, UnavailableError, ClosedError)
_RECOVER_LIMIT = 1000
_HEURISTICS = {"committed": XACode.XA_HEURCOM, "rolled-back": XACode.XA_HEURRB}
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
