"""Which spool has the right to send a reader's changes: the positions in the broker say so.

Theory of operation. An ordered reader goes on from what its spool notes. Before it sends anything, it becomes the one
reader (``position_log``), and writes a position that names its spool. Such a position means: changes may be in that
spool, and nowhere else. So no other reader goes on from it. Each start is a *run*, and each position names the run that
wrote it. A spool notes its own run before it writes, and the runs of the positions that it may find then. A position of
another run says that another reader has gone on: a copy of the spool, or one that began anew. This one stops then.

While it runs, a thread writes where the reader is, for those that ask (``status``). A reader that ends in order with an
empty spool *releases* the positions: it writes one without a spool. From that one any reader goes on, in either mode.

Invariants:
    * nothing is sent before a position of this run holds;
    * the newest position is of a run that the spool notes, or this reader sends nothing;
    * a position is released if all that the reader has read is in the topics.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from txmq.binlog.config import BinlogSettings
from txmq.binlog.errors import BinlogError, ReaderFencedError
from txmq.binlog.publish.position_log import BrokerWait, PositionCommits, PositionLog, newest_position
from txmq.binlog.publish.published import Published, SpoolHeld
from txmq.client import Client
from txmq.client.spooling.write_ahead import Note, WriteAheadProducer
from txmq.runtime.caller import host_name
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.logging import get_logger
from txmq.runtime.threads import Signal, start_daemon

PUBLISHED, RUNS = "published", "runs"  # notes of the spool
RECORD_S = 1.0
END_S = 2.0


class SentEpochs:
    """How far the topics have all that the spool had. ``appended`` by one thread, ``newest`` by another one.

    A partition may be sent before another one. So what counts is the oldest batch that waits.
    """

    def __init__(self, producer: WriteAheadProducer) -> None:
        self._producer = producer
        self._waiting: deque[tuple[int, int]] = deque()  # the number of a batch, and the epoch that ends with it
        self._sent = 0

    def appended(self, epoch: int) -> None:
        """The spool has all up to an epoch, and nothing later."""
        self._waiting.append((self._producer.numbers()[0], epoch))

    def newest(self) -> int:
        """The newest epoch of which, and of those before, nothing waits; 0: none is known."""
        oldest = self._producer.numbers()[1]
        while self._waiting and (oldest is None or self._waiting[0][0] < oldest):
            self._sent = self._waiting.popleft()[1]
        return self._sent


class Ownership:
    """See the module's docstring. ``adopt`` and ``resume`` before ``hold``, ``release`` and ``close`` after ``end``.

    Args:
        sent: says how far the topics have what the spool had.
        run: names this start.
        is_stopped: the reader ends before it has begun.
    """

    def __init__(
        self, client: Client, settings: BinlogSettings, producer: WriteAheadProducer, sent: SentEpochs, run: str,
        is_stopped: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._sent = sent
        self._client, self._settings, self._producer, self._run = client, settings, producer, run
        self._is_stopped, self._is_abandoned, self._is_last = is_stopped, False, False
        self._wait = BrokerWait(client.clock, self._tries_once)
        self._commits = PositionCommits(client, settings.publish, self._wait, self._tries_once)
        self._path = producer.place
        self._log: PositionLog | None = None
        self._newest: Published | None = None
        self._runs: list[str] = []
        self._number, self._is_ours, self._is_held = 0, False, False
        self._end, self._ended = Signal(), Signal()

    def _ends_waits(self) -> bool:
        return self._is_abandoned or self._is_stopped()

    def _tries_once(self) -> bool:
        return self._is_last or self._ends_waits()

    # --- before ``hold`` ---------------------------------------------------------------------------------------------

    def adopt(self) -> Published | None:
        """Go on with a spool that notes nothing from the newest position; None if nothing ever was published.

        Raises:
            BinlogError: changes are elsewhere.
        """
        settings = self._settings
        # Before this one joins the group: a reader of the same machine would be taken for its former process, and end.
        self._wait.answer(lambda: refuse_spooled(settings, newest_position(self._client, settings)))
        newest = self._take()
        if self._ends_waits():
            return None
        refuse_spooled(settings, newest)
        if newest is not None and newest.parked:
            raise BinlogError(
                f"{settings.parked_topic} holds changes of prepared XA transactions: start with publish.mode = "
                f'"transactional" until they have ended: {", ".join(newest.parked)}'
            )
        self._runs = ["" if newest is None else newest.run, self._run]
        notes = [] if newest is None else [Note(PUBLISHED, 0, newest.to_json())]
        self._producer.append([], [*notes, self._noted_runs()])
        return newest

    def resume(self) -> None:
        """Go on with a spool that says what is published."""
        noted = next(self._producer.notes(RUNS), b"[]")
        self._runs = [*json.loads(noted), self._run]
        self._producer.append([], [self._noted_runs()])

    def _noted_runs(self) -> Note:
        return Note(RUNS, 0, json.dumps(self._runs).encode())

    def _take(self) -> Published | None:
        log = self._wait.answer(lambda: PositionLog(self._client, self._settings, self._ends_waits))
        self._log = log
        self._newest = self._wait.answer(log.take)
        return self._newest

    # --- the thread --------------------------------------------------------------------------------------------------

    def hold(self, current: Callable[[], Published], failed: Callable[[BaseException], None]) -> None:
        """Take the right to send, send, and write positions, on a thread of its own, until ``end``.

        Args:
            current: what is published, or in the spool.
            failed: called with what ends it.
        """
        self._is_held = True

        def work() -> None:
            try:
                self._work(current)
            except BaseException as error:  # noqa: BLE001  raised in the reader's thread
                failed(error)
            finally:
                self._ended.set()

        start_daemon("txmq-binlog-owner", work)

    def _work(self, current: Callable[[], Published]) -> None:
        if self._log is None:
            self._take()
        if self._ends_waits():
            return
        self._refuse_fenced()
        self._write(current(), is_released=False)
        crash_point("binlog.owner.taken")
        self._producer.append([], [Note(RUNS, 0, json.dumps([self._run]).encode())])
        self._is_ours = True
        self._producer.begin_sending()
        while not self._end.wait(RECORD_S):
            self.refuse_refused()
            published = current()
            assert self._newest is not None
            if (published.published_ms, self._spool_held()) != (self._newest.published_ms, self._newest.spool):
                self._write(published, is_released=False)

    def _refuse_fenced(self) -> None:
        newest = self._newest
        if ("" if newest is None else newest.run) not in self._runs:
            raise ReaderFencedError(
                f"another reader of {self._settings.name!r} has published since the spool {self._path} was "
                "used last: it is out of date, and nothing of it was sent. Delete it"
            )

    def refuse_refused(self) -> None:
        """Raise if the broker refuses what the spool has."""
        if (refusal := self._producer.refusal) is not None:
            raise BinlogError(
                f"the broker refuses what is to be published: {refusal}; it stays in {self._path}, and what "
                "is behind it waits"
            )

    def _write(self, published: Published, *, is_released: bool) -> None:
        assert self._log is not None
        self._number += 1
        spool = None if is_released else self._spool_held()
        # "o": the run's changes have other numbers
        sent = self._sent.newest()  # read after ``spool``: what is sent meanwhile changes that one
        written = replace(published, id=f"{self._run}-o{self._number}", spool=spool, sent=sent)
        self._commits.commit(self._log, "" if self._newest is None else self._newest.id, written, ())
        self._newest = written

    def _spool_held(self) -> SpoolHeld:
        producer, limit = self._producer, self._settings.publish.spool_bytes_max
        return SpoolHeld(host_name(), self._path, producer.spooled, producer.size_bytes, limit)

    # --- ends --------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """End the thread; nothing is published any more."""
        self._end.set()
        if self._is_held and not self._ended.wait(END_S):
            self._is_abandoned = True  # the broker is away
            self._ended.wait(END_S)

    @property
    def is_ours(self) -> bool:
        """Whether the spool is being sent."""
        return self._is_ours and not self._is_abandoned

    def release(self, published: Published) -> None:
        """Let any reader go on, if the spool is empty and this is the one reader.

        Raises:
            TxmqError: the broker is away; the positions stay the spool's.
        """
        if not self.is_ours or published.parked or self._producer.spooled:
            return
        self._is_last = True
        self._write(published, is_released=True)
        crash_point("binlog.owner.released")
        self._producer.append([], forgotten=[PUBLISHED, RUNS])
        get_logger().info("all that was read is published: any reader may go on", spool=self._path)

    def close(self) -> None:
        """Leave the group."""
        if self._log is not None:
            self._log.close()


def refuse_spooled(settings: BinlogSettings, newest: Published | None) -> None:
    """Raise if changes may be in a spool, and nowhere else."""
    if newest is not None and (spool := newest.spool) is not None:
        raise BinlogError(
            f"changes of {settings.name!r} may wait in the spool {spool.path} of {spool.host}: start the reader there, "
            'with that directory and publish.mode = "ordered". Any other one goes on when it has ended in order with '
            "an empty spool. If that disk is lost, so may be changes: begin anew with a snapshot, and before that "
            f"delete the topics {settings.position_topic} and {settings.parked_topic} and the group {settings.group}"
        )
