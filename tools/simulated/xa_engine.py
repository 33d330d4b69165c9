"""Rows, locks and branches of the simulated database: the engine below its sessions.

Invariants:
    * a key that a transaction writes is locked until the transaction ends;
    * what a rollback of a prepared branch has undone is durable only after ``force``.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from tools.simulated.xa_answers import DUPID, DUPLICATE, LOCK_WAIT_TIMEOUT, SimulatedError
from txmq.xid import Xid

Key = tuple[str, object]  # table and primary key


class BranchState(enum.Enum):
    """States of a branch, by MariaDB's names."""

    ACTIVE = "ACTIVE"
    IDLE = "IDLE"
    PREPARED = "PREPARED"
    ROLLBACK_ONLY = "ROLLBACK ONLY"


class Work:
    """The writes of a transaction. Its keys are locked."""

    def __init__(self) -> None:
        self.rows: dict[Key, object] = {}
        self.removed: set[Key] = set()

    @property
    def has_written(self) -> bool:
        """Whether it has changed a row."""
        return bool(self.rows or self.removed)


class Branch(Work):
    """A branch that the server knows."""

    def __init__(self, xid: Xid, owner: object) -> None:
        super().__init__()
        self.xid, self.state = xid, BranchState.ACTIVE
        self.owner: object = owner  # its session; None once that has ended


class XAEngine:
    """One engine.

    Attributes:
        committed: the rows that readers see.
    """

    def __init__(self) -> None:
        self.committed: dict[Key, object] = {}
        self._branches: dict[tuple[bytes, bytes], Branch] = {}
        self._branches_rolled_back: list[Branch] = []  # rolled back since the log was forced

    def undurable_rollbacks(self) -> set[Xid]:
        """Branches that a crash now may bring back."""
        return {branch.xid for branch in self._branches_rolled_back}

    def prepared_xids(self) -> list[Xid]:
        """XA RECOVER."""
        return [branch.xid for branch in self._branches.values() if branch.state is BranchState.PREPARED]

    def insert(self, work: Work, key: Key, value: object) -> None:
        """A row, locked until the end of ``work``."""
        self._lock(work, key)
        if key in work.rows or (key in self.committed and key not in work.removed):
            raise SimulatedError(DUPLICATE, f"duplicate entry {key}")
        work.rows[key] = value

    def remove(self, work: Work, key: Key) -> bool:
        """Take a row away; whether it was there."""
        self._lock(work, key)
        if work.rows.pop(key, None) is not None and key not in self.committed:
            return True
        if key in work.removed or key not in self.committed:
            return False
        work.removed.add(key)
        return True

    def is_locked(self, work: Work, key: Key) -> bool:
        """Whether another transaction holds a key."""
        return any(key in other.rows or key in other.removed for other in self._works() if other is not work)

    def commit(self, work: Work) -> None:
        """Make durable and visible."""
        for key in work.removed:
            self.committed.pop(key, None)
        self.committed.update(work.rows)
        if work.has_written:
            self.force()

    def force(self) -> None:
        """The log is forced: what was rolled back stays rolled back."""
        self._branches_rolled_back.clear()

    def begin_branch(self, xid: Xid, owner: object) -> Branch:
        """Enter a branch into the list of known ones."""
        if key_of(xid) in self._branches:
            raise SimulatedError(DUPID, "XAER_DUPID")
        branch = self._branches[key_of(xid)] = Branch(xid, owner)
        return branch

    def end_branch(self, branch: Branch, *, is_commit: bool) -> None:
        """Commit or roll back; the branch is not known any more."""
        del self._branches[key_of(branch.xid)]
        if is_commit:
            self.commit(branch)
        elif branch.state is BranchState.PREPARED and branch.has_written:
            self._branches_rolled_back.append(branch)

    def external_branch(self, xid: Xid) -> Branch | None:
        """A prepared branch whose session has ended."""
        branch = self._branches.get(key_of(xid))
        return branch if branch is not None and branch.owner is None else None

    def _lock(self, work: Work, key: Key) -> None:
        if self.is_locked(work, key):
            raise SimulatedError(LOCK_WAIT_TIMEOUT, "lock wait timeout exceeded")

    def _works(self) -> Iterable[Work]:
        yield from self._branches.values()


def key_of(xid: Xid) -> tuple[bytes, bytes]:
    """The parts of an xid that tell branches apart."""
    return xid.gtrid, xid.bqual
