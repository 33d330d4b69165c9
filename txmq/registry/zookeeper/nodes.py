"""What the parts of the registry share: the session, the paths, the tries, and the listeners.

A call is tried again until what came of it is known: after a lost connection, and after a lost race (``Attempts``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from txmq.errors import RegistryAwayError, RegistryConflictError, RegistryError
from txmq.registry.cluster_metadata import Listener
from txmq.registry.zookeeper.layout import Paths, decode_number
from txmq.registry.zookeeper.session import (
    AccessDeniedError,
    BadVersionError,
    ConnectionLossError,
    Node,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    Operation,
    RequestTooLargeError,
    Session,
    SetValue,
    Watch,
    WatchEvent,
    ZooKeeperError,
)
from txmq.runtime.threads import Lock

LOSSES_MAX: Final = 3  # lost connections in one call
RACES_MAX: Final = 50  # changes of others that came first
RECONNECT_TIMEOUT_S: Final = 5.0

_T = TypeVar("_T")
_RACES: Final = (BadVersionError, NodeExistsError, NoNodeError, NotEmptyError)


class Attempts:
    """Runs attempts on a session.

    Every attempt reads first: what it finds there tells whether the attempt before it was carried out.
    """

    def __init__(self, session: Session, cluster_path: str) -> None:
        self._session, self._path = session, cluster_path

    def run(self, attempt: Callable[[], _T]) -> _T:
        """The result of the first attempt that has one.

        Raises:
            RegistryAwayError: the connection is lost, or was lost again and again.
            RegistryConflictError: others were faster, again and again.
            RegistryError: the ensemble refused.
        """
        losses = races = 0
        is_node_missing = False
        while True:
            try:
                self._session.sync(self._path)
                if is_node_missing and self._session.exists(self._path) is None:
                    raise RegistryError(f"{self._path} is not in ZooKeeper: correct the address, or restore it")
                return attempt()
            except ConnectionLossError as error:
                losses += 1
                if losses > LOSSES_MAX or not self._session.wait_connected(RECONNECT_TIMEOUT_S):
                    raise RegistryAwayError(f"ZooKeeper does not answer ({error}); repeat when it is back") from error
            except _RACES as error:
                races += 1
                is_node_missing = isinstance(error, NoNodeError)
                if races > RACES_MAX:
                    raise RegistryConflictError(f"others were faster {races} times ({error}): repeat later") from error
            except ZooKeeperError as error:
                raise _refusal(error) from error


def _refusal(error: ZooKeeperError) -> RegistryError:
    if isinstance(error, AccessDeniedError):
        return RegistryError(f"ZooKeeper denies access ({error}): give the credentials under which the nodes were made")
    if isinstance(error, RequestTooLargeError):
        return RegistryError(f"too large for ZooKeeper ({error}): fewer partitions of one topic, or grants of one user")
    return RegistryError(f"ZooKeeper refuses: {error}")


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
