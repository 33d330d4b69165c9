"""The commit pipeline: which step the broker takes next, from the seal of a group to the release of the journal.

Theory of operation. A deterministic state machine without threads, event loop, clock or I/O. Its drivers are the server
(``broker/shell/server.py``), the crash images (``tools/images``) and the simulation (``tools/simulation``); they share
this loop and differ in where and when a step runs:

    while (step := pipeline.next_step(now)) is not None:
        step.run()                    # here, in a thread, or later
        pipeline.done(step, now)      # or failed(step, error, now)

```
 lane         steps
 JOURNAL      seal -> Append (write, sync) -> stable? -> answers ...      due before the next group: Release, Mark
 SYNC                 beside Appends that need no sync: Sync
 FILES                                                   ... Apply -> watermarks ...
 CHECKPOINT                                                              ... Checkpoint -> Release in the lane JOURNAL
```
One step at a time in each lane. *Stable* is the lsn up to which the journal can be lost no more (``_stable_lsn``).

Groups are sealed one after the other. Requests that arrive while the journal is busy make the next group: that is
group commit. Answers are released in ``done``; the driver hands them to the sockets before it asks for the next step,
which is then ``Apply``.

A checkpoint is taken between two requests, at any load: the group in the making is closed, the state after it is
copied, and the checkpoint belongs to the end of that group's record in the journal. It is written when everything
before that end is in the partition files.

Invariants:
    * append, sync, answer: an answer that tells of durable things is released when its record is *stable*, a relaxed
      one when it is written;
    * a broker that does not lead its home writes nothing of its own to the journal: a replica what its leader sends
      (``ReceivedGroup``), and its checkpoints belong where the leader took some;
    * the loop waits for no disk but for short syncs of the journal: ``thread`` of each step; what threads cannot keep
      up with holds back the next group;
    * files that applied groups let go of are removed before the next checkpoint;
    * only stable groups are applied, in the order of the journal; watermarks move after that; a read at the watermark
      of a partition waits for the stable groups that will move it, unless a full disk holds them up;
    * a checkpoint holds what stable, applied groups made, and nothing else;
    * no other step is in the journal while ``Sync`` is, but appends by the loop, of groups that need no sync and for
      which the file has room;
    * liveness: what is due goes before the next group (release, mark, sync), so that no load starves it. A sync is
      when ``journal_schedule`` says so, a mark at the latest ``MARK_BUSY_S`` after the last one;
    * a step that failed is the last one, except a checkpoint that lacks space or descriptors: the older one and the
      journal after it are whole, and it is tried again ``checkpointer.RETRY_S`` later; and a step that could not
      begin or recycle a file of the journal: it is handed out again ``JOURNAL_RETRY_S`` later, before any other there.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import TYPE_CHECKING, Final

from txmq.broker.commit.checkpointer import Checkpointer
from txmq.broker.commit.commit_group import CommitGroup, ReceivedGroup
from txmq.broker.commit.data_directory import PendingCheckpoint, Store, is_lacking
from txmq.broker.commit.journal_schedule import CommitDelay, JournalThread, SyncSchedule
from txmq.broker.commit.steps import (
    LOOP,
    Append,
    Apply,
    Checkpoint,
    JournalStep,
    Mark,
    Prepare,
    Remove,
    Step,
    StepThread,
    Sync,
)
from txmq.config import BrokerSettings
from txmq.model import Lsn
from txmq.redo.entries import FRAME_SIZE
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.ports import Clock

if TYPE_CHECKING:
    from txmq.broker.core import Core

INLINE_APPLY_SIZE_BYTES: Final = 1 << 20  # into the page cache
UNAPPLIED_BYTES_MAX: Final = 16 << 20  # stable groups that wait for partition files; then none is sealed
UNAPPLIED_GROUPS_MAX: Final = 1000
APPLY_RETRY_S: Final = 0.05
MARK_BUSY_S: Final = 1.0
JOURNAL_RETRY_S: Final = 1.0
CHECKPOINT_SIZE_BYTES: Final = FRAME_SIZE  # of its entry, in a record of its own
CHECK_S: Final = 0.05  # between two looks for a lacking journal file
RETRY_S: Final = 1.0


class CommitPipeline:
    """See the module's docstring. One thread at a time; steps may run in others.

    Attributes:
        journal_thread: which thread writes and syncs the journal.
        is_stopping: nothing waits for company or for a later sync any more.
        has_failed: a step failed; there is no next one.
    """

    # docs/benchmarks.md, "A lone put"
    __slots__ = (
        "_again_at",
        "_answers_before_sync",
        "_apply",
        "_apply_retry_at",
        "_checkpoint_due_lsn",
        "_checkpoints",
        "_clock",
        "_commit_delay",
        "_core",
        "_is_mark_wanted",
        "_is_marked",
        "_journal_step",
        "_last_write_at",
        "_look_at",
        "_mark_at",
        "_settings",
        "_stable",
        "_stable_bytes",
        "_stable_runs",
        "_store",
        "_sync_schedule",
        "_sync_step",
        "_unstable",
        "_upkeep",
        "has_failed",
        "is_stopping",
        "journal_thread",
    )  # fmt: skip

    def __init__(self, core: Core, store: Store, settings: BrokerSettings, clock: Clock) -> None:
        self._core, self._store, self._settings, self._clock = core, store, settings, clock
        self._answers_before_sync = settings.sync != "always"
        self._commit_delay = CommitDelay()
        self.journal_thread = JournalThread(store.journal, settings)
        self.is_stopping = self.has_failed = False
        self._journal_step: JournalStep | None = None
        self._sync_step: Sync | None = None
        self._unstable: deque[CommitGroup] = deque()  # sealed, oldest first
        self._sync_schedule = SyncSchedule(settings)
        self._is_mark_wanted = False
        self._stable: list[CommitGroup] = []  # answered, to be applied
        self._stable_bytes = self._stable_runs = 0
        self._apply: Apply | None = None
        self._apply_retry_at = inf  # finite while a full disk holds groups up
        self._again_at = inf  # finite while the step in the journal lacks descriptors, and waits
        self._upkeep = Upkeep(store, clock.monotonic())
        self._look_at = 0.0  # see ``_next_due``
        self._checkpoint_due_lsn = store.checkpoint_due_lsn
        self._is_marked = False  # the recovered tail is not
        self._checkpoints = Checkpointer(core, store, settings, clock)
        self._last_write_at = now = clock.monotonic()
        self._mark_at = now + MARK_BUSY_S

    # --- what drivers ask --------------------------------------------------------------------------------------------

    def next_step(self, now: float) -> Step | None:
        """The next step that may run alongside those under way; None if none is before ``done`` or a later time."""
        if self.has_failed:
            return None
        if (self._stable or now >= self._apply_retry_at) and self._apply is None:
            return self._next_apply()
        if (
            now >= self._look_at
            or self.is_stopping
            # Only the newest can be waited for after its seal (``Context.answer_from_state``, ``verbs/get.py``).
            or (self._unstable and (self._unstable[-1].needs_sync or self._unstable[-1].is_awaited))
        ) and (step := self._next_due(now)) is not None:
            return step
        if self._journal_step is not None:
            return self._journal_step_again() if now >= self._again_at else None
        group = self._core.next_group()
        return None if group is None else self._next_append(group, now)

    def _journal_step_again(self) -> Step | None:
        self._again_at, self._store.journal_lacking = inf, None
        return self._journal_step

    def _next_due(self, now: float) -> Step | None:
        """The step that goes before the next group. If there is none, ``_look_at`` is when time makes one due.

        What else can make something due sets ``_look_at`` to 0, or is asked for in ``next_step`` itself.
        """
        is_free = self._journal_step is None and self._sync_step is None
        if is_free and self._core.is_leading and self._checkpoints.pending is None and self._checkpoints.is_due(now):
            self._take_checkpoint(now)
        if (upkeep := self._upkeep.next_step(now, prepares=not self.is_stopping)) is not None:
            return upkeep
        if (checkpoint := self._next_checkpoint(now)) is not None:
            return checkpoint
        if is_free and (step := self._due_on_journal(now)) is not None:
            return step
        self._look_at = self._next_look() if is_free and self._checkpoints.pending is None else 0.0
        return None

    def _next_look(self) -> float:
        self._checkpoint_due_lsn = self._store.checkpoint_due_lsn
        if self._store.journal.next_lsn >= self._checkpoint_due_lsn:
            return 0.0  # put off for want of space
        mark_at = min(self._mark_at, self._last_write_at + self._settings.mark_idle_ms / 1000)
        return min(
            self._upkeep.look_at,
            self._sync_schedule.at,
            self._checkpoints.look_at,
            inf if self._is_marked else mark_at,
        )

    def wake_at(self) -> float:
        """When time alone makes a step due that a tick every 50 ms would be late for; infinite if nothing waits."""
        if self._journal_step is not None or self._sync_step is not None or self.has_failed:
            return inf
        delayable_until, sync_due_at = self._commit_delay.until, self._sync_schedule.at
        return delayable_until if delayable_until < sync_due_at else sync_due_at

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way, unstable or asked for. A full disk may still hold groups up."""
        return (
            self._journal_step is None
            and self._sync_step is None
            and self._apply is None
            and not (self._checkpoints.is_under_way or self._checkpoints.is_wanted)
            and not (self._unstable or self._stable or self._upkeep.is_removing)
            and self._core.next_group() is None
        )

    @property
    def checkpoint(self) -> PendingCheckpoint | None:
        """The copied state of the checkpoint that is under way."""
        return self._checkpoints.pending

    @property
    def oldest_unapplied(self) -> CommitGroup | None:
        """The oldest sealed group that is not in the partition files."""
        if self._apply is not None and self._apply.groups:
            return self._apply.groups[0]
        if self._stable:
            return self._stable[0]
        return self._unstable[0] if self._unstable else None

    def want_sync(self) -> None:
        """Sync as soon as the journal is free."""
        self._sync_schedule.is_wanted, self._look_at = bool(self._unstable), 0.0

    def want_checkpoint(self) -> None:
        """Take a checkpoint as soon as the journal is free, whether one is due or not; a full disk puts it off.

        A broker that does not lead its home takes none.
        """
        self._checkpoints.is_wanted, self._look_at = self._core.is_leading, 0.0

    def want_mark(self) -> None:
        """Write a mark as soon as the journal is free."""
        self._is_mark_wanted, self._look_at = True, 0.0

    # --- what drivers report -----------------------------------------------------------------------------------------

    def done(self, step: Step, now: float) -> None:
        """A step has run: release answers, move watermarks."""
        if isinstance(step, Append):
            self._journal_step = None
            self._appended(step, now)
            self._release_stable(is_all=step.syncs)
        elif isinstance(step, Apply):
            self._applied(step, now)
        else:
            self._look_at = 0.0
            self._done_beside(step, now)

    def _done_beside(self, step: Step, now: float) -> None:
        """A step has run that is not on the path of each group."""
        if isinstance(step, Sync):
            self._sync_step = None
            self._synced(step)
            self._release_stable(is_all=False)
        elif isinstance(step, JournalStep):
            self._journal_step = None
            self._journal_done(step)
        elif isinstance(step, Checkpoint):
            self._checkpoints.durable()
        else:
            self._upkeep.done(step, now)
            if isinstance(step, Remove) and self._apply_retry_at < inf:
                self._apply_retry_at = now  # there may be room

    def failed(self, step: Step, error: BaseException, now: float) -> bool:
        """A step raised. Whether the broker must end; else only this step is given up."""
        self._look_at = 0.0
        if is_lacking(error) and isinstance(step, Checkpoint | Prepare | Remove):
            if isinstance(step, Checkpoint):
                self._checkpoints.give_up(now)
            else:
                self._upkeep.failed(step, now)
            return False
        if step is self._journal_step and is_lacking(error) and not (self._store.journal.failed or self.is_stopping):
            assert isinstance(error, OSError)  # what lacks something
            # Nothing was written: it wanted to begin or to recycle a file. Nothing else goes before it.
            self._again_at, self._store.journal_lacking = now + JOURNAL_RETRY_S, error.with_traceback(None)
            return False
        self.has_failed = True
        return True

    # --- journal -----------------------------------------------------------------------------------------------------

    def _due_on_journal(self, now: float) -> JournalStep | None:
        """The step in the journal that goes before the next group."""
        if (release := self._checkpoints.next_release()) is not None:
            self._journal_step = release
        elif self._core.is_leading and (self._is_mark_wanted or (not self._is_marked and self._is_mark_due(now))):
            self._journal_step = Mark(self._store)
        elif self._unstable and (self.is_stopping or self._sync_schedule.is_due(now, self._unstable[-1])):
            self._sync_schedule.began()
            self._sync_step = Sync(self._store, self._clock)
            return self._sync_step
        return self._journal_step

    def _is_mark_due(self, now: float) -> bool:
        if now >= self._mark_at:
            return True
        is_quiet = (now - self._last_write_at) * 1000 >= self._settings.mark_idle_ms
        return is_quiet and not self._unstable and self._core.next_group() is None

    def _next_append(self, group: CommitGroup, now: float) -> Append | None:
        if self._apply is not None and self._is_behind:
            return None
        if group.delayable and not self.is_stopping and self._commit_delay.keeps(group, now):
            return None
        syncs = not self._answers_before_sync or group.needs_sync
        thread = self.journal_thread.choose(group.size_bytes, syncs, self._checkpoints.pending is not None)
        if self._sync_step is not None and (
            syncs
            or thread is not LOOP
            or not self._sync_schedule.may_follow(self._unstable[-1] if self._unstable else None)
        ):
            return None
        self._commit_delay.until = inf
        group = self._core.seal()
        self._unstable.append(group)
        crash_point("broker.put.accepted")
        self._journal_step = step = Append(self._store, thread, group, syncs, self._clock)
        return step

    def _journal_done(self, step: JournalStep) -> None:
        if isinstance(step, Mark):
            self._is_marked, self._is_mark_wanted = True, False
            self._upkeep.want_prepare()
        else:
            self._checkpoints.released()
        self._release_stable(is_all=step.syncs)

    def _synced(self, step: Sync) -> None:
        self._core.synced()
        self.journal_thread.synced(step.sync_ms)

    def _appended(self, step: Append, now: float) -> None:
        if step.syncs:
            self._synced(step)
        group = step.group
        group.end_lsn = end = self._store.journal.next_lsn
        if end >= self._checkpoint_due_lsn:
            self._look_at = 0.0
        self._last_write_at = now
        if self._is_marked:
            self._is_marked, self._mark_at, self._look_at = False, now + MARK_BUSY_S, 0.0
        self._checkpoints.written(group)
        if not step.syncs:
            self._core.written(group)
            self._sync_schedule.written(group, now)
            is_due = self._sync_schedule.is_due(now, group)
            self._look_at = 0.0 if is_due else min(self._look_at, self._sync_schedule.at)

    # --- answers -----------------------------------------------------------------------------------------------------

    def _stable_lsn(self) -> Lsn:
        """Up to where the journal can be lost no more: synced here. Replicas' acknowledgements will join in here."""
        return self._store.journal.durable_lsn

    def _release_stable(self, *, is_all: bool) -> None:
        stable_lsn, unstable = self._stable_lsn(), self._unstable
        while unstable and unstable[0].end_lsn <= stable_lsn:
            group = unstable.popleft()
            if self._answers_before_sync:
                self._core.written(group)
            self._core.durable(group)
            self._stable.append(group)
            self._stable_bytes += group.size_bytes
            self._stable_runs += len(group.placed)
            if group.is_checkpointed and isinstance(group, ReceivedGroup):
                self._checkpoints.take_folded(group)
                self._look_at = 0.0
        if is_all or not unstable:
            self._sync_schedule.began()

    # --- partition files ---------------------------------------------------------------------------------------------

    def _next_apply(self) -> Apply:
        # The loop itself if that waits for no disk: into the page cache, no file synced to close it for another.
        is_small = self._stable and self._stable_bytes <= INLINE_APPLY_SIZE_BYTES
        thread = LOOP if is_small and self._store.files.takes(self._stable_runs) else StepThread.FILES
        self._apply = step = Apply(self._store, thread, self._stable)
        self._stable, self._stable_bytes, self._stable_runs = [], 0, 0
        return step

    def _applied(self, step: Apply, now: float) -> None:
        self._apply = None
        for group in step.applied:
            self._core.applied(group)
            if group.unlinked or group.deleted:
                self._look_at = 0.0
        # Nothing was held up before, and everything is there: nothing is now.
        if self._apply_retry_at < inf or len(step.applied) < len(step.groups):
            applied = set(step.applied)
            for group in step.groups:
                if group not in applied:
                    self._core.put_off(group)
            self._apply_retry_at = now + APPLY_RETRY_S if self._store.has_unapplied else inf
            self._look_at = 0.0

    @property
    def _is_behind(self) -> bool:
        """Whether partition files are too far behind the journal."""
        return len(self._stable) >= UNAPPLIED_GROUPS_MAX or self._stable_bytes >= UNAPPLIED_BYTES_MAX

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def _take_checkpoint(self, now: float) -> None:
        if self._apply_retry_at < inf or not self._store.journal.may_append(CHECKPOINT_SIZE_BYTES):
            self._checkpoints.put_off(now)
        else:
            self._checkpoints.take(now)

    def _next_checkpoint(self, now: float) -> Checkpoint | None:
        """The step that writes the checkpoint, when everything before its place is applied and removed."""
        pending = self._checkpoints.pinned
        if pending is None:
            return None
        first = self.oldest_unapplied
        if first is not None and first.end_lsn <= pending.lsn:
            return None
        if self._apply_retry_at < inf or self._upkeep.is_held_up:
            self._checkpoints.give_up(now)
            return None
        return None if self._upkeep.is_removing else self._checkpoints.write(pending)


