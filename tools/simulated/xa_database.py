"""A database server with XA transactions, simulated: MariaDB 10.11's answers and quirks, without a server.

Theory of operation. ``SimulatedXADatabase`` holds its sessions, committed rows and the branches it knows
(``xa_engine``). A session takes the calls that matter to a transaction manager (XA START, END, PREPARE, COMMIT,
ROLLBACK, RECOVER, INSERT, BEGIN, ...) and answers as MariaDB does, error numbers included. ``crash`` is a kill -9,
``start`` the restart. What a session writes is locked until its transaction ends; a lock that is held is an error at
once (1205), without a wait.

The quirks, each of them seen on the real server (tests/services/xa/test_simulated_xa.py compares every answer but the
last one's, which is a race):

    * a prepared branch survives its session and a crash; while its session lives it is listed, and not known to others;
    * on a connection that is not in autocommit, a branch that another one began cannot be ended (1400);
    * a statement that failed (1062, 1205) does not doom its branch; a deadlock's victim can only be rolled back;
    * a prepared branch without writes is listed, gone after a crash, and when its session has ended, a client that
      commits it or rolls it back gets 1402;
    * a rollback of a prepared branch is durable only when something else is forced after it: a crash before may bring
      the branch back, prepared. A commit and a prepare are durable when they are acknowledged;
    * gtrid and bqual tell branches apart, the format id does not;
    * an XA COMMIT that comes while the session of the branch's owner ends may be acknowledged without a commit: the
      branch is not listed any more, and stays prepared, with its locks, until a restart lists it again.

Invariants:
    * deterministic: no clock, no random numbers. What a crash brings back is the caller's choice;
    * one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count

from tools.simulated.xa_answers import (
    DEADLOCK,
    INVAL,
    LOCK_WAIT_TIMEOUT,
    LOST,
    NOTA,
    OUTSIDE,
    RB_ROLLBACK,
    RMFAIL,
    Fault,
    SimulatedError,
)
from tools.simulated.xa_engine import Branch, BranchState, Work, XAEngine, key_of
from txmq.xid import Xid


class SimulatedXADatabase(XAEngine):
    """One server.

    Attributes:
        fault: asked before each call of a session, with its name; tests and the simulation set it.
        survives: asked at a crash, for each rollback that nothing made durable, whether its branch comes back.
        ends_slowly: asked when a session with a prepared branch ends, whether it stays in the processlist until
            ``session_has_gone``.
        numbers: for words that nobody else has.
        loses_sight: asked at an XA COMMIT that meets such a session, whether it is acknowledged without a commit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fault: Callable[[SimulatedSession, str], Fault | None] = lambda _session, _call: None
        self.survives: Callable[[Xid], bool] = lambda _xid: True
        self.ends_slowly: Callable[[SimulatedSession], bool] = lambda _session: False
        self.loses_sight: Callable[[Xid], bool] = lambda _xid: False
        self.is_up, self.numbers = True, count(1)
        self._lost_sight_of: list[Branch] = []
        self._sessions: dict[int, SimulatedSession] = {}
        self._ending: dict[int, Xid] = {}  # sessions that have let go of their prepared branch
        self._last_number = 0

    def connect(self, *, autocommit: bool = False) -> SimulatedSession:
        """A new session.

        Raises:
            SimulatedError: the server is down.
        """
        if not self.is_up:
            raise SimulatedError(LOST, "cannot connect")
        self._last_number += 1
        session = self._sessions[self._last_number] = SimulatedSession(self, self._last_number, autocommit)
        return session

    def kill(self, number: int) -> bool:
        """End a session from outside; False if there is none."""
        session = self._sessions.get(number)
        if session is None:
            return False
        self.end_session(session)
        return True

    def is_in_transaction(self, number: int) -> bool:
        """Whether a session is there and in a transaction."""
        session = self._sessions.get(number)
        return session is not None and session.is_in_transaction

    def is_in_processlist(self, number: int) -> bool:
        """Whether a session is there, be it that it ends."""
        return number in self._sessions or number in self._ending

    def session_has_gone(self, number: int) -> None:
        """The end of a session that ends slowly."""
        self._ending.pop(number, None)

    def lost_sight_of(self) -> list[Xid]:
        """Branches that are prepared, and not listed before the next restart."""
        return [branch.xid for branch in self._lost_sight_of]

    def crash(self) -> None:
        """Kill -9. What was not durable is gone, except rolled-back branches that come back (``survives``)."""
        self.is_up = False
        for session in self._sessions.values():
            session.die()
        self._sessions.clear()
        for branch in self._branches_rolled_back:
            if self.survives(branch.xid):
                branch.state = BranchState.PREPARED
                self._branches[key_of(branch.xid)] = branch
        self._branches_rolled_back.clear()
        self._branches.update((key_of(branch.xid), branch) for branch in self._lost_sight_of)
        self._lost_sight_of.clear()
        self._ending.clear()
        prepared = {k: b for k, b in self._branches.items() if b.state is BranchState.PREPARED and b.has_written}
        for branch in prepared.values():
            branch.owner = None
        self._branches = prepared

    def start(self) -> None:
        """Serve again after a crash. Numbers of sessions begin anew."""
        self.is_up, self._last_number = True, 0

    # --- for sessions --------------------------------------------------------------------------------------------

    def commit_external(self, branch: Branch) -> None:
        """Commit a prepared branch whose session has ended, or is about to."""
        if branch.xid in self._ending.values() and branch.has_written and self.loses_sight(branch.xid):
            self._lost_sight_of.append(self._branches.pop(key_of(branch.xid)))
        else:
            self.end_branch(branch, is_commit=True)

    def end_session(self, session: SimulatedSession) -> None:
        """The session is over: roll back what is not prepared, let go of what is."""
        self._sessions.pop(session.number, None)
        branch = session.branch
        if branch is not None and branch.state is BranchState.PREPARED:
            branch.owner = None
            if self.ends_slowly(session):
                self._ending[session.number] = branch.xid
        elif branch is not None:
            self.end_branch(branch, is_commit=False)
        session.die()

    def _works(self) -> Iterable[Work]:
        yield from super()._works()
        yield from self._lost_sight_of
        yield from (session.local for session in self._sessions.values() if session.local is not None)


