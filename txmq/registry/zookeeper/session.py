"""A session with a ZooKeeper ensemble, as a port: what the registry asks of ZooKeeper, and what it can rely on.

Theory of operation. ZooKeeper keeps a tree of small *nodes*. A node has a value and a version that grows with each
change of it. A write names the version that it expects, so that of two writers one fails. An *ephemeral* node ends with
its session. A session outlives a lost connection for the session timeout, and then *expires*.

Two implementations exist: ``kazoo_session`` talks to a real ensemble, ``tools.simulated.zookeeper`` is memory.
One script of operations on both has the same results (tests/services/registry).

Invariants:
    * a call returns, or raises, within the call timeout;
    * after ``NotConnectedError`` nothing was sent; after ``ConnectionLossError`` it is not known whether the call was
      carried out;
    * the calls of one session are carried out in their order. After a ``ConnectionLossError``, ``sync`` and then a read
      tell what became of the call: an ensemble carries out nothing late that came through a former connection;
    * a transaction is carried out as a whole, or nothing of it;
    * a watch is called once: at the next change, or when the connection is lost. In both cases its owner looks again;
    * listeners and watches are called in a thread that must not wait: they set a signal, and call no session.

Source: ZooKeeper Programmer's Guide, "ZooKeeper Sessions", "ZooKeeper Watches", "Consistency Guarantees".
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

from txmq.errors import TxmqError

ANY_VERSION: Final = -1  # 0 is a version: a node has it until its first change
REQUEST_SIZE_MAX: Final = 1_000_000  # an ensemble closes the connection at 1 MiB less one byte (jute.maxbuffer)


class SessionState(enum.Enum):
    """What a session knows of its ensemble."""

    CONNECTED = "connected"
    SUSPENDED = "suspended"  # the connection is lost; the session may live or not
    LOST = "lost"  # the session expired, and its ephemeral nodes are gone; the next connection has another session


class Stat(NamedTuple):
    """What ZooKeeper tells about a node."""

    version: int  # changes of the value
    child_version: int  # children made and removed
    children: int
    size_bytes: int
    created: int  # the change of the tree that made the node; a node made again has another one
    changed: int  # the change of the tree that last set the value
    owner: int  # the session of an ephemeral node; 0 for any other


class Node(NamedTuple):
    """A node's value, and what ZooKeeper tells about it."""

    value: bytes
    stat: Stat


class WatchEvent(NamedTuple):
    """Why a watch was called: ``created``, ``deleted``, ``changed``, ``children`` or ``disconnected`` (path empty)."""

    kind: str
    path: str


Watch = Callable[[WatchEvent], None]


class Create(NamedTuple):
    """Make a node; one of a sequence gets a number of ten digits after its name.

    ``is_public``: every client of the ensemble may read it, also where the session's credentials close what is made.
    """

    path: str
    value: bytes
    is_ephemeral: bool = False
    is_sequential: bool = False
    is_public: bool = False


class SetValue(NamedTuple):
    """Replace the value of the node, which must have the version."""

    path: str
    value: bytes
    version: int


class Delete(NamedTuple):
    """Remove the node, which must have the version and no children."""

    path: str
    version: int


class Check(NamedTuple):
    """Require that the node has the version."""

    path: str
    version: int


Operation = Create | SetValue | Delete | Check
Result = str | Stat | None  # of Create: the path; of SetValue: the node as it is now


class ZooKeeperError(TxmqError):
    """The ensemble refused a call; nothing was changed. ``registry`` turns it into an error of ``txmq.errors``."""


class NoNodeError(ZooKeeperError):
    """There is no node of that path, or no parent of a new node."""


class NodeExistsError(ZooKeeperError):
    """There is a node of that path."""


class BadVersionError(ZooKeeperError):
    """The node has another version: it was changed."""


class NotEmptyError(ZooKeeperError):
    """The node that should be removed has children."""


class EphemeralParentError(ZooKeeperError):
    """The parent is ephemeral, and such nodes have no children."""


class AccessDeniedError(ZooKeeperError):
    """The node's access list does not allow it: give the registry the credentials under which the nodes were made."""


class RequestTooLargeError(ZooKeeperError):
    """The call has more than ``REQUEST_SIZE_MAX`` bytes; an ensemble would close the connection. Nothing was sent."""


class ConnectionLossError(ZooKeeperError):
    """The connection was lost, or no answer came in time: it is not known whether the call was carried out."""


class NotConnectedError(ConnectionLossError):
    """There is no connection: nothing was sent."""


class Session(Protocol):
    """See the module's docstring. Paths begin with ``/`` and do not end with it. Thread-safe."""

    @property
    def number(self) -> int:
        """The session's number, as ``Stat.owner`` has it; 0 if there is none now."""

    @property
    def state(self) -> SessionState:
        """What is known at this moment."""

    def listen(self, listener: Callable[[SessionState], None]) -> None:
        """Have each change of the state told."""

    def wait_connected(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for a connection; whether there is one."""

    def create(
        self, path: str, value: bytes, *, is_ephemeral: bool = False, is_sequential: bool = False,
        is_public: bool = False,
    ) -> str:  # fmt: skip
        """Make a node; its path. See ``Create``.

        Raises:
            NodeExistsError, NoNodeError, EphemeralParentError, ConnectionLossError: as their names say.
        """

    def get(self, path: str, watch: Watch | None = None) -> Node:
        """A node. The watch is called at the next change of the value, or when the node is removed.

        Raises:
            NoNodeError, ConnectionLossError: as their names say; the watch is not kept.
        """

    def get_many(self, paths: Sequence[str]) -> list[Node | None]:
        """Many nodes in the time of one call or two, None for each that is not there. Not one moment's picture."""

    def exists(self, path: str, watch: Watch | None = None) -> Stat | None:
        """What is told about a node, None if there is none. The watch is called when it is made, changed or removed."""

    def children(self, path: str, watch: Watch | None = None) -> list[str]:
        """The sorted names of a node's children. The watch is called when one is made or removed, or the node is."""

    def set_value(self, path: str, value: bytes, version: int) -> Stat:
        """Replace a node's value; the node as it is now.

        Raises:
            BadVersionError, NoNodeError, ConnectionLossError: as their names say.
        """

    def delete(self, path: str, version: int) -> None:
        """Remove a node.

        Raises:
            BadVersionError, NoNodeError, NotEmptyError, ConnectionLossError: as their names say.
        """

    def transact(self, operations: Sequence[Operation]) -> list[Result]:
        """Carry out all operations, or none; there is one at least.

        Raises:
            ZooKeeperError: what the first operation that cannot be carried out would raise alone.
            ConnectionLossError: it is not known whether all or none of them were.
        """

    def sync(self, path: str) -> None:
        """Have reads after this call see every change that was made before it."""

    @property
    def has_credentials(self) -> bool:
        """Whether what this session makes is closed to clients without its credentials."""

    def shares_access(self, path: str) -> bool:
        """Whether the clients that may change the node may change what this session makes."""

    def close(self) -> None:
        """End the session: its ephemeral nodes are removed at once if the ensemble can be reached."""


def refuse_too_large(operations: Sequence[Operation]) -> None:
    """Refuse operations that do not fit into one request.

    Raises:
        RequestTooLargeError: they do not.
    """
    # 100: length words, version, flags and the one entry of the access list
    size = sum(len(operation[0]) + len(getattr(operation, "value", b"")) + 100 for operation in operations)
    if size > REQUEST_SIZE_MAX:
        raise RequestTooLargeError(f"{operations[0].path}: {size} bytes in one request, at most {REQUEST_SIZE_MAX}")
