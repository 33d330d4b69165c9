"""A broker process as a member of a cluster: its ensemble, and the loop, in a thread, that speaks with its registry.

Theory of operation. The event loop never waits for the registry: ``RegistrySessionLoop`` does, in a thread of its own.
It enters the cluster (``joining``) and hands the core what it found. From then on it carries out the core's asks in
their order, and reads users, map and homes again when a listener was called, when the session is connected again, and
every ``REFRESH_S``. Each time it also announces the leader: with the session in which it was announced gone, that makes
the node anew; else it changes nothing. So no lost event costs more than ``REFRESH_S``.

kazoo is imported here, by ``connect``: a broker that is alone does without.

Invariants:
    * the core is called through ``post`` only, which hands calls to the core's thread in their order;
    * a broker whose session is lost goes on: no other process can lead its home. One that is superseded stops;
    * every ask is answered, in their order, but for a topic that waits until its name is free. None is carried out in a
      registry that is not this cluster's;
    * kazoo says that a session is lost only when it is connected again: the time from SUSPENDED on is measured here.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Final, NamedTuple, TypeVar

from txmq.addresses import parse_ensemble, without_secret
from txmq.broker.cluster.cluster_view import RegistryState
from txmq.broker.cluster.registry_asks import Ask, Result, carry_out, readable
from txmq.broker.commit.data_directory import Recovered, is_lacking
from txmq.broker.core import Core
from txmq.broker.shell import joining
from txmq.broker.shell.joining import Connected, Entered, JoiningHome, enter, until_answered
from txmq.broker.shell.server import Server
from txmq.config import BrokerSettings
from txmq.errors import (
    DeletionPendingError,
    HomeSupersededError,
    JournalFullError,
    RegistryAwayError,
    RegistryError,
    TxmqError,
)
from txmq.redo.directory_identity import LOCK_PATH
from txmq.registry.cluster_metadata import Access, HomeEntry, Leadership, Registry, Standing, TopicMap
from txmq.registry.zookeeper.session import SessionState
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.logging import get_logger
from txmq.runtime.os_disk import OSDisk
from txmq.runtime.ports import Clock, Random
from txmq.runtime.threads import Lock, Signal

log = get_logger()
REFRESH_S: Final = 30.0
RETRY_S: Final = 1.0
DELETION_WAIT_S: Final = 2.0  # a topic that is created waits so long until the deleted one of its name is dropped
DELETION_POLL_S: Final = 0.02
AWAY_S: Final = 5.0  # without a connection for so long, asks are answered at once
IN_USE_SESSIONS: Final = 3  # session timeouts for which the process before this one is waited for

_T = TypeVar("_T")
Post = Callable[[Callable[[], None]], None]
CALL_TIMEOUT_MS: Final = 5000
STOP_TIMEOUT_S: Final = 3.0  # for the end of the session, which lets others see at once that the broker is gone


class _StoppedError(Exception):
    pass


class _Read(enum.Enum):
    """What is read again when it changed; in the order of ``enter``'s listeners."""

    TOPICS = "topics"
    HOMES = "homes"
    ACCESS = "access"


class When(NamedTuple):
    """The steps of a membership, for the broker.

    Attributes:
        led: this process leads the home: it is journaled, and the core serves.
        announced: the registry tells of that, so that others find this process.
        refused: with the reason, if the broker has to stop, because the registry refuses it.
    """

    led: Callable[[Entered], None]
    announced: Callable[[], None]
    refused: Callable[[Exception], None]


