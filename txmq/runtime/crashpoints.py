"""Named places at which a test can kill the process.

``crash_point(name)`` does nothing unless the environment variable ``TXMQ_CRASH`` was set when this module was
imported, or a hook is installed. ``TXMQ_CRASH=<point>:<nth>[:<mode>]`` acts when the point is reached the nth time
(from 1); modes are ``kill`` (SIGKILL to itself, the default), ``exit`` (exit status 86, no clean-up), ``stop`` (SIGSTOP
to itself), ``race:<file>`` (of several processes that were given the same file, the first one stops: it creates the
file, and the others go on) and ``sleep:<seconds>`` (a window for the test to do something). ``<point>><next>:<nth>``
acts at the first visit of ``next`` after the nth of ``point``: so what has many visits is met on one path. A process
that has acted and lives is not armed any more.

Invariants:

* every point used in the source stands in ``POINTS``, with one line that says what is on disk when it is reached;
* not armed, a point costs one function call and one test of a module variable.
"""

from __future__ import annotations

import difflib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final, NamedTuple

from txmq.errors import ConfigError

VARIABLE: Final = "TXMQ_CRASH"
EXIT_STATUS: Final = 86

POINTS: Final[Mapping[str, str]] = {
    "broker.put.accepted": "nothing of this put: it is in the journal buffer only",
    "journal.append.before": "nothing of this group",
    "journal.append.written": "the group's record is written, not forced: present, torn or absent after a power loss",
    "journal.sync.done": "the group's record is forced; nobody has been told",
    "broker.apply.before": "the journal record is forced; no partition file has it",
    "broker.apply.done": "the journal record is forced; the partition files have it, not forced",
    "broker.answers.sent": "the journal record is forced; the answers are in the socket",
    "checkpoint.before": "the older checkpoints and the journal since",
    "checkpoint.files_synced": "partition files are forced; the new checkpoint is not written",
    "checkpoint.payloads_written": "unsettled transactions' messages are in a forced file that no checkpoint names",
    "checkpoint.written": "the new checkpoint is forced with its entry; no journal file is released",
    "checkpoint.released": "the new checkpoint is forced; older journal files are recycled or gone",
    "segment.roll": "the journal record with the new segment's first batch is forced; its file does not exist",
    "retention.journaled": "the new log start is forced in the journal; the old segments are still there",
    "retention.unlinked": "the old segments are unlinked, their directory is not forced",
    "registry.cluster_taken": "registry: the cluster; the data directory has no identity",
    "registry.joined": "registry: the cluster; directory: this start, forced; no epoch is drawn for it",
    "registry.led": "registry: the home's epoch, drawn by this start; directory: the start, forced",
    "registry.topic_published": "registry: the epoch, this topic of the journal, others perhaps",
    "registry.query_published": "registry: the epoch, the journal's topics, the home of this query, others perhaps",
    "registry.users_published": "registry: the epoch, the journal's topics, queries and users; nobody was served",
    "registry.first_user_made": "registry: the first administrator, of a file; journal: nothing; nobody was served",
    "registry.entered": "registry: the journal's topics; journal: the epoch, forced; no leader is announced",
    "registry.topic_id_drawn": "registry: an id is drawn, no topic has it; journal: nothing",
    "registry.users_changed": "registry: users, grants or quotas as they were to be; journal: nothing of it",
    "registry.carried_out": "registry: what the broker asked for (topic, anchor, ...) is done; journal: nothing of it",
    "broker.branch.prepared": "branch home: nothing of this part; it is in the journal buffer only",
    "broker.branch.asks": "branch home: prepared, forced; deciding home: anything, its client said nothing here",
    "broker.branch.fences": "branch home: prepared, forced; deciding home: undecided a moment ago, its owner gone",
    "broker.branch.told_committed": "branch home: prepared, forced; deciding home: decided, forced, and has said so",
    "broker.branch.told_rolled_back": "branch home: prepared, forced; deciding home: rolled back, and has said so",
    "broker.branch.placed": "branch home: prepared, forced; its place is in the journal buffer only; decided elsewhere",
    "broker.branch.reports": "branch home: placed, forced; deciding home: decided, the branch incomplete",
    "broker.branch.ask_sent": "branch home: prepared or placed, forced; deciding home: was asked, or told, or not yet",
    "broker.branch.reported": "branch home: placed, forced, not noted as reported; deciding home: the branch complete",
    "broker.decision.prepared": "other homes: prepared; deciding home: nothing of this prepare but the journal buffer",
    "broker.decision.decided": "other homes: prepared; deciding home: the decision is in the journal buffer only",
    "broker.database.fenced": "database: a branch is prepared; broker: its fence is in the journal buffer only",
    "broker.outbox.page_taken": "database: the page is claimed; broker: chain and messages in the journal buffer only",
    "relay.claim.written": "database: the claim is written, not committed; broker: nothing of this page",
    "relay.claim.committed": "database: claimed, forced; broker: nothing of this page",
    "relay.page.prepared": "database: claimed; other homes: their parts prepared; anchor: nothing of this page",
    "relay.page.part_sent": "database: claimed; broker: parts of the page, without a decision",
    "relay.page.sent": "database: claimed; broker: the page or nothing, the answer on its way",
    "relay.page.taken": "database: claimed; broker: the page, forced; its rows are still there",
    "operator.settled": "broker: the claim is fenced; database: the lease is an operator's, nothing is adopted",
    "operator.adopted": "broker: the claim is fenced; database: all that waits is parked, not committed",
    "operator.released": "database: parked rows wait again, not committed",
    "operator.dropped": "database: parked rows are deleted, not committed",
    "broker.decision.awaits_place": "deciding home: a decision whose place waits is in the journal buffer only",
    "broker.decision.asked": "deciding home: anything; a branch home has asked and has no answer",
    "broker.decision.fenced": "deciding home: undecided, the rollback is in the journal buffer only; branch: prepared",
    "broker.decision.reported": "deciding home: decided, the report is in the journal buffer only; branch home: placed",
    "broker.decision.shows": "databases: every branch committed; deciding home: nobody of the other homes was told so",
    "client.homes.prepare_sent": "deciding home: nothing; this other home: prepared or nothing",
    "client.homes.prepared": "deciding home: nothing decided; this other home: prepared, forced, others perhaps",
    "client.homes.commit_sent": "decided, forced; this other home: prepared or placed, others perhaps",
    "client.homes.told": "decided, forced; this other home: placed, forced, and reported or not",
    "client.homes.rollback_sent": "deciding home: rolled back, or nothing; this other home: prepared, or nothing of it",
    "client.homes.rolled_back": "deciding home: rolled back, or nothing; this other home: rolled back, forced",
    "client.prepare.sent": "other homes: prepared, forced; deciding home: prepared (half, external branch) or nothing",
    "client.foreign.prepared": "every home: prepared, forced; the transaction manager was not told",
    "client.foreign.resolved": "deciding home: resolved, forced; other homes: prepared; the manager was not told",
    "client.tx.body_done": "database: uncommitted rows; broker: nothing",
    "client.tx.prepare_sent": "database: uncommitted rows; broker: prepared or nothing",
    "client.tx.prepared": "database: uncommitted rows; broker: prepared, forced",
    "client.tx.marker_inserted": "database: uncommitted rows and marker; broker: prepared or nothing",
    "client.tx.db_commit_sent": "database: committed with its marker, or nothing; broker: prepared",
    "client.tx.db_committed": "database: committed with its marker; broker: prepared",
    "client.tx.commit_sent": "database: committed with its marker; broker: prepared or committed",
    "client.tx.committed": "database: committed with its marker; broker: committed",
    "client.sink.branches_prepared": "a batch's rows for other homes: prepared there; the deciding home: nothing",
    "client.sink.decided": "the deciding home: the batch committed; other homes: their parts prepared",
    "client.xa.branch_started": "database: an empty branch, gone with its connection; broker: nothing",
    "client.xa.body_done": "databases: active branches, gone with their connections; broker: nothing, or parts",
    "client.xa.prepared": "databases: this branch prepared, others perhaps; broker: nothing, or streamed parts",
    "client.xa.all_prepared": "databases: every branch prepared; broker: nothing, or streamed parts",
    "client.xa.decide_sent": "databases: every branch prepared; broker: decided or nothing",
    "client.xa.decided": "databases: every branch prepared; broker: decided, forced; messages not visible",
    "client.xa.committed": "databases: this branch committed, others perhaps; broker: decided",
    "client.xa.all_committed": "databases: every branch committed; broker: decided, nothing complete",
    "client.xa.complete_sent": "databases: every branch committed; broker: decided, complete or not",
    "client.xa.fenced": "databases: some branch may be prepared; broker: rolled back, forced",
    "client.xa.rolled_back": "databases: this branch rolled back, others perhaps; broker: nothing, or rolled back",
    "client.half.prepared": "application: nothing; broker: the half message is prepared, forced",
    "client.half.decided": "application: its work is done, or is not; broker: the half message is prepared",
    "client.check.answered": "application: as its checker said; broker: the half message is prepared",
    "client.deferred.stored": "retry store: the message; broker: the group's offset is at or below it",
    "client.deferred.saved": "broker: the group's offset, with what is deferred; retry store: that, and former ones",
    "client.deferred.removed": "broker: the group's offset; retry store: no more than that names",
    "client.redrive.begun": "broker: the account says which dead letters a transaction will send; nothing of that",
    "client.redrive.sent": "broker: the messages of a redrive, and the account of them",
    "client.dead_letter.sent": "broker: the dead letter; the group's offset is below it, or names it as deferred",
    "client.ordered.sent": "spool: nothing of this message; broker: the message, or nothing",
    "client.ordered.spooled": "spool: the message, forced; broker: the message where it was sent before, or nothing",
    "client.ordered.pinned": "spool: the messages with their numbers, forced; broker: nothing of them",
    "client.ordered.flown": "spool: the messages with their numbers; broker: any front part of them",
    "client.ordered.answered": "spool: the messages with their numbers; broker: the answered ones, forced",
    "client.ordered.removed": "spool: nothing of the messages any more, forced; broker: the messages",
    "resolver.marker_inserted": "database: rolled-back marker committed; broker: prepared",
    "resolver.token_drawn": "database: a fencing token, after what it proves was seen; broker: knows the one before",
    "resolver.read_committed": "database: committed marker, seen and made durable; broker: prepared",
    "resolver.told_broker": "database: a marker; broker: settled the same way",
    "resolver.xa.committed": "databases: this branch committed, others perhaps; broker: decided, branch incomplete",
    "resolver.xa.completed": "databases: this branch committed, others perhaps; broker: this branch complete, forced",
    "resolver.xa.fenced": "databases: some branch prepared; broker: rolled back, forced",
    "resolver.xa.rolled_back": "databases: branches rolled back, not forced: they may come back; broker: rolled back",
    "binlog.positions.created": "broker: the topic of the positions, empty; nothing is published",
    "binlog.positions.begun": "broker: the first message of the positions, which names none; nothing is published",
    "binlog.topic.made": "broker: the topic of a table; of the changes that are gathered nothing",
    "binlog.snapshot.begun": "broker: the snapshot's first state, or nothing of one; nothing is read",
    "binlog.snapshot.viewed": "broker: the rows of former views; a view is open, and the binlog is published behind it",
    "binlog.snapshot.read": "broker: the rows of former chunks, perhaps not the last ones; a chunk is read",
    "binlog.snapshot.left": "broker: the rows of this view, perhaps not the last ones; the view has ended",
    "binlog.tx.filled": "broker: nothing of the batch",
    "binlog.tx.committed": "broker: the batch with its position, forced; the reader has not read that position",
    "binlog.position.read": "broker: the batch with its position, forced; the reader goes on behind it",
    "binlog.spool.appended": "spool: the batch with its position, synced; broker: perhaps none of it",
    "binlog.owner.taken": "broker: a position of this run, which names the spool; nothing of this run is sent",
    "binlog.owner.released": "broker: all changes, and a position without a spool; spool: empty, its notes are there",
    "binlog.apply.filled": "target: uncommitted rows with their partition's offset",
    "binlog.apply.committed": "target: the rows with their partition's offset; the consumer was not told",
    "binlog.ddl.marked": "target: the mark of a swap has its first name; the statement is not noted as begun",
    "binlog.ddl.begun": "target: the statement is noted as begun, with its tables' definitions; nothing of it was run",
    "binlog.ddl.run": "target: the statement was run; its offsets, and that it is done, are not saved",
    "binlog.ddl.noted": "target: the statement was run, with its offsets in all partitions; no partition has gone on",
    "audit.round.kept": "the dataset has the round's findings; nobody was told; follow.json: the round before",
    "audit.round.told": "the dataset has the round's findings, and they were told; follow.json: the round before",
    "audit.round.saved": "the dataset has the round's findings, and they were told; follow.json: this round",
}


