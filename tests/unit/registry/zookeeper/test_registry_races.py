"""Two brokers at once: whatever comes between two of a call's steps, the calls are as if one came after the other.

Stale reads, connections that are lost again and again, and races that are lost again and again stand here, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

import pytest

from tests.unit.registry.contract import CLUSTER, USER, A, B, candidate, topic
from tests.unit.registry.zookeeper.tree import values
from tools.simulated.zookeeper import SimSession, SimZooKeeper, Tree
from txmq.errors import RegistryAwayError, RegistryConflictError, TxmqError
from txmq.registry.cluster_metadata import Brought, Leadership, PlacedTopic, Registry, Standing
from txmq.registry.zookeeper.nodes import LOSSES_MAX, RACES_MAX
from txmq.registry.zookeeper.registry import ZooKeeperRegistry
from txmq.registry.zookeeper.session import BadVersionError, ConnectionLossError, Operation, Result, SessionState

STEPS_MAX = 60
FIRST, SECOND, THIRD = candidate(), candidate(start=2, former=(1,)), candidate(start=3, former=(1,))
Call = Callable[[Registry], object]
CALLS: dict[str, Call] = {
    "join": lambda registry: registry.join(0xAA, Standing.EMPTY),
    "lead as the second": lambda registry: registry.lead(SECOND),
    "lead as the third": lambda registry: registry.lead(THIRD),
    "lead under a taken name": lambda registry: registry.lead(SECOND._replace(name="new")),
    "lead another under that name": lambda registry: registry.lead(candidate(0xC0)._replace(name="new")),
    "announce the first": lambda registry: registry.announce(Leadership(FIRST, 1)),
    "lead and announce": lambda registry: registry.announce(registry.lead(SECOND)),
    "homes": lambda registry: registry.homes(),
    "reserve": lambda registry: registry.reserve_topic_ids(2),
    "create": lambda registry: registry.create_topic(topic(2, "audit"), [A, B]),
    "create under the same name": lambda registry: registry.create_topic(topic(3, "audit"), [B, A]),
    "create another": lambda registry: registry.create_topic(topic(12, "other"), [B, A]),
    "alter": lambda registry: registry.alter_topic(PlacedTopic(topic(1, retention_ms=9), (A, B), 1)),
    "add partitions": lambda registry: registry.alter_topic(PlacedTopic(topic(1, partitions=3), (A, B, A), 1)),
    "delete": lambda registry: registry.delete_topic(topic(1)),
    "drop at A": lambda registry: registry.drop_topic(9, A),
    "drop at B": lambda registry: registry.drop_topic(9, B),
    "topics": lambda registry: registry.topics(),
    "join with epochs": lambda registry: registry.join(CLUSTER, Standing.MEMBER, Brought(last_query_epoch=5)),
    "draw": lambda registry: registry.draw_query_epoch(),
    "draw above": lambda registry: registry.draw_query_epoch(above=9),
    "anchor at A": lambda registry: registry.anchor("group", "new", A),
    "anchor at B": lambda registry: registry.anchor("group", "new", B),
    "anchor at B again": lambda registry: registry.anchor("group", "billing", B),
    "release": lambda registry: registry.release_anchor("group", "billing", B),
    "access": lambda registry: registry.access(),
    "add a user": lambda registry: registry.change_access(A, 1, {"user.shop": USER}),
    "add a user at B": lambda registry: registry.change_access(B, 1, {"user.shop": {**USER, "n": 1}}),
    "remove a user": lambda registry: registry.change_access(B, 1, {"user.ops": None}),
    "publish at A": lambda registry: registry.publish_access(A, {"user.a": USER}),
    "publish at B": lambda registry: registry.publish_access(B, {"user.b": USER, "user.ops": USER}),
    "anchor the released": lambda registry: registry.anchor("group", "billing", A),
}

UNCHANGING = (
    "join",
    "homes",
    "topics",
    "access",
    "publish at A",
    "publish at B",
    "anchor the released",
    "anchor at B again",
)


class Outcome(NamedTuple):
    """The results of two calls, and the tree after both."""

    first: object
    second: object
    tree: dict[str, tuple[bytes, bool]]


def _world() -> SimZooKeeper:
    """An ensemble in which much has been done, by its first session."""
    ensemble = SimZooKeeper()
    ensemble.open()
    ensemble.nodes = {path: copy.copy(node) for path, node in _tree().items()}
    return ensemble


@cache
def _tree() -> Tree:
    ensemble = SimZooKeeper()
    registry = ZooKeeperRegistry(ensemble.open())
    registry.join(CLUSTER, Standing.USED)
    registry.announce(registry.lead(FIRST))
    registry.lead(candidate(B))
    registry.create_topic(topic(1), [A, B])
    registry.create_topic(topic(9, "old"), [A, B])
    registry.delete_topic(topic(9, "old"))
    registry.anchor("group", "billing", B)
    registry.change_access(A, 0, {"user.ops": USER, "user.root": USER})
    return ensemble.nodes


def _result(call: Call, registry: Registry) -> object:
    try:
        return call(registry)
    except TxmqError as error:
        return type(error)


def _one_after_the_other(first: str, second: str) -> Outcome:
    ensemble = _world()
    results = [_result(CALLS[name], ZooKeeperRegistry(ensemble.open())) for name in (first, second)]
    return Outcome(results[0], results[1], values(ensemble.open()))


def _second_between(first: str, second: str, steps: int) -> tuple[Outcome, bool]:
    """The second call is made when the first one has made some steps; whether it had so many."""
    ensemble = _world()
    session, other = ensemble.open(), ZooKeeperRegistry(ensemble.open())
    came: list[object] = []
    left = steps

    def step() -> None:
        nonlocal left
        left -= 1
        if left < 0 and not came:
            came.append(_result(CALLS[second], other))

    session.before_call = step
    result = _result(CALLS[first], ZooKeeperRegistry(session))
    has_come = bool(came)
    if not has_come:
        came.append(_result(CALLS[second], other))
    return Outcome(result, came[0], values(ensemble.open())), has_come


@pytest.mark.parametrize("first", [name for name in CALLS if name != "lead and announce"])  # which is two calls
def test_two_calls_at_once_are_as_if_one_came_first(first: str) -> None:
    for second in CALLS:
        inverse = _one_after_the_other(second, first)
        serial = [_one_after_the_other(first, second), Outcome(inverse.second, inverse.first, inverse.tree)]
        for steps in range(STEPS_MAX):
            outcome, has_come = _second_between(first, second, steps)
            assert outcome in serial or _is_between(first, second, outcome), (second, steps)
            if not has_come:
                assert steps > 0
                break
        else:
            raise AssertionError("the call makes more steps than are tried here")


def _is_between(first: str, second: str, outcome: Outcome) -> bool:
    """``homes`` may see the moment between the two calls of ``lead and announce``: no leader is known."""
    if (first, second) != ("homes", "lead and announce") or not isinstance(outcome.first, list):
        return False
    return [home.address for home in outcome.first] == [None, None] and outcome.first[0].epoch == 2


@pytest.mark.parametrize("name", CALLS)
def test_a_server_that_lags_behind_changes_nothing(name: str) -> None:
    """A session's server may not have heard yet of what other sessions changed."""
    for before in CALLS:
        ensemble = _world()
        lagging = ensemble.open()
        lagging.lag()
        came = _result(CALLS[before], ZooKeeperRegistry(ensemble.open()))
        outcome = Outcome(came, _result(CALLS[name], ZooKeeperRegistry(lagging)), values(ensemble.open()))
        assert outcome == _one_after_the_other(before, name), before