class RegistrySessionLoop:
    """See the module's docstring. ``run`` in a thread of its own; the other methods from any.

    Args:
        who: what the home brings.
        connect: opens the registry; called again while it raises RegistryAwayError.
        core: called through ``post``.
        when: called through ``post``.
        session_timeout_s: as it was asked for.
    """

    def __init__(
        self, who: JoiningHome, connect: Callable[[], Connected], core: Core, post: Post, when: When, clock: Clock,
        session_timeout_s: float,
    ) -> None:  # fmt: skip
        self._who, self._connect, self._core, self._post = who, connect, core, post
        self._when = when
        self._clock, self._session_timeout_s = clock, session_timeout_s
        self._lock, self._signal = Lock(), Signal()
        self._asks: list[Ask] = []
        self._later: dict[int, tuple[Ask, float]] = {}  # by number: asks that wait for a free name, and until when
        self._is_stopping = self._is_stale = self._is_tried = self._has_led = self._is_announced = False
        self._listens = dict.fromkeys(_Read, False)  # what was read last is what the registry has
        self._state, self._state_at = SessionState.CONNECTED, 0.0
        self._reported: RegistryState | None = None
        self._refresh_at = -inf
        self._trouble = ""
        self._refusal: RegistryError | None = None  # why what the registry has cannot be this cluster's

    def ask(self, asks: Sequence[Ask]) -> None:
        """Have the registry asked."""
        with self._lock:
            self._asks.extend(asks)
        self._signal.set()

    def stop(self) -> None:
        """Have ``run`` end: soon, at the latest when a call that is under way has ended."""
        self._is_stopping = True
        self._signal.set()

    def run(self) -> None:
        """Enter the cluster, then serve the core until ``stop``, or until the registry refuses this broker."""
        connected: Connected | None = None
        try:
            connected = self._until_answered(self._connect)
            connected.session.listen(self._heard)
            entered = self._until_answered(partial(self._enter, connected.registry))
            self._until_led(entered)
            crash_point("registry.entered")
            self._serve(connected.registry, entered.leadership)
        except _StoppedError:
            pass
        except Exception as error:  # noqa: BLE001 - a defect: a broker that nobody hears must not go on
            self._post(partial(self._when.refused, error))
        finally:
            if connected is not None:
                connected.registry.close()

    def _until_led(self, entered: Entered) -> None:
        """Have the home led; for want of space or descriptors it is tried again."""
        while not self._has_led:
            self._is_tried = False
            self._post(partial(self._lead, entered))
            while not (self._is_tried or self._is_stopping):
                self._signal.wait(REFRESH_S)
            if not self._has_led:
                self._pause(RETRY_S)

    def _until_answered(self, step: Callable[[], _T]) -> _T:
        return until_answered(step, self._clock, self._pause, IN_USE_SESSIONS * self._session_timeout_s)

    def _pause(self, seconds: float) -> None:
        end = self._clock.monotonic() + seconds
        while not self._is_stopping and (left := end - self._clock.monotonic()) > 0:
            self._signal.wait(left)
        if self._is_stopping:
            raise _StoppedError

    def _enter(self, registry: Registry) -> Entered:
        self._listens = dict.fromkeys(_Read, True)
        return enter(registry, self._who, *(partial(self._changed, what) for what in _Read))

    # --- told by other threads: no call may wait here ----------------------------------------------------------------

    def _changed(self, what: _Read) -> None:
        self._listens[what] = False
        self._look_again()

    def _lead(self, entered: Entered) -> None:
        try:
            self._when.led(entered)
        except (OSError, JournalFullError) as error:
            if not (isinstance(error, JournalFullError) or is_lacking(error)):
                raise
            log.warning("cannot lead the home yet; tried again", error=str(error), seconds=RETRY_S)
        else:
            self._has_led = True
        self._is_tried = True
        self._signal.set()

    def _heard(self, state: SessionState) -> None:
        if state is not self._state:
            self._state, self._state_at = state, self._clock.monotonic()
            self._tell_state()
        self._look_again()

    def _look_again(self) -> None:
        self._is_stale = True
        self._signal.set()

    # --- the loop ----------------------------------------------------------------------------------------------------

    def _serve(self, registry: Registry, leadership: Leadership) -> None:
        while not self._is_stopping:
            with self._lock:
                asks, self._asks = [*(ask for ask, _until in self._later.values()), *self._asks], []
            if (self._is_stale and self._is_connected) or self._clock.monotonic() >= self._refresh_at:
                self._refresh(registry, leadership)
            for ask in asks:
                result = self._carried_out(ask, registry)
                if not self._waits(ask, result):
                    self._post(partial(self._core.registry_answered, ask.number, result))
            self._tell_state()
            if not (self._is_stale and self._is_connected):
                self._signal.wait(self._idle_s())

    def _waits(self, ask: Ask, result: Result) -> bool:
        """Whether to try it again: other homes drop a deleted topic within milliseconds, if they have brokers."""
        if isinstance(result, DeletionPendingError):
            now = self._clock.monotonic()
            self._is_stale |= ask.number not in self._later  # it may be this home that has not heard of the deletion
            _ask, until = self._later.setdefault(ask.number, (ask, now + DELETION_WAIT_S))
            if now < until:
                return True
        self._later.pop(ask.number, None)
        return False

    def _carried_out(self, ask: Ask, registry: Registry) -> Result:
        if self._away_s() > AWAY_S:
            return RegistryAwayError("ZooKeeper does not answer: nothing was asked; repeat when it is back")
        if self._refusal is not None:
            return self._refusal
        try:
            answer = carry_out(registry, self._who.candidate.home, ask)
        except TxmqError as error:
            return error
        crash_point("registry.carried_out")
        return answer

    def _refresh(self, registry: Registry, leadership: Leadership) -> None:
        self._is_stale = False
        try:
            registry.join(self._who.cluster, Standing.MEMBER)  # an ensemble may have lost its data, or got another's
            registry.announce(leadership)
            topics, homes, access = self._read(registry)
        except HomeSupersededError:
            raise
        except RegistryError as error:
            self._failed(error)
            return
        if not self._is_announced:
            self._is_announced = True
            self._post(self._when.announced)
        self._trouble, self._refusal = "", None
        self._refresh_at = self._clock.monotonic() + REFRESH_S
        self._post(partial(self._core.registry_changed, topics, homes, access))
        self._tell(RegistryState.CONNECTED)

    def _read(self, registry: Registry) -> tuple[TopicMap, list[HomeEntry], Access]:
        """Users first: a removed user must not be served longer than it takes to read that. Then map and homes."""
        access = readable(registry.access(self._listener(_Read.ACCESS)))
        topics = registry.topics(self._listener(_Read.TOPICS))
        return topics, registry.homes(self._listener(_Read.HOMES)), access

    def _listener(self, what: _Read) -> Callable[[], None] | None:
        """The listener to pass to a read; None if the last one was not called yet: it is still there."""
        is_there, self._listens[what] = self._listens[what], True
        return None if is_there else partial(self._changed, what)

    def _failed(self, error: RegistryError) -> None:
        """The broker goes on with what it knows: nobody else can lead its home."""
        self._refresh_at = self._clock.monotonic() + (AWAY_S if error.retriable else REFRESH_S)
        self._refusal = None if error.retriable else error
        if str(error) != self._trouble:
            self._trouble = str(error)
            log.warning("the broker goes on with what it knows of the registry", reason=str(error))

    # --- the session -------------------------------------------------------------------------------------------------

    @property
    def _is_connected(self) -> bool:
        return self._state is SessionState.CONNECTED

    def _away_s(self) -> float:
        return 0.0 if self._is_connected else self._clock.monotonic() - self._state_at

    def _tell_state(self) -> None:
        if self._is_connected:
            return  # it is told when the leader is announced
        is_expired = self._state is SessionState.LOST or self._away_s() >= self._session_timeout_s
        self._tell(RegistryState.EXPIRED if is_expired else RegistryState.SUSPENDED)

    def _tell(self, state: RegistryState) -> None:
        if state is not self._reported:
            self._reported = state
            log.info("session with the registry", state=state.value)
            self._post(partial(self._core.registry_state, state))

    def _idle_s(self) -> float:
        """How long there is nothing to do unasked."""
        waits = [self._refresh_at - self._clock.monotonic()]
        if self._reported is RegistryState.SUSPENDED:
            waits.append(self._session_timeout_s - self._away_s())
        if self._later:
            waits.append(DELETION_POLL_S)
        return min(waits)