class SimulatedCrash(BaseException):
    """Raised by a hook in place of the death of a process; not an error, so ``except Exception`` does not stop it."""


class _Plan(NamedTuple):
    point: str
    nth: int
    visits: Iterator[int]  # ``next`` is atomic: points are reached from the loop and from the writer thread
    act: Callable[[], None]


_armed = False
_plan: _Plan | None = None
_hook: Callable[[str], None] | None = None


def crash_point(name: str) -> None:
    """Mark a place where the process may die; ``name`` is one of ``POINTS``."""
    if _armed:
        _reached(name)


def is_armed() -> bool:
    """Whether any point may act: a caller may do in one step what a point would stand in the middle of."""
    return _armed


def set_hook(hook: Callable[[str], None] | None) -> None:
    """Call ``hook(name)`` at every point (simulation), or stop doing so. The hook may raise ``SimulatedCrash``."""
    global _armed, _hook
    _hook = hook
    _armed = hook is not None or _plan is not None


def _reached(name: str) -> None:
    if name not in POINTS:
        raise LookupError(f"crash point {name!r} is not declared in txmq/runtime/crashpoints.py")
    if _hook is not None:
        _hook(name)
    plan = _plan
    if plan is not None and plan.point == name and next(plan.visits) == plan.nth:
        _follow(None)
        plan.act()


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    # Until SIGCONT: others die meanwhile. A signal to the process may find another thread first, and this one goes on.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def _stop_first(file: str) -> None:
    try:
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return
    _stop()


