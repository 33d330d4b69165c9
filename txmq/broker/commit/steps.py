"""The steps of the commit pipeline: the I/O that the pipeline asks for and a driver carries out.

Theory of operation. ``CommitPipeline.next_step`` hands out a step; its driver runs it, all at once (``run``) or part by
part (``parts``; the simulation lets time pass between them), and reports it to ``done`` or ``failed``. ``thread`` says
where the server runs it; other drivers need not ask. A step touches the store and itself, never the core: its
results are in its attributes when it is done.

Invariants:
    * the parts of a step run in their order, and a part that raises is the last;
    * at most one ``JournalStep`` runs at a time, but for appends during a ``Sync``; besides it at most one each of
      ``Apply``, ``Checkpoint``, ``Remove`` and ``Prepare``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Final

from txmq.broker.commit.commit_group import CommitGroup
from txmq.broker.commit.data_directory import PendingCheckpoint, Store
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.ports import Clock

Part = Callable[[], None]
# Sleep of the thread that writes a checkpoint: without it, the event loop waits long for the interpreter's lock.
GIVE_WAY_S: Final = 0.0001


class StepThread(enum.Enum):
    """The thread in which the server runs a step."""

    LOOP = "loop"  # short enough that a hop to a thread would cost more
    WRITER = "writer"  # the one thread that may wait for the journal
    FILES = "files"  # the one that may wait for partition files
    HELPER = "helper"  # one that runs alongside both


LOOP: Final = StepThread.LOOP  # Python 3.11 looks a member up three times as long as a global name


class Step:
    """One piece of I/O; see the module's docstring. Inits call no ``super``: it would be called for each group."""

    __slots__ = ("store", "thread")

    def __init__(self, store: Store, thread: StepThread) -> None:
        self.store, self.thread = store, thread

    def parts(self) -> Sequence[Part]:
        """The calls of the step, in order."""
        raise NotImplementedError

    def run(self) -> None:
        """All parts."""
        for part in self.parts():
            part()


class JournalStep(Step):
    """A step that needs the journal for itself.

    Attributes:
        syncs: everything written is forced when it is done.
    """

    __slots__ = ("syncs",)

    def __init__(self, store: Store, thread: StepThread, *, syncs: bool) -> None:
        self.store, self.thread, self.syncs = store, thread, syncs


class Sync(JournalStep):
    """Force all that was appended before it runs; appends may go on meanwhile.

    Attributes:
        sync_ms: how long the sync took.
    """

    __slots__ = ("_clock", "sync_ms")

    def __init__(self, store: Store, clock: Clock) -> None:
        self.store, self.thread, self.syncs, self.sync_ms = store, StepThread.WRITER, True, 0.0
        self._clock = clock

    def parts(self) -> Sequence[Part]:
        """Sync."""
        return (self._sync,)

    def _sync(self) -> None:
        started = self._clock.monotonic()
        self.store.force()
        self.sync_ms = (self._clock.monotonic() - started) * 1000


class Append(Sync):
    """Append a group's record and, if it ``syncs``, force all that was appended."""

    __slots__ = ("group",)

    def __init__(self, store: Store, thread: StepThread, group: CommitGroup, syncs: bool, clock: Clock) -> None:
        self.store, self.thread, self.group, self.syncs, self.sync_ms = store, thread, group, syncs, 0.0
        self._clock = clock

    def parts(self) -> Sequence[Part]:
        """Write, sync."""
        return (self._write, self._sync) if self.syncs else (self._write,)

    def _write(self) -> None:
        self.store.write(self.group)


class Mark(JournalStep):
    """Force everything, and put on disk that it is forced."""

    __slots__ = ()

    def __init__(self, store: Store) -> None:
        super().__init__(store, StepThread.WRITER, syncs=True)

    def parts(self) -> Sequence[Part]:
        """Mark."""
        return (self.store.journal.mark,)


class Prepare(Step):
    """Make the next journal file ahead of need, and the ballast.

    Attributes:
        has_room: whether the disk had room for them.
    """

    __slots__ = ("has_room",)

    def __init__(self, store: Store) -> None:
        super().__init__(store, StepThread.HELPER)
        self.has_room = False

    def parts(self) -> Sequence[Part]:
        """Prepare."""
        return (self._prepare,)

    def _prepare(self) -> None:
        self.has_room = self.store.journal.prepare_next()


class Remove(Step):
    """Remove the files that applied groups let go of."""

    __slots__ = ()

    def __init__(self, store: Store) -> None:
        super().__init__(store, StepThread.HELPER)

    def parts(self) -> Sequence[Part]:
        """Remove."""
        return (self.store.removals.carry_out,)


class Release(JournalStep):
    """Let go of the journal that no kept checkpoint needs."""

    __slots__ = ("_pending",)

    def __init__(self, store: Store, pending: PendingCheckpoint) -> None:
        super().__init__(store, StepThread.WRITER, syncs=False)
        self._pending = pending

    def parts(self) -> Sequence[Part]:
        """Release."""
        return (self._release,)

    def _release(self) -> None:
        self.store.end_checkpoint(self._pending)


class Apply(Step):
    """Write forced groups to the partition files; without groups, try again what a full disk held up.

    Attributes:
        applied: groups that are in the files now, in order.
    """

    __slots__ = ("applied", "groups")

    def __init__(self, store: Store, thread: StepThread, groups: list[CommitGroup]) -> None:
        self.store, self.thread, self.groups = store, thread, groups
        self.applied: list[CommitGroup] = []

    def parts(self) -> Sequence[Part]:
        """Apply."""
        return (self._apply,)

    def _apply(self) -> None:
        if not self.groups:
            self.applied = self.store.apply_pending()
            return
        crash_point("broker.answers.sent")
        for group in self.groups:
            self.applied += self.store.apply(group)


class Checkpoint(Step):
    """Sync the partition files and write the checkpoint."""

    __slots__ = ("_clock", "_pending")

    def __init__(self, store: Store, pending: PendingCheckpoint, clock: Clock) -> None:
        super().__init__(store, StepThread.HELPER)
        self._pending, self._clock = pending, clock

    def parts(self) -> Sequence[Part]:
        """Sync, write."""
        return (self.store.sync_files, self._write)

    def _write(self) -> None:
        self.store.write_checkpoint(self._pending, self._give_way)

    def _give_way(self) -> None:
        self._clock.sleep(GIVE_WAY_S)