@pytest.mark.parametrize("name", [name for name in CALLS if name not in UNCHANGING])
def test_a_connection_lost_again_and_again_ends_the_call(name: str) -> None:
    session = _world().open()
    lost = 0

    def lose_again(state: SessionState) -> None:
        nonlocal lost
        if state is SessionState.CONNECTED:
            session.lose_next(is_carried_out=False)
        else:
            lost += 1

    session.listen(lose_again)
    session.lose_next(is_carried_out=False)
    registry = ZooKeeperRegistry(session)
    with pytest.raises(RegistryAwayError, match="repeat when it is back"):
        CALLS[name](registry)
    assert lost == LOSSES_MAX + 1


def test_a_race_lost_again_and_again_ends_the_call() -> None:
    ensemble = _world()
    session, other = ensemble.open(), ensemble.open()
    changes = 0

    def change() -> None:
        nonlocal changes
        changes += 1
        last = other.get("/txmq/ids/topics")
        other.set_value("/txmq/ids/topics", last.value, last.stat.version)

    session.before_call = change
    with pytest.raises(RegistryConflictError, match=f"others were faster {RACES_MAX + 1} times"):
        ZooKeeperRegistry(session).reserve_topic_ids(1)
    assert changes > RACES_MAX


def test_a_lost_change_known_not_made_is_forgotten() -> None:
    """Lost, then known not to be made, then a race is lost: the third try has nothing that is not known."""
    ensemble = _world()
    session, other = ensemble.open(), ZooKeeperRegistry(ensemble.open())
    changes = 0

    def count(_state: SessionState) -> None:
        session.before_change = others_first

    def others_first() -> None:
        nonlocal changes
        changes += 1
        if changes == 1:
            other.create_topic(topic(30, "theirs"), [A, B])

    session.lose_next(is_carried_out=False)
    session.listen(count)
    assert ZooKeeperRegistry(session).create_topic(topic(2, "audit"), [A, B]).version == 5
    assert changes == 2


