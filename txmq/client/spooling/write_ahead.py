"""An ordered producer that sends only what its spool has: messages and notes are stored together, or not at all.

Theory of operation. ``append`` writes batches for any partitions, and the caller's notes, in one synced transaction of
the spool. A caller that notes where it stands goes on there after a kill: no message is appended twice, and none is
left out. From the spool messages go out as those of every ordered producer do.

Nothing is sent before ``begin_sending``: the caller may first have to find out whether it may.

Invariants:
    * no message is sent directly, so that none can pass one in the spool;
    * a message that the broker refuses stays where it is, and those after it wait. ``refusal`` says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from txmq.client.partitioner import KeyHashSelector
from txmq.client.producer.core import Record, TopicRef
from txmq.client.spooling.ordered_producer import OrderedMessageProducer, OrderedOptions
from txmq.client.spooling.spool import INSERT, SIZE_BYTES_MAX, Entry, Spool, Ticket
from txmq.errors import StorageError, TransactionStateError
from txmq.model import SendResult, TopicPartition
from txmq.runtime.threads import Future

if TYPE_CHECKING:
    from txmq.client.client import Client

REFUSALS_MAX = 5  # of one message: then it counts as refused for good
_PAGE = 500
_NOTES = """
CREATE TABLE IF NOT EXISTS notes (name TEXT NOT NULL, number INTEGER NOT NULL, content BLOB NOT NULL,
  PRIMARY KEY (name, number))
"""
_NUMBERS = "SELECT (SELECT seq FROM sqlite_sequence WHERE name = 'batches'), (SELECT MIN(number) FROM batches)"


class SpoolBatch(NamedTuple):
    """An encoded batch of so many messages.

    Args:
        topic_id: of the topic that its partition was chosen for; 0 for any of that name.
    """

    partition: TopicPartition
    content: bytes
    messages: int
    topic_id: int


class Note(NamedTuple):
    """What the caller notes: it replaces the note of the same name and number."""

    name: str
    number: int
    content: bytes


class WriteAheadSpool(Spool):
    """A spool with notes, in which a refused batch stays, as those after it would pass it. Thread safety: as ``Spool``.

    Attributes:
        refusal: why a message cannot be sent, ever; None if there is none such.
    """

    parks_refused = False

    def __init__(self, path: str, *, size_bytes_max: int = SIZE_BYTES_MAX, read_only: bool = False) -> None:
        super().__init__(path, size_bytes_max=size_bytes_max, read_only=read_only)
        self.refusal: str | None = None
        if not read_only:
            try:
                with self._writing():
                    self._database.execute(_NOTES)
            except StorageError:
                self.close()
                raise

    @property
    def place(self) -> str:
        """Its absolute path."""
        return str(self.path.absolute())

    def append_all(
        self, batches: Sequence[SpoolBatch], now_ms: int, notes: Sequence[Note] = (), forgotten: Sequence[str] = ()
    ) -> None:
        """Add batches, replace notes, and drop the notes of some names: all of it, or nothing.

        Raises:
            SpoolFullError, StorageError: as ``wait_synced``.
        """
        size = sum(len(batch.content) for batch in batches)
        with self._lock:
            if batches and self._size_bytes + size > self.size_bytes_max:
                raise self._full(self._size_bytes, size)
            with self._transaction() as changes:
                self._database.executemany("DELETE FROM notes WHERE name = ?", [(name,) for name in forgotten])
                self._database.executemany("INSERT OR REPLACE INTO notes VALUES (?, ?, ?)", notes)
                self._database.executemany(INSERT, [_row(batch, now_ms) for batch in batches])
                changes.extend((batch.partition, batch.messages, len(batch.content)) for batch in batches)

    def notes(self, name: str) -> Iterator[bytes]:
        """The notes of a name, by their numbers."""
        number = -1
        while rows := self._rows(
            "SELECT number, content FROM notes WHERE name = ? AND number > ? ORDER BY number LIMIT ?",
            (name, number, _PAGE),
        ):
            for number, content in rows:  # noqa: B007  the next page begins after the last one
                yield content

    def numbers(self) -> tuple[int, int | None]:
        """The number of the batch that was added last, and of the oldest that waits."""
        ((last, oldest),) = self._rows(_NUMBERS, ())
        return last or 0, oldest

    def failed(self, entry: Entry, reason: str) -> None:
        super().failed(entry, reason)
        if entry.attempts + 1 >= REFUSALS_MAX:
            self._refuse(entry, reason)

    def park(self, entry: Entry, reason: str, *, renumber: bool) -> None:
        super().park(entry, reason, renumber=renumber)
        self._refuse(entry, reason)

    def _refuse(self, entry: Entry, reason: str) -> None:
        self.refusal = f"topic {entry.topic}, partition {entry.partition}: {reason}"


class WriteAheadProducer(OrderedMessageProducer):
    """See the module's docstring. Thread safety: any thread.

    Args:
        path: of the spool.
        options: ``attempts_max`` does not count: nothing refused is parked.

    Raises:
        DirectoryInUseError: another process has the spool.
        StorageError: the spool cannot be opened.
    """

    _sends = False
    _spool: WriteAheadSpool

    def __init__(self, client: Client, path: str, options: OrderedOptions) -> None:
        super().__init__(client, KeyHashSelector(), path, options)

    def _opened(self, spool: str, size_bytes_max: int) -> Spool:
        return WriteAheadSpool(spool, size_bytes_max=size_bytes_max)

    def send_to(self, partition: TopicPartition, record: Record, deadline: float, topic_ref: TopicRef) -> SendResult:
        raise TransactionStateError("this producer only appends to its spool")

    def send_to_async(
        self, partition: TopicPartition, record: Record, deadline: float, topic_ref: TopicRef
    ) -> Future[SendResult]:  # fmt: skip
        raise TransactionStateError("this producer only appends to its spool")

    def append(
        self, batches: Sequence[SpoolBatch], notes: Sequence[Note] = (), forgotten: Sequence[str] = ()
    ) -> None:  # fmt: skip
        """Store batches and notes, and drop the notes of some names: all of it, or nothing.

        Raises:
            SpoolFullError, StorageError: nothing was stored; or what is stored is not known, as the text says.
        """
        self._refuse_closed()
        self._spool.append_all(batches, self._client.clock.now_ms(), notes, forgotten)
        if self._sends:
            self._homes.wake()

    def begin_sending(self) -> None:
        """Send what is in the spool, and what is appended from now on."""
        self._sends = True
        self._homes.wake()

    def notes(self, name: str) -> Iterator[bytes]:
        """The notes of a name, by their numbers."""
        return self._spool.notes(name)

    def known(self, topic: str) -> TopicRef | None:
        """A topic as it was known the last time; None if it never was."""
        known = self._topics.get(topic)
        return None if known is None else known[0]

    def numbers(self) -> tuple[int, int | None]:
        """The number of the batch that was appended last, and of the oldest that waits; None: all are sent."""
        return self._spool.numbers()

    @property
    def refusal(self) -> str | None:
        """Why a message cannot be sent, ever; None if there is none such."""
        return self._spool.refusal

    @property
    def place(self) -> str:
        """The absolute path of the spool."""
        return self._spool.place

    @property
    def size_bytes(self) -> int:
        """The size of all batches in the spool."""
        return self._spool.size_bytes


def _row(batch: SpoolBatch, now_ms: int) -> tuple[object, ...]:
    return Ticket(batch.partition, batch.content, now_ms, None, batch.messages, batch.topic_id).row()
