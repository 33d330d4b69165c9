"""Where a consumer group's offsets are: the port and its values.

Theory of operation. The broker hands each partition to a member under a *generation*, a number that grows with each
change of ownership. An ``OffsetStore`` keeps the offsets: in the broker (the default), in the application's own
database, in a file, in ZooKeeper, or in a store of yours. The consumer's thread *loads* a partition when it is handed
over, and *saves* it every ``offset_save_interval`` and before it is handed on.

Invariants, which ``txmq.testing.OffsetStoreContract`` holds every store to:
    * loading fences: from its return on, nothing is saved under an older generation;
    * an offset is saved under the newest generation or not at all; a refused one changes nothing;
    * the next load finds what was saved, also in another process, with its texts about deferred messages and the log;
    * a store that cannot answer raises: it never says "nothing saved" for "not known".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from txmq.errors import StorageError, TxmqError
from txmq.model import TopicPartition
from txmq.runtime.threads import off_loop
from txmq.xa.database.dialects import Dialect
from txmq.xa.database.guarded_connection import GuardedConnection, in_its_thread
from txmq.xa.database.strand_connection import LoopConnection

T = TypeVar("T")
_orders = count(1)


class FrameworkConnection(ABC):
    """A connection that a framework holds for the application, in the transaction that the framework has open.

    ``txmq.sqlalchemy`` and ``txmq.django`` have one class each: statements go through the framework, which so begins
    its transaction, knows of its failures, and lets its own listeners see them. For ``dbapi.run``.

    Args:
        dialect: of the database.
        placeholder: how a parameter is written, whatever the driver's own way is.
        is_of_loop: its calls are awaited, in the strand that makes them.

    Thread safety: the framework's.
    """

    def __init__(self, dialect: Dialect, placeholder: str, *, is_of_loop: bool = False) -> None:
        self.dialect, self.placeholder, self.is_of_loop = dialect, placeholder, is_of_loop

    @abstractmethod
    def cursor(self) -> Any:
        """A cursor, as DB-API has it."""

    @abstractmethod
    def would_autocommit(self) -> bool:
        """Whether a statement would be committed by itself."""

    @abstractmethod
    def doom(self, error: BaseException) -> None:
        """See to it that the open transaction does not commit, whatever the application does."""


def is_of_loop(connection: Any) -> bool:
    """Whether the connection is used by the strands of its loop, each call in the caller's own task."""
    return isinstance(connection, LoopConnection) or (
        isinstance(connection, FrameworkConnection) and connection.is_of_loop
    )


def next_order() -> int:
    """The next ``OffsetPosition.order`` of this process."""
    return next(_orders)


def order_anew() -> None:
    """Begin with 1 again: a simulated history must not depend on those that its process has played before."""
    global _orders
    _orders = count(1)


class StoredOffset(NamedTuple):
    """What a store has of one partition.

    Attributes:
        offset: the next one to be consumed.
        deferred: the consumer's own text about deferred messages; the store does not read it.
        log: text, at most 2000 characters of ASCII, which says what log the offset counts in (``txmq.log.history``): of
            a topic that was made anew, or whose broker goes on from an older copy of its data directory, it is another
            one. The store does not read it. None: of the one that is there, unless the offset is beyond its end.
    """

    offset: int
    deferred: str | None = None
    log: str | None = None


class OffsetPosition(NamedTuple):
    """An offset to be saved.

    Attributes:
        generation: under which the partition was handed to the member that saves.
        offset: the next one to be consumed.
        deferred: as in ``StoredOffset``.
        order: grows with each look of this process at its offsets; for stores whose requests may be delayed.
        log: as in ``StoredOffset``.
    """

    slot: TopicPartition
    generation: int
    offset: int
    deferred: str | None = None
    order: int = 0
    log: str | None = None

    @property
    def stored(self) -> StoredOffset:
        """What the next load finds."""
        return StoredOffset(self.offset, self.deferred, self.log)


class OffsetStore(Protocol):
    """See the module's docstring. Called by one thread of the consumer at a time.

    Attributes:
        is_shared: other members of the group, on other hosts, find what this one saved. If they do not, the member is
            alone in its group: a second one is refused.
    """

    is_shared: bool

    def enter(self, group: str) -> None:
        """A consumer begins to use it.

        Raises:
            OffsetStoreAwayError: it does not answer: the consumer waits, and asks again.
            TxmqError: it cannot be used; the consumer is not made, or ends.
        """

    def load(self, group: str, slot: TopicPartition, generation: int) -> StoredOffset | None:
        """Fence earlier generations of a partition, then return what is saved.

        Returns:
            None if nothing was ever saved: the consumer's ``start`` applies.

        Raises:
            FencedError: a newer generation has loaded it.
            StorageError: it cannot be known now; asked again a moment later. ``OffsetStoreAwayError`` is one.

        Durability: the generation is, when this returns.
        """

    def save(self, group: str, positions: Sequence[OffsetPosition]) -> Collection[TopicPartition]:
        """Save each whose generation is the newest.

        Returns:
            Those that were refused: other members have their partitions.

        Raises:
            StorageError: some may be saved and some not; all are saved again later.

        Durability: what was not refused is saved when this returns.
        """

    def leave(self, group: str) -> None:
        """The consumer is closed."""


