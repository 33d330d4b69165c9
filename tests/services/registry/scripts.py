"""Scripts of calls, carried out on a real ensemble and on the simulated one; what came of each call is compared."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, Protocol

from tools.simulated.zookeeper import SimSession, SimZooKeeper
from txmq.addresses import Credentials
from txmq.registry.zookeeper.kazoo_session import KazooSession
from txmq.registry.zookeeper.session import (
    Check,
    Create,
    Delete,
    Operation,
    Session,
    SessionState,
    SetValue,
    Stat,
    WatchEvent,
    ZooKeeperError,
)
from txmq.testing.eventually import WITHIN_S, eventually
from txmq.testing.processes.zookeeper import ZooKeeper

SESSIONS = 3
PATHS = ("/a", "/a/b", "/a/c", "/a/b/d", "/e", "/e/f")
SEQUENCES = ("/a/s-", "/e/s-", "/s-")
VERSIONS = (-1, -1, 0, 0, 1, 2)


class World(Protocol):
    """An ensemble, and what can happen to a session."""

    def open(self) -> Session:
        """A new session."""

    def disconnect(self, session: Session) -> None:
        """Cut the session's connection; returns when it has another one."""

    def expire(self, session: Session) -> None:
        """End the session; returns when its client has another one."""

    def settle(self, session: Session) -> None:
        """Return when all watches that are due have been called."""


class SimWorld:
    """The simulated ensemble."""

    def __init__(self) -> None:
        self.ensemble = SimZooKeeper()

    def open(self) -> Session:
        """See ``World``."""
        return self.ensemble.open()

    def disconnect(self, session: Session) -> None:
        """See ``World``."""
        assert isinstance(session, SimSession)
        session.disconnect()
        session.connect()

    def expire(self, session: Session) -> None:
        """See ``World``."""
        assert isinstance(session, SimSession)
        session.expire()

    def settle(self, session: Session) -> None:
        """See ``World``; watches are called within the call."""


class RealWorld:
    """A real server."""

    def __init__(self, server: ZooKeeper) -> None:
        self.server = server

    def open(self, credentials: Credentials | None = None) -> KazooSession:
        """See ``World``."""
        return KazooSession(
            self.server.address, session_timeout_ms=20_000, call_timeout_ms=int(WITHIN_S * 1000),
            credentials=credentials,
        )  # fmt: skip

    def disconnect(self, session: Session) -> None:
        """See ``World``."""
        assert isinstance(session, KazooSession)
        suspended = threading.Event()
        session.listen(lambda state: suspended.set() if state is SessionState.SUSPENDED else None)
        _cut(session)
        assert suspended.wait(WITHIN_S)
        assert session.wait_connected(WITHIN_S)

    def expire(self, session: Session) -> None:
        """See ``World``."""
        assert isinstance(session, KazooSession)
        before = session.number
        self.server.expire(before, session.password)

        def is_renewed() -> bool:
            if session.number == before:  # it came back in the moment before the end, and would notice at its next ping
                _cut(session)
            return session.number not in (0, before)

        eventually(is_renewed, "another session")

    def settle(self, session: Session) -> None:
        """See ``World``: a server sends what is due before it answers; kazoo calls watches in a thread of their own."""
        assert isinstance(session, KazooSession)
        session.sync("/")
        called = threading.Event()
        session._client.handler.callback_queue.put(called.set)
        assert called.wait(WITHIN_S)


def _cut(session: KazooSession) -> None:
    """Cut the session's connection, as a network would."""
    with suppress(OSError, AttributeError):  # there is none at this moment
        session._client._connection._socket.shutdown(socket.SHUT_RDWR)


class Step(NamedTuple):
    """One call of one session."""

    session: int
    verb: str
    path: str = ""
    version: int = -1
    is_ephemeral: bool = False
    operations: tuple[Operation, ...] = ()