class Upkeep:
    """Work off the path of a group: files that go, and the next journal file ahead of need.

    No request waits for these steps but a checkpoint, which waits for removals. Whether a journal file is lacking is
    looked at now and then, not at each group, and not at once: a checkpoint that ends gives files back.

    Invariants:
        * one removal and one preparation at a time;
        * one that lacks space or descriptors is tried again ``RETRY_S`` later; meanwhile it holds nothing up.
    """

    def __init__(self, store: Store, now: float) -> None:
        self._store = store
        self._under_way: set[type[Step]] = set()
        self._prepare_at, self._is_prepare_wanted = now + CHECK_S, False
        self._remove_at = 0.0

    def next_step(self, now: float, *, prepares: bool) -> Step | None:
        """A step that is due, once; a broker that stops prepares nothing."""
        if Remove not in self._under_way and not self._store.removals.is_empty and now >= self._remove_at:
            return self._begin(Remove(self._store))
        if prepares and now >= self._prepare_at and Prepare not in self._under_way:
            self._prepare_at = now + CHECK_S
            if self._is_prepare_wanted or not self._store.journal.is_next_ready:
                self._is_prepare_wanted = False
                return self._begin(Prepare(self._store))
        return None

    @property
    def look_at(self) -> float:
        """When to ask ``next_step`` next, whatever happens until then but ``done``, ``failed`` and removals."""
        return self._prepare_at if self._store.removals.is_empty else 0.0

    def _begin(self, step: Step) -> Step:
        self._under_way.add(type(step))
        return step

    def want_prepare(self) -> None:
        """There is nothing else to do: look whether something can be prepared."""
        self._prepare_at, self._is_prepare_wanted = 0.0, True

    @property
    def is_removing(self) -> bool:
        """Whether files are yet to go, and are not lacking something."""
        return not self._store.removals.is_empty and not self.is_held_up

    @property
    def is_held_up(self) -> bool:
        """Whether the last removal failed, and waits."""
        return self._remove_at > 0.0 and not self._store.removals.is_empty

    def done(self, step: Step, now: float) -> None:
        """A step has run."""
        self._under_way.remove(type(step))
        if isinstance(step, Remove):
            self._remove_at = 0.0
        elif isinstance(step, Prepare) and not step.has_room:
            self._prepare_at = now + RETRY_S

    def failed(self, step: Step, now: float) -> None:
        """A step lacked space or descriptors."""
        self._under_way.remove(type(step))
        if isinstance(step, Remove):
            self._remove_at = now + RETRY_S
        else:
            self._prepare_at = now + RETRY_S
