"""A consumer's way into its offset store: when it is made, or as soon as the store answers.

A member joins its group only after that: it could load nothing of the partitions that it would hold.
"""

from __future__ import annotations

from functools import partial

from txmq.client.consumer.offsets.offset_store import OffsetStore
from txmq.errors import OffsetStoreAwayError
from txmq.runtime.logging import Logger, Sparingly
from txmq.runtime.ports import Clock
from txmq.runtime.threads import Lock, new_lock, off_loop


class StoreEntry:
    """See the module's docstring. Thread safety: any thread.

    Args:
        store: None for the broker, which is entered by joining.
    """

    def __init__(self, store: OffsetStore | None, group: str, clock: Clock, log: Logger) -> None:
        self._store, self._group, self._log = store, group, log
        self._sparingly = Sparingly(log, clock)
        self._entering, self._lock = new_lock(), Lock()
        self._is_inside, self._is_over, self._has_waited = store is None, False, False

    def enter(self) -> bool:
        """Enter, if that is not done yet; False if the store does not answer now.

        Raises:
            TxmqError: the store cannot be used.
        """
        with self._entering:
            if self._is_inside or self._is_over or self._store is None:
                return self._is_inside
            try:
                off_loop(partial(self._store.enter, self._group))
            except OffsetStoreAwayError as error:
                self._has_waited = True
                self._sparingly.warning("the offset store does not answer: the consumer waits for it", error=str(error))
                return False
            with self._lock:
                self._is_inside = not self._is_over
        if not self._is_inside:  # closed meanwhile
            off_loop(partial(self._store.leave, self._group))
        elif self._has_waited:
            self._log.info("the offset store is there: the consumer goes on")
        return self._is_inside

    def leave(self) -> None:
        """Leave, once and for all; does not wait for a store that does not answer."""
        with self._lock:
            was_inside, self._is_inside, self._is_over = self._is_inside, False, True
        if was_inside and self._store is not None:
            off_loop(partial(self._store.leave, self._group))
