"""A ZooKeeper ensemble in memory, held to a real one call by call (tests/services/registry/test_simulated.py).

Theory of operation. ``SimZooKeeper`` has the tree and the sessions; ``SimSession`` is a client's. Everything happens
within the call: watches and listeners are called before it returns. A test says what is to fail: a session loses its
connection (``disconnect``) or its answer (``lose_next``), or expires (``expire``); it reads from a server that
lags behind (``lag``); the ensemble goes away (``is_reachable``), or the network to it (``is_cut_off``); another process
comes between two calls (``before_call``, ``before_change``, ``after_call``). A session that waits for its connection
gets one if the ensemble can be reached.

Left out: access lists, quotas, containers and nodes with a lifetime.

Source: ZooKeeper 3.9, ``PrepRequestProcessor`` (order of checks), ``DataTree`` (watches, versions of children).
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from txmq.registry.zookeeper.session import (
    ANY_VERSION,
    BadVersionError,
    Check,
    ConnectionLossError,
    Create,
    Delete,
    EphemeralParentError,
    Node,
    NodeExistsError,
    NoNodeError,
    NotConnectedError,
    NotEmptyError,
    Operation,
    Result,
    SessionState,
    SetValue,
    Stat,
    Watch,
    WatchEvent,
    ZooKeeperError,
    refuse_too_large,
)


@dataclass(slots=True)
class _SimNode:
    value: bytes
    created: int
    owner: int
    changed: int
    version: int = 0
    made: int = 0  # children ever made; numbers the children of a sequence
    children: int = 0

    def stat(self) -> Stat:
        # ZooKeeper counts the children made, and shows the changes: each one gone was a change, too.
        changes = 2 * self.made - self.children
        return Stat(
            self.version, changes, self.children, len(self.value), self.created, self.changed, self.owner
        )  # fmt: skip


Tree = dict[str, _SimNode]


class SimZooKeeper:
    """See the module's docstring.

    Attributes:
        is_reachable: whether sessions can connect.
        nodes: the tree.
    """

    def __init__(self) -> None:
        self.is_reachable = True
        self.lock = threading.RLock()
        self.nodes = {"/": _SimNode(b"", 0, 0, 0)}
        self._change = 0
        self._sessions: dict[int, SimSession] = {}
        self._last_session = 0

    def open(self) -> SimSession:
        """A new session, connected."""
        session = SimSession(self)
        session.connect()
        return session

    def begin_session(self, session: SimSession) -> int:
        """Give a session its number."""
        self._change += 1
        self._last_session += 1
        self._sessions[self._last_session] = session
        return self._last_session

    def has_session(self, number: int) -> bool:
        """Whether it has neither expired nor been closed."""
        return number in self._sessions

    def end_session(self, number: int) -> None:
        """The session expires, or is closed: its ephemeral nodes go."""
        self._change += 1
        self._sessions.pop(number, None)
        events: list[WatchEvent] = []
        for path in sorted(path for path, node in self.nodes.items() if node.owner == number):
            events += self._delete(path, ANY_VERSION)
        self._call_watches(events)

    # --- reads -------------------------------------------------------------------------------------------------------

    def picture(self) -> Tree:
        """A copy of the tree as it is now."""
        return {path: copy.copy(node) for path, node in self.nodes.items()}

    # --- writes ------------------------------------------------------------------------------------------------------

    def transact(self, owner: int, operations: Sequence[Operation]) -> list[Result]:
        """Carry out all operations, or none; then call the watches."""
        self._change += 1
        before = self.picture()
        events: list[WatchEvent] = []
        try:
            results = [self._apply(owner, operation, events) for operation in operations]
        except BaseException:
            self.nodes = before
            raise
        self._call_watches(events)
        return results

    def _apply(self, owner: int, operation: Operation, events: list[WatchEvent]) -> Result:
        match operation:
            case Create():
                return self._create(operation, owner, events)
            case SetValue(path, value, version):
                node = self._expect(path, version)
                node.value, node.version, node.changed = value, node.version + 1, self._change
                events.append(WatchEvent("changed", path))
                return node.stat()
            case Delete(path, version):
                events += self._delete(path, version)
            case Check(path, version):
                self._expect(path, version)
        return None

    def _create(self, operation: Create, owner: int, events: list[WatchEvent]) -> str:
        parent = _node(self.nodes, _parent(operation.path))
        path = f"{operation.path}{parent.made:010}" if operation.is_sequential else operation.path
        if path in self.nodes:
            raise NodeExistsError(path)
        if parent.owner:
            raise EphemeralParentError(path)
        parent.made += 1
        parent.children += 1
        owned_by = owner if operation.is_ephemeral else 0
        self.nodes[path] = _SimNode(operation.value, self._change, owned_by, self._change)
        events += [WatchEvent("created", path), WatchEvent("children", _parent(path))]
        return path

    def _delete(self, path: str, version: int) -> list[WatchEvent]:
        node = self._expect(path, version)
        if node.children:
            raise NotEmptyError(path)
        del self.nodes[path]
        self.nodes[_parent(path)].children -= 1
        return [WatchEvent("deleted", path), WatchEvent("children", _parent(path))]

    def _expect(self, path: str, version: int) -> _SimNode:
        node = _node(self.nodes, path)
        if version not in (ANY_VERSION, node.version):
            raise BadVersionError(path)
        return node

    def _call_watches(self, events: Sequence[WatchEvent]) -> None:
        for event in events:
            for session in list(self._sessions.values()):
                session.call_watches(event)


@dataclass(slots=True)
class _Watches:
    on_value: dict[str, list[Watch]] = field(default_factory=dict)
    on_children: dict[str, list[Watch]] = field(default_factory=dict)

    def take(self, event: WatchEvent) -> list[Watch]:
        taken: list[Watch] = []
        if event.kind != "children":
            taken += self.on_value.pop(event.path, [])
        if event.kind in ("children", "deleted"):
            taken += self.on_children.pop(event.path, [])
        return taken

    def take_all(self) -> list[Watch]:
        everything = [*self.on_value.values(), *self.on_children.values()]
        self.on_value, self.on_children = {}, {}
        return [watch for some in everything for watch in some]


class SimSession:
    """See ``txmq.registry.zookeeper.session.Session``, and the module's docstring.

    Attributes:
        before_call: what happens before each call is carried out.
        after_call: what happens after each call that was carried out.
        is_cut_off: the network between the session's process and the ensemble carries nothing.
        has_credentials: see ``Session``; no node is closed here.
        before_change: what happens before each call that changes something is carried out.
    """

    def __init__(self, ensemble: SimZooKeeper) -> None:
        self._ensemble = ensemble
        self._number = 0
        self._state = SessionState.LOST
        self.before_call: Callable[[], None] = _nothing
        self.after_call: Callable[[], None] = _nothing
        self.is_cut_off = False
        self.has_credentials = True
        self.before_change: Callable[[], None] = _nothing
        self._listeners: list[Callable[[SessionState], None]] = []
        self._watches = _Watches()
        self._picture: Tree | None = None  # what a server that lags behind has
        self._loss: bool | None = None  # whether the change is carried out whose answer is lost
        self._changes_before_loss = 0

    # --- what a test does to it --------------------------------------------------------------------------------------

    def disconnect(self) -> None:
        """The connection is lost; the session lives."""
        if self._state is SessionState.CONNECTED:
            self._become(SessionState.SUSPENDED)
            for watch in self._watches.take_all():
                watch(WatchEvent("disconnected", ""))

    def connect(self) -> None:
        """There is a connection again: with the same session, or with another one if that has ended."""
        if self._state is SessionState.SUSPENDED and not self._ensemble.has_session(self._number):
            self._become(SessionState.LOST)
        if self._state is SessionState.LOST:
            self._number = self._ensemble.begin_session(self)
        if self._state is not SessionState.CONNECTED:
            self._become(SessionState.CONNECTED)

    def expire(self) -> None:
        """The ensemble ends the session, and the client finds out at once."""
        self.disconnect()
        self._ensemble.end_session(self._number)
        self.connect()

    def lose_next(self, *, is_carried_out: bool, after: int = 0) -> None:
        """The connection is lost during a change that is asked for: after the change, or before it.

        Args:
            is_carried_out: whether the ensemble has carried it out.
            after: how many changes go well before.
        """
        self._loss = is_carried_out
        self._changes_before_loss = after

    @property
    def can_connect(self) -> bool:
        """Whether the ensemble can be reached from here."""
        return self._ensemble.is_reachable and not self.is_cut_off

    def lag(self) -> None:
        """The session's server stops hearing of changes, until ``sync`` or a change of the session's own."""
        self._picture = self._ensemble.picture()

    def call_watches(self, event: WatchEvent) -> None:
        """Something happened to a node."""
        if self._state is SessionState.CONNECTED:
            for watch in self._watches.take(event):
                watch(event)

    # --- the port ----------------------------------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """See ``Session``."""
        return self._number if self._state is SessionState.CONNECTED else 0

    @property
    def state(self) -> SessionState:
        """See ``Session``."""
        return self._state

    def listen(self, listener: Callable[[SessionState], None]) -> None:
        """See ``Session``."""
        self._listeners.append(listener)

    def wait_connected(self, timeout: float) -> bool:
        """See ``Session``; it takes no time."""
        if self.can_connect:
            self.connect()
        return self._state is SessionState.CONNECTED

    def create(
        self, path: str, value: bytes, *, is_ephemeral: bool = False, is_sequential: bool = False,
        is_public: bool = False,
    ) -> str:  # fmt: skip
        """See ``Session``."""
        [made] = self.transact([Create(path, value, is_ephemeral, is_sequential, is_public)])
        return str(made)

    def get(self, path: str, watch: Watch | None = None) -> Node:
        """See ``Session``."""
        with self._connected() as ensemble:
            node = _node(self._seen(ensemble), path)
            self._keep(self._watches.on_value, path, watch)
            return Node(node.value, node.stat())

    def get_many(self, paths: Sequence[str]) -> list[Node | None]:
        """See ``Session``."""
        return [None if self.exists(path) is None else self.get(path) for path in paths]

    def exists(self, path: str, watch: Watch | None = None) -> Stat | None:
        """See ``Session``."""
        with self._connected() as ensemble:
            self._keep(self._watches.on_value, path, watch)
            node = self._seen(ensemble).get(path)
            return None if node is None else node.stat()

    def children(self, path: str, watch: Watch | None = None) -> list[str]:
        """See ``Session``."""
        with self._connected() as ensemble:
            seen = self._seen(ensemble)
            _node(seen, path)
            self._keep(self._watches.on_children, path, watch)
            return sorted(name.rpartition("/")[2] for name in seen if name != "/" and _parent(name) == path)

    def set_value(self, path: str, value: bytes, version: int) -> Stat:
        """See ``Session``."""
        [stat] = self.transact([SetValue(path, value, version)])
        assert isinstance(stat, Stat)
        return stat

    def delete(self, path: str, version: int) -> None:
        """See ``Session``."""
        self.transact([Delete(path, version)])

    def transact(self, operations: Sequence[Operation]) -> list[Result]:
        """See ``Session``."""
        assert operations
        refuse_too_large(operations)
        with self._connected() as ensemble:
            self.before_change()
            self._catch_up()
            if self._loss is None or self._changes_before_loss > 0:
                self._changes_before_loss -= 1
                return ensemble.transact(self._number, operations)
            is_carried_out, self._loss = self._loss, None
            if is_carried_out:
                with suppress(ZooKeeperError):  # a refusal is an answer, too
                    ensemble.transact(self._number, operations)
            self.disconnect()
            raise ConnectionLossError(operations[0].path)

    def sync(self, path: str) -> None:
        """See ``Session``."""
        with self._connected():
            self._catch_up()

    def shares_access(self, path: str) -> bool:
        """See ``Session``."""
        return True

    def close(self) -> None:
        """See ``Session``."""
        if self._state is SessionState.CONNECTED:
            self._ensemble.end_session(self._number)
        self._become(SessionState.LOST)
        self._watches.take_all()

    # -----------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _connected(self) -> Iterator[SimZooKeeper]:
        self.before_call()
        has_ended = not self._ensemble.has_session(self._number)
        if self._state is SessionState.CONNECTED and (has_ended or not self.can_connect):
            self.disconnect()
            raise ConnectionLossError("the connection to ZooKeeper is lost")
        if self._state is not SessionState.CONNECTED:
            raise NotConnectedError("there is no connection to ZooKeeper")
        with self._ensemble.lock:
            yield self._ensemble
        self.after_call()

    def _seen(self, ensemble: SimZooKeeper) -> Tree:
        return ensemble.nodes if self._picture is None else self._picture

    def _catch_up(self) -> None:
        self._picture = None

    def _keep(self, kept: dict[str, list[Watch]], path: str, watch: Watch | None) -> None:
        if watch is not None:
            kept.setdefault(path, []).append(watch)

    def _become(self, state: SessionState) -> None:
        self._state = state
        for listener in self._listeners:
            listener(state)


def _parent(path: str) -> str:
    return path.rpartition("/")[0] or "/"


def _node(tree: Tree, path: str) -> _SimNode:
    found = tree.get(path)
    if found is None:
        raise NoNodeError(path)
    return found


def _nothing() -> None:
    """Nothing happens before a call."""