@runtime_checkable
class OffsetStoreOfMany(Protocol):
    """A store that loads many partitions with few requests."""

    def load_many(
        self, group: str, wanted: Sequence[tuple[TopicPartition, int]]
    ) -> Mapping[TopicPartition, StoredOffset | None]:
        """As ``load`` of each partition under its generation; those that a newer one has loaded are left out.

        Raises:
            StorageError: it cannot be known now, perhaps of one of them alone. Some may be fenced.
        """


@runtime_checkable
class OffsetStoreWithTransactions(Protocol):
    """A store in a database of the application: an offset can be saved in the application's own transaction there."""

    def connection_of(self, given: Any) -> Any:
        """What the application gives to ``ack``, as the calls below take it.

        Raises:
            ConfigError: it is nothing whose transaction this store knows.
        """

    def save_in(
        self, connection: Any, group: str, position: OffsetPosition, above: int | None, *,
        most: int | None = None, beside: StoredOffset | None = None,
    ) -> None:  # fmt: skip
        """Save in the transaction that the connection is in; nothing is committed here.

        What is saved by now, in this transaction or a committed one, must fit; None: whatever it is.

        Args:
            above: the offset must be above this one: else an earlier message's transaction was rolled back.
            most: it must not be above this one: else the message's transaction was committed all the same.
            beside: offset and text must be these: else the one of a message that was deferred was rolled back.

        Raises:
            FencedError: the generation is not the newest: the transaction is doomed.
            TransactionStateError: what is saved does not fit: doomed, too.
        """

    def doom(self, connection: Any, error: BaseException) -> None:
        """Make sure that the connection's transaction does not commit."""

    def saved(self, group: str, slot: TopicPartition) -> StoredOffset | None:
        """What is committed now, without waiting for a lock."""

    def settled(self, group: str, slot: TopicPartition, connection: Any = None) -> StoredOffset | None:
        """What is saved once every transaction that has saved there is over: committed or rolled back for good.

        Args:
            connection: as its transaction sees it, which is in nobody's way; None: committed.

        Raises:
            StorageError: one is not over yet.
        """


def called(call: Callable[[], T], connection: Any = None) -> T:
    """Call a store off the loop, and with a connection of the loop, or of a block, where that is used."""
    if is_of_loop(connection):
        return call()
    return in_its_thread(connection, call) if isinstance(connection, GuardedConnection) else off_loop(call)


def asked(ask: Callable[[], T], connection: Any = None) -> T:
    """As ``called``; an error that is not txmq's becomes a StorageError, so that no thread ends of it."""
    try:
        return called(ask, connection)
    except TxmqError:
        raise
    except Exception as error:
        raise StorageError(f"offset store: {error!r}") from error


Save = Callable[[Sequence[OffsetPosition]], Iterable[TopicPartition]]


class BrokerOffsetStore:
    """The default: the broker keeps the offsets, and sends them when it hands a partition over."""

    is_shared = True

    def __init__(self, save: Save) -> None:
        self._save = save
        self._found: dict[tuple[TopicPartition, int], StoredOffset | None] = {}

    def enter(self, group: str) -> None:
        """Do nothing: the member joins."""

    def handed_over(self, slot: TopicPartition, generation: int, found: StoredOffset | None) -> None:
        """Keep what the broker said with a partition; it has fenced earlier owners."""
        self._found[slot, generation] = found

    def load(self, group: str, slot: TopicPartition, generation: int) -> StoredOffset | None:
        """Return what came with the partition."""
        return self._found.pop((slot, generation))

    def save(self, group: str, positions: Sequence[OffsetPosition]) -> Collection[TopicPartition]:
        """Save all with one request. Durability: forced in the broker when this returns."""
        return set(self._save(positions))

    def leave(self, group: str) -> None:
        """Do nothing: the member leaves."""


class NoOffsetStore:
    """For a consumer without a group: saves nothing, and nothing is ever found."""

    is_shared = True

    def enter(self, group: str) -> None:
        """Do nothing."""

    def load(self, group: str, slot: TopicPartition, generation: int) -> StoredOffset | None:
        """Find nothing."""
        return None

    def save(self, group: str, positions: Sequence[OffsetPosition]) -> Collection[TopicPartition]:
        """Refuse nothing."""
        return ()

    def leave(self, group: str) -> None:
        """Do nothing."""