class Run:
    """Carries out a script below a node of its own.

    Attributes:
        trace: for each step what came of it, and which watches were called.
    """

    def __init__(self, world: World, base: str, sessions: int = SESSIONS) -> None:
        self.world, self.base = world, base
        self.sessions = [world.open() for _ in range(sessions)]
        self.trace: list[tuple[Step, object, list[str]]] = []
        self._events: list[str] = []
        self._value = 0
        self.sessions[0].create(base, b"")

    def close(self) -> None:
        """End the sessions."""
        for session in self.sessions:
            session.close()

    def carry_out(self, steps: list[Step]) -> None:
        """Carry out the steps, one by one."""
        for step in steps:
            came: object
            try:
                came = self._call(step)
            except ZooKeeperError as error:
                came = type(error).__name__
            for session in self.sessions:
                self.world.settle(session)
            self.trace.append((step, came, sorted(self._events)))
            self._events.clear()

    def tree(self) -> list[tuple[str, object]]:
        """All nodes below the base as they are now; changes of the tree are told by their order."""
        found: dict[str, tuple[bytes, Stat]] = {}
        waiting = [self.base]
        while waiting:
            path = waiting.pop()
            value, stat = self.sessions[0].get(path)
            found[path] = value, stat
            waiting += [f"{path}/{name}" for name in self.sessions[0].children(path)]
        changes = sorted({change for _, stat in found.values() for change in (stat.created, stat.changed)})
        return [
            (
                path.removeprefix(self.base),
                (value, self._known(stat), *map(changes.index, (stat.created, stat.changed))),
            )
            for path, (value, stat) in sorted(found.items())
        ]

    def _call(self, step: Step) -> object:
        session, path = self.sessions[step.session], self.base + step.path
        self._value += 1
        value = b"value %d" % self._value
        calls: dict[str, Callable[[], object]] = {
            "create": lambda: session.create(path, value, is_ephemeral=step.is_ephemeral),
            "next": lambda: session.create(path, value, is_ephemeral=step.is_ephemeral, is_sequential=True),
            "get": lambda: session.get(path),
            "watch": lambda: session.get(path, self._watch(step)),
            "exists": lambda: session.exists(path, self._watch(step)),
            "children": lambda: session.children(path, self._watch(step)),
            "many": lambda: session.get_many([self.base + each for each in PATHS]),
            "set": lambda: session.set_value(path, value, step.version),
            "delete": lambda: session.delete(path, step.version),
            "transact": lambda: session.transact([_below(self.base, each) for each in step.operations]),
            "disconnect": lambda: self.world.disconnect(session),
            "expire": lambda: self.world.expire(session),
        }
        return self._comparable(calls[step.verb]())

    def _watch(self, step: Step) -> Callable[[WatchEvent], None]:
        number = len(self.trace)

        def watch(event: WatchEvent) -> None:
            self._events.append(f"step {number}, {step.verb} {step.path}: {event.kind} {event.path[len(self.base) :]}")

        return watch

    def _comparable(self, came: object) -> object:
        if isinstance(came, Stat):
            return self._known(came)
        if isinstance(came, str):
            return came.removeprefix(self.base)
        if isinstance(came, list | tuple):
            return [self._comparable(each) for each in came]
        return came

    def _known(self, stat: Stat) -> tuple[object, ...]:
        numbers = [session.number for session in self.sessions]
        owner = numbers.index(stat.owner) if stat.owner in numbers else stat.owner
        return (*stat[:4], stat.created == stat.changed, owner)


def _below(base: str, operation: Operation) -> Operation:
    return operation._replace(path=base + operation.path)


def drawn(seed: int, length: int) -> list[Step]:
    """A script drawn at random; the same for the same seed."""
    draw = random.Random(seed)
    return [_step(draw) for _ in range(length)]


def _step(draw: random.Random) -> Step:
    session, path, version = draw.randrange(SESSIONS), draw.choice(PATHS), draw.choice(VERSIONS)
    verbs = ["create"] * 5 + ["next", "get", "many", "delete", "transact", "transact"]
    verb = draw.choice(verbs + ["watch", "exists", "children", "set"] * 2)
    if draw.random() < 0.04:
        return Step(session, draw.choice(["disconnect", "expire"]))
    if verb == "next":
        return Step(session, verb, draw.choice(SEQUENCES), is_ephemeral=draw.random() < 0.5)
    if verb == "transact":
        return Step(session, verb, operations=tuple(_operation(draw) for _ in range(draw.randint(1, 4))))
    return Step(session, verb, path, version, is_ephemeral=verb == "create" and draw.random() < 0.4)


def _operation(draw: random.Random) -> Operation:
    path, version = draw.choice(PATHS), draw.choice(VERSIONS)
    is_sequential = draw.random() < 0.2
    made = draw.choice(SEQUENCES) if is_sequential else path
    choices: list[Operation] = [
        Create(made, b"made", draw.random() < 0.4, is_sequential), Create(made, b"made", is_sequential=is_sequential),
        SetValue(path, b"set", version), Delete(path, version), Check(path, version),
    ]  # fmt: skip
    return draw.choice(choices)
