"""What the parts of the registry share: the session, the paths, the tries, and the listeners."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from txmq.registry.cluster_metadata import Listener
from txmq.registry.zookeeper.attempts import Attempts
from txmq.registry.zookeeper.layout import Paths, decode_number
from txmq.registry.zookeeper.session import Node, NoNodeError, Operation, Session, SetValue, Watch, WatchEvent
from txmq.runtime.threads import Lock

_T = TypeVar("_T")


class Nodes:
    """The registry's nodes in one ensemble.

    Args:
        session: with the ensemble; the registry ends it.
        chroot: where the registry is in the tree: ``""``, or ``/prod``.
    """

    def __init__(self, session: Session, chroot: str = "") -> None:
        self._session = session
        self._paths = Paths(chroot)
        self._attempts = Attempts(session, self._paths.cluster)

    def close(self) -> None:
        """See ``Registry``."""
        self._session.close()

    def _find(self, path: str) -> Node | None:
        try:
            return self._session.get(path)
        except NoNodeError:
            return None

    def _counter(self, path: str) -> tuple[int, int]:
        """The number, and the node's version."""
        value, stat = self._session.get(path)
        return decode_number(path, value), stat.version

    def _raised(self, path: str, number: int) -> list[Operation]:
        """What raises a counter to that number; nothing if it is there."""
        last, version = self._counter(path)
        return [] if number <= last else [SetValue(path, b"%d" % number, version)]

    def _query_epochs(self) -> str:
        """The path of that counter, which is made if the cluster was founded before there was one."""
        path = self._paths.last_query_epoch
        if self._find(path) is None:
            self._session.create(path, b"0")
        return path

    def _draw(self, path: str, count: int, above: int) -> range:
        """Numbers above the counter and ``above``; the counter is raised to the last of them."""
        last, version = self._counter(path)
        first = max(last, above) + 1
        self._session.set_value(path, b"%d" % (first + count - 1), version)
        return range(first, first + count)


class Listeners:
    """Those that are told when one of some nodes changes; each node is watched once, however often it is read."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._watched: set[str] = set()
        self._waiting: list[Listener] = []

    def add(self, listener: Listener | None) -> None:
        """Tell the listener of the next change."""
        if listener is not None:
            with self._lock:
                self._waiting.append(listener)

    def read(self, path: str, read: Callable[[str, Watch | None], _T]) -> _T:
        """Read a node, or its children, and watch it from now on, if a listener waits."""
        with self._lock:
            is_new = bool(self._waiting) and path not in self._watched
            if is_new:
                self._watched.add(path)
        try:
            return read(path, self._watch(path) if is_new else None)
        except BaseException:
            if is_new:
                with self._lock:
                    self._watched.discard(path)
            raise

    def _watch(self, path: str) -> Watch:
        def watch(_event: WatchEvent) -> None:
            with self._lock:
                self._watched.discard(path)
                waiting, self._waiting = self._waiting, []
            for listener in waiting:
                listener()

        return watch