def _exit() -> None:
    os._exit(EXIT_STATUS)


def _action(mode: str) -> Callable[[], None]:
    if mode in ("", "kill"):
        return _kill
    if mode == "exit":
        return _exit
    if mode == "stop":
        return _stop
    kind, _, rest = mode.partition(":")
    if kind == "race" and rest:
        return partial(_stop_first, rest)
    if kind == "sleep" and rest.replace(".", "", 1).isdecimal():
        return lambda: time.sleep(float(rest))
    raise ConfigError(f"{VARIABLE}: mode {mode!r} is not one of kill, exit, stop, race:<file>, sleep:<seconds>")


def _parse(text: str) -> _Plan:
    path, _, rest = text.partition(":")
    nth, _, mode = rest.partition(":")
    first, *others = path.split(">")
    for point in (first, *others):
        if point not in POINTS:
            nearest = difflib.get_close_matches(point, POINTS, n=1, cutoff=0)
            raise ConfigError(f"{VARIABLE}: no crash point {point!r}; the nearest is {nearest[0]!r}")
    if not (nth.isdecimal() and nth.isascii() and int(nth) >= 1):
        raise ConfigError(f"{VARIABLE}: {nth!r} is not the number, from 1, of a visit: use <point>:<nth>[:<mode>]")
    act = _action(mode)
    for point in reversed(others):
        act = partial(_follow, _Plan(point, 1, itertools.count(1), act))
    return _Plan(first, int(nth), itertools.count(1), act)


def _follow(plan: _Plan | None) -> None:
    global _armed, _plan
    _plan = plan
    _armed = plan is not None or _hook is not None


def arm(text: str | None) -> None:
    """Arm the points again as an import does: for a process forked from one that has imported it.

    Args:
        text: as in ``TXMQ_CRASH``; None disarms.

    Raises:
        ConfigError: no such point, number or mode.
    """
    _follow(_parse(text) if text else None)


arm(os.environ.get(VARIABLE))
