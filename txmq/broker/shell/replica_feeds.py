"""Answers the replicas of this home: pieces of the journal, as soon as they are forced.

A question waits here until there is something to tell, or its time is over. What was written a moment ago is in the
page cache, and read at once; a thread reads all else, one piece at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from txmq.broker.commit.data_directory import Store
from txmq.broker.core import Core
from txmq.broker.state.followers import Follow
from txmq.broker.verbs import follow as verb
from txmq.errors import DivergedError
from txmq.redo.journal_reader import JournalReader, Place
from txmq.runtime.logging import get_logger

log = get_logger()


class ReplicaFeeds:
    """See the module's docstring. On the loop.

    Args:
        in_loop: calls in the event loop, from any thread.
        flush: hands answers to the sockets.
    """

    def __init__(self, core: Core, store: Store, in_loop: Callable[..., None], flush: Callable[[], None]) -> None:
        self._core, self._store, self._in_loop, self._flush = core, store, in_loop, flush
        self._thread = ThreadPoolExecutor(1, "txmq-replica")
        self._reader = JournalReader(store.disk)
        self._jobs = 0  # in the thread, which has the reader meanwhile

    def look(self) -> None:
        """The journal may have grown, or time has passed."""
        context, durable = self._core.context, self._store.journal.durable_lsn
        waiting, context.leader_lsn = context.followers.waiting, durable
        if not waiting:
            return
        context.followers.waiting = []
        for follow in waiting:
            if follow.client.gone and not follow.is_read:
                continue
            if not (follow.is_read or (follow.chain is None and follow.lsn >= durable)):
                if follow.chain is None and not self._jobs:
                    piece = self._reader.read_cached(follow.lsn, durable)
                    if piece:
                        verb.answered(context, follow, durable, piece)
                        continue
                follow.is_read = True
                self._jobs += 1
                job = self._thread.submit(self._read, follow, durable)
                job.add_done_callback(partial(self._in_loop, self._was_read, follow))
            elif not follow.is_read and (context.now_ms >= follow.until_ms or context.stopping):
                verb.answered(context, follow, durable, b"")
                continue
            context.followers.waiting.append(follow)

    def tick(self) -> None:
        """Time has passed: the journal is kept for replicas that were heard of."""
        context = self._core.context
        self._store.kept_from = context.followers.kept_from(context.now_ms)
        if not self._jobs and not context.followers.are_heard(context.now_ms):
            self._reader.close()  # its file may be released: the space of a name that is gone stays taken
        self.look()

    def close(self) -> None:
        """No more answers."""
        self._thread.shutdown(wait=False)

    def _read(self, follow: Follow, durable_lsn: int) -> bytes | None:
        """In the thread: the piece; None if the replica is no copy of this journal."""
        journal = self._store.journal
        if follow.chain is not None:
            chain = journal.chain  # first: it is appended to meanwhile, and a place from before is found in the file
            if not self._reader.follows(Place(follow.lsn, follow.chain), Place(journal.next_lsn, chain)):
                return None
        return self._reader.read(follow.lsn, durable_lsn) if follow.lsn < durable_lsn else b""

    def _was_read(self, follow: Follow, done: Future[bytes | None]) -> None:
        context, error = self._core.context, done.exception()
        self._jobs -= 1
        if error is None and not done.result() and done.result() is not None:
            follow.is_read, follow.chain = False, None  # it is a copy, and has everything
            self.look()
            return
        waiting = context.followers.waiting
        context.followers.waiting = [one for one in waiting if one is not follow]
        if error is not None:
            log.warning("a replica was not served", connection=follow.client.number, error=str(error))
            self._core.could_not(follow.client, follow.opaque, error)
        elif (piece := done.result()) is None:
            diverged = DivergedError(f"lsn {follow.lsn}: the journal of this home has no record that ends there so")
            self._core.could_not(follow.client, follow.opaque, diverged)
        else:
            verb.answered(context, follow, self._store.journal.durable_lsn, piece)
        self._flush()