def test_each_node_is_watched_once_however_often_it_is_read() -> None:
    ensemble = _world()
    session, told = ensemble.open(), list[str]()
    registry = ZooKeeperRegistry(session)
    for _ in range(5):
        registry.homes(lambda: told.append("homes"))
        registry.topics(lambda: told.append("topics"))
    watches = [*session._watches.on_value.values(), *session._watches.on_children.values()]
    assert [len(each) for each in watches] == [1] * 4  # the map; the homes, and the leaders of two
    ZooKeeperRegistry(ensemble.open()).create_topic(topic(2, "audit"), [A, B])
    assert told == ["topics"] * 5


@pytest.mark.parametrize("is_of_homes", [False, True])
def test_a_listener_is_told_wherever_the_connection_is_lost(is_of_homes: bool) -> None:
    for steps in range(STEPS_MAX):
        ensemble = _world()
        session, told = ensemble.open(), list[int]()
        registry = ZooKeeperRegistry(session)
        has_come = _disconnect_after(session, steps)
        read = registry.homes if is_of_homes else registry.topics
        read(partial(told.append, steps))
        changer = ZooKeeperRegistry(ensemble.open())
        changer.announce(changer.lead(SECOND))
        changer.create_topic(topic(2, "audit"), [A, B])
        assert told, steps
        if not has_come():
            return
    raise AssertionError("the call makes more steps than are tried here")


def _disconnect_after(session: SimSession, steps: int) -> Callable[[], bool]:
    left = steps

    def step() -> None:
        nonlocal left
        left -= 1
        if left == -1:
            session.disconnect()

    session.before_call = step
    return lambda: left < 0


def _sent_release(session: SimSession) -> Sequence[Operation]:
    """The transaction of a release, which is under way when its process dies."""
    sent: list[Sequence[Operation]] = []

    def transact(operations: Sequence[Operation]) -> list[Result]:
        sent.append(operations)
        raise ConnectionLossError("the process is killed")

    session.transact = transact  # type: ignore[method-assign]
    with pytest.raises(RegistryAwayError):
        ZooKeeperRegistry(session).release_anchor("group", "billing", B)
    return sent[0]


@pytest.mark.parametrize("is_made_anew", [False, True])
def test_late_release_of_a_dead_process_leaves_the_anchor(*, is_made_anew: bool) -> None:
    """Its home lives on in another process, which finds the anchor, or has released it and made it anew."""
    ensemble = _world()
    release = _sent_release(ensemble.open())
    registry = ZooKeeperRegistry(ensemble.open())
    registry.lead(candidate(B, 2, former=(1,)))
    assert registry.anchor("group", "billing", B) == B
    if is_made_anew:
        registry.release_anchor("group", "billing", B)
        assert registry.anchor("group", "billing", B) == B
    with pytest.raises(BadVersionError):
        ensemble.open().transact(release)
    assert registry.anchor("group", "billing", A) == B


def test_release_of_a_dead_process_that_came_first_counts() -> None:
    ensemble = _world()
    ensemble.open().transact(_sent_release(ensemble.open()))
    assert ZooKeeperRegistry(ensemble.open()).anchor("group", "billing", A) == A