class SimulatedSession:
    """One connection. Every call may raise ``SimulatedError``; LOST once the session is over."""

    def __init__(self, database: SimulatedXADatabase, number: int, autocommit: bool) -> None:
        self.number, self.autocommit = number, autocommit
        self.branch: Branch | None = None
        self.local: Work | None = None  # a transaction that is not XA
        self._has_begun = False  # by BEGIN, not by a statement
        self._database, self._is_over, self._is_cut_off = database, False, False

    @property
    def is_in_transaction(self) -> bool:
        """Whether anything is open here."""
        return self.branch is not None or self.local is not None

    @property
    def is_over(self) -> bool:
        """Whether the session has ended."""
        return self._is_over

    def die(self) -> None:
        """The server has forgotten the session."""
        self._is_over, self.branch, self.local = True, None, None

    def close(self) -> None:
        """End the session; the server does not hear of it if its client is cut off."""
        if not (self._is_over or self._is_cut_off):
            self._database.end_session(self)

    def xa_start(self, xid: Xid) -> None:
        """XA START."""
        self._call("xa_start", lambda: self._xa_start(xid))

    def xa_end(self, xid: Xid) -> None:
        """XA END."""
        self._call("xa_end", lambda: self._xa_end(xid))

    def xa_prepare(self, xid: Xid) -> None:
        """XA PREPARE."""
        self._call("xa_prepare", lambda: self._xa_prepare(xid))

    def xa_commit(self, xid: Xid, *, one_phase: bool = False) -> None:
        """XA COMMIT [ONE PHASE]."""
        self._call("xa_commit", lambda: self._xa_commit(xid, one_phase))

    def xa_rollback(self, xid: Xid) -> None:
        """XA ROLLBACK."""
        self._call("xa_rollback", lambda: self._xa_rollback(xid))

    def xa_recover(self) -> list[Xid]:
        """XA RECOVER: all prepared branches of the server."""
        found: list[Xid] = []
        self._call("xa_recover", lambda: found.extend(self._database.prepared_xids()))
        return found

    def sees(self, number: int) -> bool:
        """Whether the processlist has a session."""
        found: list[bool] = []
        self._call("processlist", lambda: found.append(self._database.is_in_processlist(number)))
        return found[0]

    def begin(self) -> None:
        """BEGIN: commits what is open."""
        self._call("begin", self._begin)

    def commit(self) -> None:
        """COMMIT."""
        self._call("commit", lambda: self._end_local(is_commit=True))

    def rollback(self) -> None:
        """ROLLBACK."""
        self._call("rollback", lambda: self._end_local(is_commit=False))

    def insert(self, table: str, key: object, value: object = None) -> None:
        """INSERT one row."""
        self._call("insert", lambda: self._write(lambda work: self._database.insert(work, (table, key), value)))

    def remove(self, table: str, key: object) -> None:
        """DELETE one row, if it is there."""
        self._call("remove", lambda: self._write(lambda work: self._database.remove(work, (table, key))))

    def replace(self, table: str, key: object, before: object, after: object) -> bool:
        """UPDATE a row WHERE its value is this one, or (None) INSERT it in the place of none; whether it was so."""
        found: list[bool] = []
        self._call("replace", lambda: found.append(self._replace((table, key), before, after)))
        return found[0]

    def touch(self) -> None:
        """A small write of its own, committed: everything before it is durable."""
        self._call("touch", self._touch)

    def read(self, table: str, key: object) -> object:
        """A committed row's value, or this session's own; None without one. Waits for no lock."""
        found: list[object] = []
        work = self.branch or self.local or Work()
        self._call(
            "read", lambda: found.append(work.rows.get((table, key), self._database.committed.get((table, key))))
        )
        return found[0]

    def read_locked(self, table: str, key: object) -> object:
        """The same with a lock: 1205 if another transaction holds the row."""
        if self._database.is_locked(self.branch or self.local or Work(), (table, key)):
            raise SimulatedError(LOCK_WAIT_TIMEOUT, "lock wait timeout exceeded")
        return self.read(table, key)

    def become_deadlock_victim(self) -> None:
        """Roll back the transaction that a deadlock has chosen."""
        if self.branch is not None:
            self.branch.rows.clear()
            self.branch.removed.clear()
            self.branch.state = BranchState.ROLLBACK_ONLY
        self.local = None
        raise SimulatedError(DEADLOCK, "deadlock found")

    # --- what the calls do -------------------------------------------------------------------------------------------

    def _call(self, name: str, action: Callable[[], object]) -> None:
        if self._is_over or self._is_cut_off:
            raise SimulatedError(LOST, "lost connection")
        database = self._database
        fault = database.fault(self, name)  # which may take time
        if self._is_over:
            raise SimulatedError(LOST, "lost connection")
        if fault is Fault.CRASH_BEFORE:
            database.crash()
        elif fault is Fault.REQUEST_LOST:
            database.end_session(self)
        elif fault is Fault.CUT_OFF:
            self._is_cut_off = True
        else:
            try:
                action()
            finally:
                if fault is Fault.CRASH_AFTER:
                    database.crash()
                elif fault is Fault.REPLY_LOST:
                    database.end_session(self)
        if fault is not None:
            raise SimulatedError(LOST, "lost connection")

    def _xa_start(self, xid: Xid) -> None:
        self._refuse_in_xa()
        if self.local is not None:
            raise SimulatedError(OUTSIDE, "XAER_OUTSIDE")
        self.branch = self._database.begin_branch(xid, self)

    def _xa_end(self, xid: Xid) -> None:
        self._own(xid, BranchState.ACTIVE).state = BranchState.IDLE

    def _xa_prepare(self, xid: Xid) -> None:
        branch = self._own(xid, BranchState.IDLE)
        branch.state = BranchState.PREPARED
        if branch.has_written:
            self._database.force()

    def _own(self, xid: Xid, state: BranchState) -> Branch:
        if self.branch is None or self.branch.state is not state:
            raise SimulatedError(RMFAIL, "XAER_RMFAIL")
        if self.branch.xid != xid:
            raise SimulatedError(NOTA, "XAER_NOTA")
        return self.branch

    def _xa_commit(self, xid: Xid, one_phase: bool) -> None:
        branch = self.branch
        if branch is None or branch.xid != xid:
            self._end_foreign(xid, is_commit=True, one_phase=one_phase)
        elif branch.state is BranchState.ROLLBACK_ONLY:
            self._end_own(branch, is_commit=False)
            raise SimulatedError(RB_ROLLBACK, "XA_RBROLLBACK")
        elif branch.state is (BranchState.IDLE if one_phase else BranchState.PREPARED):
            self._end_own(branch, is_commit=True)
        elif one_phase and branch.state is BranchState.PREPARED:
            raise SimulatedError(INVAL, "XAER_INVAL")
        else:
            raise SimulatedError(RMFAIL, "XAER_RMFAIL")

    def _xa_rollback(self, xid: Xid) -> None:
        branch = self.branch
        if branch is None or branch.xid != xid:
            self._end_foreign(xid, is_commit=False, one_phase=False)
        elif branch.state is BranchState.ACTIVE:
            raise SimulatedError(RMFAIL, "XAER_RMFAIL")
        else:
            self._end_own(branch, is_commit=False)

    def _end_own(self, branch: Branch, *, is_commit: bool) -> None:
        self._database.end_branch(branch, is_commit=is_commit)
        self.branch = None

    def _end_foreign(self, xid: Xid, *, is_commit: bool, one_phase: bool) -> None:
        if not self.autocommit or self.branch is not None or self._has_begun:
            raise SimulatedError(OUTSIDE, "XAER_OUTSIDE")
        if one_phase:
            raise SimulatedError(INVAL, "XAER_INVAL")
        branch = self._database.external_branch(xid)
        if branch is None:
            raise SimulatedError(NOTA, "XAER_NOTA")
        if is_commit:
            self._database.commit_external(branch)
        else:
            self._database.end_branch(branch, is_commit=False)
        if not branch.has_written:
            raise SimulatedError(RB_ROLLBACK, "XA_RBROLLBACK")  # the engine had let go of it with its session

    def _begin(self) -> None:
        self._refuse_in_xa()
        self._end_local(is_commit=True)
        self.local, self._has_begun = Work(), True

    def _end_local(self, *, is_commit: bool) -> None:
        self._refuse_in_xa()
        local, self.local, self._has_begun = self.local, None, False
        if local is not None and is_commit:
            self._database.commit(local)

    def _touch(self) -> None:
        self._refuse_in_xa()
        self._database.force()

    def _replace(self, row: tuple[str, object], before: object, after: object) -> bool:
        if self._database.committed.get(row) != before:
            return False

        def write(work: Work) -> None:
            self._database.remove(work, row)
            self._database.insert(work, row, after)

        self._write(write)
        return True

    def _refuse_in_xa(self) -> None:
        if self.branch is not None:
            raise SimulatedError(RMFAIL, f"XAER_RMFAIL: {self.branch.state.value}")

    def _write(self, write: Callable[[Work], object]) -> None:
        if self.branch is not None:
            if self.branch.state is not BranchState.ACTIVE:
                raise SimulatedError(RMFAIL, f"XAER_RMFAIL: {self.branch.state.value}")
            write(self.branch)
        elif self.local is not None or not self.autocommit:
            self.local = self.local or Work()
            write(self.local)
        else:
            work = Work()
            write(work)
            self._database.commit(work)
