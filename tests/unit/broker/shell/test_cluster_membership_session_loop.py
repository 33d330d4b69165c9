"""The loop: what the core is told, in which order, and what a lost session costs."""

from __future__ import annotations

import errno
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import pytest

from tools.simulated.stand_in import AnyClass
from tools.simulated.zookeeper import SimZooKeeper
from txmq.broker.cluster.cluster_view import RegistryState
from txmq.broker.cluster.registry_asks import Answer, CreateTopic, Refresh, Result
from txmq.broker.shell import cluster_membership
from txmq.broker.shell.cluster_membership import RegistrySessionLoop, When
from txmq.broker.shell.joining import Connected, Entered, JoiningHome, UsersOfHome
from txmq.errors import DeletionPendingError, HomeSupersededError, JournalFullError, RegistryAwayError, RegistryError
from txmq.model import TopicConfig
from txmq.registry.cluster_metadata import NO_ACCESS, Access, Candidate, HomeEntry, Standing, TopicMap
from txmq.registry.zookeeper.registry import ZooKeeperRegistry
from txmq.runtime.clocks import OSClock
from txmq.testing.eventually import WITHIN_S, eventually

CLUSTER, HOME = 0xC1, 0xA0
CANDIDATE = Candidate(HOME, "a", "host:1", 1, frozenset({1}), 5, "lock")
WHO = JoiningHome(CLUSTER, Standing.USED, CANDIDATE, (), 0, (), 0, UsersOfHome(NO_ACCESS))


class Told(AnyClass):
    """A core that notes what it is told."""

    def __init__(self) -> None:
        self.maps: list[tuple[TopicMap, Sequence[HomeEntry]]] = []
        self.access: list[Access] = []
        self.answers: list[tuple[int, Result]] = []
        self.states: list[RegistryState] = []
        self.entered: list[Entered] = []
        self.refusals: list[Exception] = []

    def registry_changed(self, topic_map: TopicMap, homes: Sequence[HomeEntry], access: Access | None = None) -> None:
        self.maps.append((topic_map, homes))
        assert access is not None
        self.access.append(access)

    def registry_answered(self, number: int, result: Result) -> None:
        self.answers.append((number, result))

    def registry_state(self, state: RegistryState) -> None:
        self.states.append(state)


class WorkerFixture:
    """The loop in a thread, with a simulated ensemble."""

    def __init__(self, connect: Callable[[], Connected] | None = None, session_timeout_s: float = 60.0) -> None:
        self.ensemble, self.told = SimZooKeeper(), Told()
        self.session = self.ensemble.open()
        self.registry = ZooKeeperRegistry(self.session)
        self.calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.session_loop = RegistrySessionLoop(
            WHO, connect or (lambda: Connected(self.registry, self.session)), self.told, self.calls.put,
            When(self.led, self.announced, self.told.refusals.append), OSClock(), session_timeout_s,
        )  # fmt: skip
        self.thread = threading.Thread(target=self.session_loop.run)
        self.full: list[Exception] = []
        self.addresses: list[str | None] = []  # that the registry had when the home was led, and announced

    def led(self, entered: Entered) -> None:
        """In the loop: the home is led, once there is room for that."""
        if self.full:
            raise self.full.pop()
        self.addresses.append(self.other().homes()[0].address)
        self.told.entered.append(entered)

    def announced(self) -> None:
        """In the loop: others find the home."""
        self.addresses.append(self.other().homes()[0].address)

    def until(self, condition: Callable[[], object]) -> None:
        """Make the calls that were posted, until something is so."""
        while not condition():
            self.calls.get(timeout=WITHIN_S)()

    def has_answers(self, count: int) -> bool:
        return len(self.told.answers) == count

    def other(self) -> ZooKeeperRegistry:
        return ZooKeeperRegistry(self.ensemble.open())


@contextmanager
def running(made: WorkerFixture) -> Iterator[WorkerFixture]:
    made.thread.start()
    try:
        yield made
    finally:
        made.session_loop.stop()
        made.thread.join(WITHIN_S)
        assert not made.thread.is_alive()


@pytest.fixture
def there() -> Iterator[WorkerFixture]:
    with running(WorkerFixture()) as made:
        made.until(lambda: made.told.maps)
        yield made


def test_a_home_is_led_before_it_is_announced(there: WorkerFixture) -> None:
    [entered] = there.told.entered
    assert entered.leadership.epoch == 6
    assert entered.homes == [HomeEntry(HOME, "a", 6, None)]
    there.until(lambda: there.told.maps[-1][1] == [HomeEntry(HOME, "a", 6, "host:1")])
    there.until(lambda: there.told.states == [RegistryState.CONNECTED])


def test_asks_are_answered_in_their_order(there: WorkerFixture) -> None:
    there.session_loop.ask(
        [CreateTopic(1, TopicConfig("t"), 0, 100), Refresh(2), CreateTopic(3, TopicConfig("t"), 0, 100)]
    )
    there.until(lambda: len(there.told.answers) == 3)
    (one, made), (two, read), (three, again) = there.told.answers
    assert (one, two, three) == (1, 2, 3)
    assert isinstance(made, Answer)
    assert made.value == 1
    assert isinstance(read, Answer)
    assert read.topic_map == made.topic_map
    assert isinstance(again, Exception)