class ClusterMembership:
    """See the module's docstring. Made before the data directory is opened, and started when the broker listens.

    Attributes:
        address: the registry's, without credentials.
    """

    def __init__(self, settings: BrokerSettings, disk: OSDisk, clock: Clock, random: Random) -> None:
        self._settings, self._disk, self._clock, self._random = settings, disk, clock, random
        self.address = without_secret(settings.registry)
        self._session_timeout_s = settings.registry_session_timeout_ms / 1000
        self._connected: Connected | None = None
        self._session_loop: RegistrySessionLoop | None = None
        self._thread: threading.Thread | None = None

    def take_cluster(self) -> int | None:
        """See ``joining.take_cluster``; waits while the registry is away."""
        return joining.until_answered(
            lambda: joining.take_cluster(self._disk, self._random, self._registry), self._clock, self._clock.sleep,
            IN_USE_SESSIONS * self._session_timeout_s,
        )  # fmt: skip

    def start(
        self, server: Server, recovered: Recovered, address: str, announced: Callable[[], None],
        refused: Callable[[Exception], None],
    ) -> None:  # fmt: skip
        """Enter the cluster in a thread; requests are served from then on.

        Args:
            address: where clients reach the broker.
            announced: called in the loop when the broker serves, and others can find it.
            refused: called in the loop with the reason if the broker has to stop.
        """
        core = server.core

        def serve(entered: Entered) -> None:
            recovered.lead(entered.leadership.epoch, self._clock.now_ms(), is_member=True)
            core.led(entered.topics, entered.homes, entered.access)

        lock = self._disk.lock_name(LOCK_PATH)
        who = joining.member(recovered, address, lock, self._settings, self._random)
        log.info("enters the cluster", registry=self.address)
        session_loop = RegistrySessionLoop(
            who, self._connect, core, server.post, When(serve, announced, refused), self._clock,
            self._session_timeout_s,
        )  # fmt: skip
        self._session_loop = server.registry = session_loop
        self._thread = threading.Thread(target=session_loop.run, name="txmq-registry", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the session, so that other brokers and clients see at once that this one is gone."""
        if self._session_loop is not None and self._thread is not None:
            self._session_loop.stop()
            self._thread.join(STOP_TIMEOUT_S)
        elif self._connected is not None:
            self._connected.registry.close()

    def _registry(self) -> Registry:
        return self._connect().registry

    def _connect(self) -> Connected:
        if self._connected is None:
            self._connected = connect(self._settings)
        return self._connected


def connect(settings: BrokerSettings) -> Connected:
    """Open the registry that the settings name.

    Raises:
        RegistryAwayError: it does not answer.
    """
    from txmq.registry.zookeeper.kazoo_session import KazooSession
    from txmq.registry.zookeeper.registry import ZooKeeperRegistry

    ensemble = parse_ensemble(settings.registry)
    session = KazooSession(
        ensemble.hosts, session_timeout_ms=settings.registry_session_timeout_ms, call_timeout_ms=CALL_TIMEOUT_MS,
        credentials=ensemble.credentials, tls=ensemble.tls,
    )  # fmt: skip
    return Connected(ZooKeeperRegistry(session, ensemble.chroot), session)
