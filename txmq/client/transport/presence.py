"""Whether a home answers, as far as its client knows.

A home that does not answer is *away*. A thread then looks at it again and again, so that no caller has to try: at once
after the first loss, then after a back-off that doubles up to ``LOOK_EVERY_S.most``, without chance. The thread ends
when the home is heard, or the client is closed.
"""

from __future__ import annotations

from collections.abc import Callable

from txmq.runtime.backoff import Backoff
from txmq.runtime.threads import Lock, Signal, start_daemon

LOOK_EVERY_S = Backoff(0.02, 1.0)


class Presence:
    """See the module's docstring.

    Args:
        look: asks the home; whether it answered. It takes a bounded time.

    Attributes:
        is_away: whether the home does not answer.
        is_watched: whether a thread is to look. A broker that is alone is looked at by its callers.

    Thread safety: any thread.
    """

    def __init__(self, look: Callable[[], bool]) -> None:
        self.is_away = self.is_watched = False
        self._look = look
        self._lock = Lock()
        self._watch: Signal | None = None  # ends the thread that looks
        self._closed = False

    def lost(self) -> None:
        """The home did not answer."""
        self.is_away = True
        if not self.is_watched or self._watch is not None:
            return
        with self._lock:
            if self._watch is not None or self._closed:
                return
            watch = self._watch = Signal()
        start_daemon("txmq-home", lambda: self._run(watch))

    def heard(self) -> None:
        """The home has answered."""
        if self.is_away:
            self.is_away = False
            self._end()

    def close(self) -> None:
        """Look no more."""
        self._closed = True
        self._end()

    def forked(self) -> None:
        """In a forked child, where no thread looks: forget what was known."""
        self._lock, self._watch, self.is_away = Lock(), None, False

    def _end(self) -> None:
        with self._lock:
            watch, self._watch = self._watch, None
        if watch is not None:
            watch.set()

    def _run(self, watch: Signal) -> None:
        pause_s = 0.0
        while not watch.wait(pause_s) and self._watch is watch:
            if self._look():
                self.heard()
            pause_s = LOOK_EVERY_S.following(pause_s)