def test_a_topic_waits_until_its_name_is_free(there: WorkerFixture) -> None:
    """The home takes messages into the deleted topic of that name until it has dropped it."""
    there.session_loop.ask([CreateTopic(1, TopicConfig("t"), 0, 100)])
    there.until(partial(there.has_answers, 1))
    other = there.other()
    other.delete_topic(other.topics().topics[0].topic)
    there.session_loop.ask([CreateTopic(2, TopicConfig("t"), 0, 100), Refresh(3)])
    there.until(partial(there.has_answers, 2))
    assert there.told.answers[1][0] == 3  # others are answered meanwhile
    other.drop_topic(1, HOME)
    there.until(partial(there.has_answers, 3))
    number, made = there.told.answers[2]
    assert number == 2
    assert isinstance(made, Answer)


def test_a_name_that_does_not_get_free_is_refused(there: WorkerFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_membership, "DELETION_WAIT_S", 0.0)
    there.session_loop.ask([CreateTopic(1, TopicConfig("t"), 0, 100)])
    there.until(partial(there.has_answers, 1))
    other = there.other()
    other.delete_topic(other.topics().topics[0].topic)
    there.session_loop.ask([CreateTopic(2, TopicConfig("t"), 0, 100)])
    there.until(partial(there.has_answers, 2))
    assert isinstance(there.told.answers[1][1], DeletionPendingError)


def test_a_change_of_another_broker_is_told(there: WorkerFixture) -> None:
    other = there.other()
    for number in range(3):
        there.session_loop.ask([CreateTopic(number, TopicConfig(f"t{number}"), 0, 100)])
        there.until(partial(there.has_answers, number + 1))
        other.delete_topic(other.topics().topics[0].topic)
        there.until(lambda: there.told.maps[-1][0].version == other.topics().version)


def test_the_leader_is_announced_again_after_a_lost_session(there: WorkerFixture) -> None:
    there.session.expire()
    there.until(lambda: RegistryState.EXPIRED in there.told.states or there.told.maps[-1][1][0].address)
    eventually(lambda: there.other().homes()[0].address == "host:1", "the leader is announced again")
    assert not there.told.refusals


def test_a_suspended_session_expires_by_an_own_clock() -> None:
    with running(WorkerFixture(session_timeout_s=0.05)) as made:
        made.until(lambda: RegistryState.CONNECTED in made.told.states)
        made.ensemble.is_reachable = False
        made.session.disconnect()
        made.until(lambda: made.told.states[-1] is RegistryState.EXPIRED)
        assert made.told.states[-2:] == [RegistryState.SUSPENDED, RegistryState.EXPIRED]
        made.session_loop.ask([Refresh(1)])
        made.until(lambda: made.told.answers)
        assert isinstance(made.told.answers[0][1], RegistryAwayError)
        made.ensemble.is_reachable = True
        made.session.connect()
        made.until(lambda: made.told.states[-1] is RegistryState.CONNECTED)
        assert not made.told.refusals


def test_nothing_is_asked_of_an_ensemble_that_lost_its_data(there: WorkerFixture) -> None:
    there.until(lambda: there.told.states)
    there.ensemble.nodes = SimZooKeeper().nodes
    for number, reason in enumerate(["make the registry anew", f"to {CLUSTER + 1:016x}"]):
        there.session.expire()
        there.session_loop.ask([CreateTopic(number, TopicConfig("t"), 0, 100)])
        there.until(partial(there.has_answers, number + 1))
        assert reason in str(there.told.answers[number][1])
        there.other().join(CLUSTER + 1, Standing.USED)  # another cluster is founded in its place
    assert not there.told.refusals


def test_a_broker_that_is_superseded_stops(there: WorkerFixture) -> None:
    newer = WHO.candidate._replace(start=2, lock="lock")
    there.other().lead(newer)
    there.session.expire()
    there.until(lambda: there.told.refusals)
    assert isinstance(there.told.refusals[0], HomeSupersededError)
    there.thread.join(WITHIN_S)
    assert not there.session.number


def test_home_is_announced_when_there_was_room_to_lead_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_membership, "RETRY_S", 0.01)
    made = WorkerFixture()
    made.full = [JournalFullError("no room"), OSError(errno.EMFILE, "too many open files")]
    with running(made):
        made.until(lambda: made.told.maps)
        assert (len(made.told.entered), made.addresses, made.full) == (1, [None, "host:1"], [])


def test_a_refusal_at_the_start_is_told() -> None:
    made = WorkerFixture()
    made.other().join(CLUSTER + 1, Standing.USED)
    with running(made):
        made.until(lambda: made.told.refusals)
        assert not made.told.entered


def test_a_registry_away_at_the_start_is_tried_again() -> None:
    tries: list[int] = []

    def connect() -> Connected:
        tries.append(1)
        if len(tries) < 3:
            raise RegistryAwayError("away")
        return Connected(made.registry, made.session)

    made = WorkerFixture(connect)
    with running(made):
        made.until(lambda: made.told.entered)
    assert len(tries) == 3


def test_a_stop_ends_the_wait_for_the_registry() -> None:
    asked = threading.Event()

    def connect() -> Connected:
        asked.set()
        raise RegistryAwayError("away")

    with running(WorkerFixture(connect)) as made:
        assert asked.wait(WITHIN_S)
    assert not made.told.refusals


def test_a_defect_stops_the_broker() -> None:
    def connect() -> Connected:
        raise ZeroDivisionError

    with running(WorkerFixture(connect)) as made:
        made.until(lambda: made.told.refusals)
        assert not isinstance(made.told.refusals[0], RegistryError)


def test_a_stop_withdraws_the_leader(there: WorkerFixture) -> None:
    there.until(lambda: there.told.maps[-1][1][0].address)
    there.session_loop.stop()
    there.thread.join(WITHIN_S)
    assert there.other().homes() == [HomeEntry(HOME, "a", 6, None)]
