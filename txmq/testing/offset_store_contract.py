"""The contract of every offset store, as tests to inherit: ``class TestMine(OffsetStoreContract)`` with ``open`` in it.

Each test stands for a way to lose or repeat messages. A store that passes can be given to ``client.consumer`` as
``offset_store=``. Run with pytest; nothing of pytest is needed here.

```python
class TestRedisOffsetStore(OffsetStoreContract):
    def open(self) -> OffsetStore:
        return RedisOffsetStore("redis://localhost")
```

``OffsetStoreWithTransactionsContract`` is for stores that save in the application's own transaction, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from txmq.client.consumer.offsets.offset_store import OffsetPosition, OffsetStore, StoredOffset
from txmq.errors import FencedError, StorageError, TransactionStateError
from txmq.model import TopicPartition

GROUP, OTHER_GROUP = "billing", "billing.other"
SLOT: TopicPartition = ("orders", 1)
OTHERS: tuple[TopicPartition, ...] = (
    ("orders", 11),
    ("orders", 0),
    ("Orders", 1),
    ("orders.1", 1),
    ("order_", 1),
    ("order-", 1),
)
NOBODYS: TopicPartition = ("nobody", 3)
WAIT_S = 60.0


def _refused(call: Callable[[], object], expected: type[Exception]) -> None:
    try:
        call()
    except expected:
        return
    raise AssertionError(f"expected {expected.__name__}")


class OffsetStoreContract:
    """See the module's docstring. Every test begins with a store that has nothing.

    Attributes:
        keeps_log: it keeps ``OffsetPosition.log``; the broker's own store has no need to.
    """

    keeps_log = True

    def open(self) -> OffsetStore:
        """The store as a member of the group has it; each call as another process would have it, over the same offsets.

        A store for a group of one, which no other member can open, answers the same object every time.
        """
        raise NotImplementedError

    def next_owner(self, slot: TopicPartition, group: str = GROUP) -> tuple[OffsetStore, int]:
        """Another member gets the partition: its store, and its generation, the next one. It has not loaded yet."""
        generations: dict[tuple[str, TopicPartition], int] = self.__dict__.setdefault("_generations", {})
        generations[group, slot] = generations.get((group, slot), 0) + 1
        return self.open(), generations[group, slot]

    def owner(self, slot: TopicPartition = SLOT, group: str = GROUP) -> tuple[OffsetStore, int]:
        """The same, loaded."""
        store, generation = self.next_owner(slot, group)
        store.load(group, slot, generation)
        return store, generation

    # --- what is saved is found --------------------------------------------------------------------------------------

    def test_where_nothing_was_saved_nothing_is_found(self) -> None:
        store, generation = self.next_owner(SLOT)
        assert store.load(GROUP, SLOT, generation) is None
        store, generation = self.next_owner(SLOT)
        assert store.load(GROUP, SLOT, generation) is None

    def test_the_next_owner_finds_what_the_one_before_saved_and_what_it_had_deferred(self) -> None:
        store, generation = self.owner()
        assert not store.save(GROUP, [OffsetPosition(SLOT, generation, 7, '[[3,1,null],"äöü 🦊"]')])
        store, generation = self.next_owner(SLOT)
        assert store.load(GROUP, SLOT, generation) == StoredOffset(7, '[[3,1,null],"äöü 🦊"]')

    def test_offset_zero_is_something_and_the_newest_one_counts(self) -> None:
        store, generation = self.owner()
        for offset, deferred in ((5, "x"), (0, None)):
            assert not store.save(GROUP, [OffsetPosition(SLOT, generation, offset, deferred)])
        store, generation = self.next_owner(SLOT)
        assert store.load(GROUP, SLOT, generation) == StoredOffset(0, None)

    def test_large_offsets_and_long_texts_fit(self) -> None:
        store, generation = self.owner()
        saved = StoredOffset((1 << 63) - 1, "x" * 65_536, "7" + ",0123456789abcdef:42" * 32 if self.keeps_log else None)
        assert not store.save(GROUP, [OffsetPosition(SLOT, generation, saved.offset, saved.deferred, log=saved.log)])
        store, generation = self.next_owner(SLOT)
        assert store.load(GROUP, SLOT, generation) == saved

    def test_saving_the_same_again_is_no_refusal(self) -> None:
        store, generation = self.owner()
        for _ in range(3):
            assert not store.save(GROUP, [OffsetPosition(SLOT, generation, 7)])

    def test_partitions_and_groups_do_not_mix(self) -> None:
        everything = [(GROUP, slot) for slot in (SLOT, *OTHERS)] + [(OTHER_GROUP, SLOT)]
        if not self.open().is_shared:
            everything = everything[:-1]
        for number, (group, slot) in enumerate(everything):
            store, generation = self.owner(slot, group)
            assert not store.save(group, [OffsetPosition(slot, generation, number + 1)])
        for number, (group, slot) in enumerate(everything):
            store, generation = self.next_owner(slot, group)
            assert store.load(group, slot, generation) == StoredOffset(number + 1), (group, slot)

    # --- generations -------------------------------------------------------------------------------------------------

    def test_who_was_fenced_saves_nothing(self) -> None:
        paused, old = self.owner()
        assert not paused.save(GROUP, [OffsetPosition(SLOT, old, 5)])
        _, new = self.owner()
        assert list(paused.save(GROUP, [OffsetPosition(SLOT, old, 9, "late")])) == [SLOT]
        again, generation = self.next_owner(SLOT)
        assert generation == new + 1
        assert again.load(GROUP, SLOT, generation) == StoredOffset(5)

    def test_loading_fences_also_where_nothing_was_saved(self) -> None:
        paused, old = self.owner()
        self.owner()
        assert list(paused.save(GROUP, [OffsetPosition(SLOT, old, 9)])) == [SLOT]
        store, generation = self.next_owner(SLOT)
        assert store.load(GROUP, SLOT, generation) is None

    def test_what_was_never_loaded_cannot_be_saved(self) -> None:
        store, generation = self.owner()
        assert list(store.save(GROUP, [OffsetPosition(SLOT, generation + 1, 9)])) == [SLOT]
        assert list(store.save(GROUP, [OffsetPosition(NOBODYS, generation, 9)])) == [NOBODYS]

    def test_of_several_positions_the_refused_ones_are_named_and_the_others_saved(self) -> None:
        other = OTHERS[1]
        _, old = self.owner()
        self.owner()
        store, generation = self.owner(other)
        positions = [OffsetPosition(SLOT, old, 3), OffsetPosition(other, generation, 4)]
        assert list(store.save(GROUP, positions)) == [SLOT]
        store, generation = self.next_owner(other)
        assert store.load(GROUP, other, generation) == StoredOffset(4)

    def test_what_the_new_owner_read_stays_true_while_the_old_one_saves_on(self) -> None:
        """The fence comes before the read: nothing of the old owner slips in between."""
        for _ in range(5):
            self._race()

    def _race(self) -> None:
        paused, old = self.owner()
        is_over, begun = threading.Event(), threading.Event()

        def save_on() -> None:
            offset = 0
            while not is_over.is_set():
                offset += 1
                if paused.save(GROUP, [OffsetPosition(SLOT, old, offset)]):
                    return
                begun.set()

        thread = threading.Thread(target=save_on, daemon=True)
        thread.start()
        try:
            begun.wait(WAIT_S)
            store, generation = self.next_owner(SLOT)
            found = store.load(GROUP, SLOT, generation)
            thread.join(WAIT_S)
        finally:
            is_over.set()
        assert not thread.is_alive()
        store, generation = self.next_owner(SLOT)
        assert store.load(GROUP, SLOT, generation) == found


class OffsetStoreWithTransactionsContract(OffsetStoreContract):
    """For a store with ``save_in``: ``connect`` is the application's connection, or its session; not in autocommit."""

    def connect(self) -> Any:
        """A connection of the application's own, to the same database."""
        raise NotImplementedError

    def with_transactions(self) -> tuple[Any, int]:
        """A store that owns the partition, and its generation."""
        return self.owner()

    def save_in(self, store: Any, given: Any, position: OffsetPosition, above: int | None, **named: Any) -> None:
        """As an acknowledgement does it."""
        store.save_in(store.connection_of(given), GROUP, position, above, **named)

    def test_what_is_saved_in_a_transaction_is_there_when_it_commits_and_not_before(self) -> None:
        store, generation = self.with_transactions()
        connection = self.connect()
        self.save_in(store, connection, OffsetPosition(SLOT, generation, 4, "w"), None)
        assert store.saved(GROUP, SLOT) is None
        connection.commit()
        assert store.saved(GROUP, SLOT) == StoredOffset(4, "w")

    def test_what_is_rolled_back_was_never_saved(self) -> None:
        store, generation = self.with_transactions()
        assert not store.save(GROUP, [OffsetPosition(SLOT, generation, 2)])
        connection = self.connect()
        self.save_in(store, connection, OffsetPosition(SLOT, generation, 4), None)
        connection.rollback()
        assert store.saved(GROUP, SLOT) == StoredOffset(2)

    def test_a_fenced_owners_transaction_cannot_commit(self) -> None:
        paused, old = self.with_transactions()
        assert not paused.save(GROUP, [OffsetPosition(SLOT, old, 2)])
        store, _ = self.with_transactions()
        connection = self.connect()
        _refused(lambda: self.save_in(paused, connection, OffsetPosition(SLOT, old, 9), None), FencedError)
        with suppress(Exception):
            connection.commit()
        assert store.saved(GROUP, SLOT) == StoredOffset(2)

    def test_the_next_owner_waits_for_the_transaction_of_the_one_before(self) -> None:
        paused, old = self.with_transactions()
        connection = self.connect()
        self.save_in(paused, connection, OffsetPosition(SLOT, old, 6), None)
        store, generation = self.next_owner(SLOT)
        _refused(lambda: store.load(GROUP, SLOT, generation), StorageError)  # not now: its row is locked
        connection.commit()
        assert store.load(GROUP, SLOT, generation) == StoredOffset(6)

    def test_an_offset_behind_one_that_was_rolled_back_is_refused(self) -> None:
        store, generation = self.with_transactions()
        connection = self.connect()
        self.save_in(store, connection, OffsetPosition(SLOT, generation, 1), None)
        connection.rollback()
        later = self.connect()
        _refused(lambda: self.save_in(store, later, OffsetPosition(SLOT, generation, 2), 0), TransactionStateError)
        assert store.saved(GROUP, SLOT) is None
        together = self.connect()
        self.save_in(store, together, OffsetPosition(SLOT, generation, 1), None)
        self.save_in(store, together, OffsetPosition(SLOT, generation, 2), 0)
        together.commit()
        assert store.saved(GROUP, SLOT) == StoredOffset(2)

    def test_a_message_whose_transaction_was_committed_after_all_is_refused(self) -> None:
        store, generation = self.with_transactions()
        unanswered = self.connect()
        self.save_in(store, unanswered, OffsetPosition(SLOT, generation, 6), None, most=5)
        unanswered.commit()
        again = self.connect()
        _refused(
            lambda: self.save_in(store, again, OffsetPosition(SLOT, generation, 6), None, most=5),
            TransactionStateError,
        )
        self.save_in(store, self.connect(), OffsetPosition(SLOT, generation, 7), 5, most=6)

    def test_what_goes_on_from_a_text_that_was_rolled_back_is_refused(self) -> None:
        store, generation = self.with_transactions()
        assert not store.save(GROUP, [OffsetPosition(SLOT, generation, 5, "3 is deferred")])
        following, dealt = OffsetPosition(SLOT, generation, 6), StoredOffset(5)
        connection = self.connect()
        self.save_in(store, connection, OffsetPosition(SLOT, generation, 5), None)
        connection.rollback()
        later = self.connect()
        _refused(lambda: self.save_in(store, later, following, 3, beside=dealt), TransactionStateError)
        assert store.saved(GROUP, SLOT) == StoredOffset(5, "3 is deferred")
        together = self.connect()
        self.save_in(store, together, OffsetPosition(SLOT, generation, 5), None)
        self.save_in(store, together, following, 3, beside=dealt)
        together.commit()
        assert store.saved(GROUP, SLOT) == StoredOffset(6)

    def test_what_is_settled_is_known_when_no_transaction_is_under_way_but_to_that_one_itself(self) -> None:
        store, generation = self.with_transactions()
        assert not store.save(GROUP, [OffsetPosition(SLOT, generation, 2)])
        for offset, ends in ((2, "rollback"), (4, "commit")):
            connection = self.connect()
            self.save_in(store, connection, OffsetPosition(SLOT, generation, 4, "w"), None)
            assert store.settled(GROUP, SLOT, store.connection_of(connection)) == StoredOffset(4, "w")
            _refused(lambda: store.settled(GROUP, SLOT), StorageError)
            getattr(connection, ends)()
            assert store.settled(GROUP, SLOT) == StoredOffset(offset, "w" if offset == 4 else None)
