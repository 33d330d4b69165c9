"""The registry on the simulated ZooKeeper: the contract, and the loss of each single answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import pytest

from tests.unit.registry.contract import CLUSTER, USER, A, B, candidate, topic
from tests.unit.registry.retiring_contract import RetiringContract
from tests.unit.registry.zookeeper.tree import values
from tools.simulated.zookeeper import SimSession, SimZooKeeper
from txmq.errors import RegistryAwayError, RegistryConflictError, RegistryError
from txmq.registry.cluster_metadata import (
    Access,
    Brought,
    Changes,
    DeletedTopic,
    PlacedTopic,
    Registry,
    Standing,
    TopicMap,
)
from txmq.registry.zookeeper.registry import ZooKeeperRegistry
from txmq.registry.zookeeper.session import ANY_VERSION, ConnectionLossError, Node, SessionState
from txmq.registry.zookeeper.topics import NEWEST_MAX

CHANGES_MAX = 20  # more than any call makes


def _session(registry: Registry) -> SimSession:
    assert isinstance(registry, ZooKeeperRegistry)
    assert isinstance(registry._session, SimSession)
    return registry._session


class TestOnSimulatedZooKeeper(RetiringContract):
    """See ``RetiringContract``."""

    def fresh(self) -> Registry:
        """See ``RegistryContract``."""
        self.ensemble = SimZooKeeper()
        return self.another()

    def another(self) -> Registry:
        """See ``RetiringContract``."""
        return ZooKeeperRegistry(self.ensemble.open(), "/prod")

    def expire(self, registry: Registry) -> None:
        """See ``RetiringContract``."""
        _session(registry).expire()


Call = Callable[[Registry], object]
MANY = {f"user.u{number}": {**USER, "certificate": "x" * 100_000} for number in range(8)}
PLACED = PlacedTopic(topic(1), (A, B), 1)
ALTERED = PlacedTopic(topic(1, retention_ms=9), (A, B), 1)


def _founded(registry: Registry) -> None:
    registry.join(CLUSTER, Standing.USED)


def _led(registry: Registry) -> None:
    _founded(registry)
    registry.announce(registry.lead(candidate()))
    registry.lead(candidate(B))


def _with_topic(registry: Registry) -> None:
    _led(registry)
    registry.create_topic(topic(1), [A, B])


def _with_deleted(registry: Registry) -> None:
    _with_topic(registry)
    registry.delete_topic(topic(1))


def _dropped_at_b(registry: Registry) -> None:
    _with_deleted(registry)
    registry.drop_topic(1, B)


def _dropped_by_others(registry: Registry) -> None:
    _anchored(registry)
    registry.create_topic(topic(1), [A, B])
    registry.delete_topic(topic(1))
    registry.drop_topic(1, A)


def _anchored(registry: Registry) -> None:
    _led(registry)
    registry.anchor("group", "billing", B)


def _with_users(registry: Registry) -> None:
    _led(registry)
    registry.change_access(A, 0, {"user.ops": USER})


def _changed(registry: Registry, changes: Changes) -> Access:
    """Change users, if that is not done."""
    access = registry.access()
    return access if "user.shop" in access.records else registry.change_access(A, access.version, changes)


CALLS: dict[str, tuple[Call, Call]] = {  # what was done before, and the call during which the connection is lost
    "join": (lambda _registry: None, lambda registry: registry.join(CLUSTER, Standing.USED)),
    "lead": (_founded, lambda registry: registry.lead(candidate())),
    "lead again": (_led, lambda registry: registry.lead(candidate(start=2, former=(1,)))),
    "lead under another name": (
        _led, lambda registry: registry.lead(candidate(start=2, former=(1,))._replace(name="renamed")),
    ),
    "announce": (_led, lambda registry: registry.announce(registry.lead(candidate(start=2, former=(1,))))),
    "create": (_led, lambda registry: registry.create_topic(topic(1), [A, B])),
    "alter": (_with_topic, lambda registry: registry.alter_topic(ALTERED)),
    "delete": (_with_topic, lambda registry: registry.delete_topic(topic(1))),
    "drop": (_with_deleted, lambda registry: registry.drop_topic(1, A)),
    "drop the last": (_dropped_at_b, lambda registry: registry.drop_topic(1, A)),
    "join with epochs": (_led, lambda registry: registry.join(CLUSTER, Standing.MEMBER, Brought(0, 7))),
    "change users": (_with_users, lambda registry: _changed(registry, {"user.shop": USER, "user.ops": None})),
    "first user": (_led, lambda registry: _changed(registry, {"user.shop": USER, "secret": {}})),
    "publish": (_led, lambda registry: registry.publish_access(A, {"user.shop": USER, "user.ops": USER})),
    "publish after founding": (
        lambda registry: registry.join(CLUSTER, Standing.USED, Brought(publisher=A)),
        lambda registry: registry.publish_access(A, MANY),
    ),
    "retire": (_dropped_by_others, lambda registry: registry.retire_home(B, "ada: disk burnt")),
    "anchor": (_led, lambda registry: registry.anchor("group", "billing", B)),
    "release": (_anchored, lambda registry: registry.release_anchor("group", "billing", B)),
}  # fmt: skip


def _after(name: str, loss: tuple[int, bool] | None) -> tuple[object, dict[str, tuple[bytes, bool]], bool]:
    """The result of a call, the tree after it, and whether the connection was lost in it."""
    ensemble = SimZooKeeper()
    before, call = CALLS[name]
    registry = ZooKeeperRegistry(ensemble.open())
    before(registry)
    states: list[object] = []
    _session(registry).listen(states.append)
    if loss is not None:
        _session(registry).lose_next(after=loss[0], is_carried_out=loss[1])
    result = call(registry)
    return result, values(ensemble.open()), bool(states)


@pytest.mark.parametrize("is_carried_out", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize("name", CALLS)
def test_an_answer_lost_at_any_change_makes_no_difference(name: str, is_carried_out: bool) -> None:
    result, tree, _ = _after(name, None)
    for changes in range(CHANGES_MAX):
        got, left, was_lost = _after(name, (changes, is_carried_out))
        assert (got, left) == (result, tree), changes
        if not was_lost:
            assert changes > 0
            return
    raise AssertionError("the call makes more changes than are tried here")


@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_a_dead_process_is_finished_by_another(name: str) -> None:
    """The process dies after each change, its session expires, and the next process makes the same call."""
    _result, tree, _ = _after(name, None)
    for changes in range(CHANGES_MAX):
        ensemble = SimZooKeeper()
        before, call = CALLS[name]
        before(ZooKeeperRegistry(ensemble.open()))
        has_died = _dies(ensemble, call, changes)
        call(ZooKeeperRegistry(ensemble.open()))
        assert values(ensemble.open()) == tree, changes
        if not has_died:
            assert changes > 0
            return
    raise AssertionError("the call makes more changes than are tried here")


def _dies(ensemble: SimZooKeeper, call: Call, changes: int) -> bool:
    """Whether a process that dies after a change got that far."""

    def lose(_state: SessionState) -> None:
        ensemble.is_reachable = False

    dying = ensemble.open()
    number = dying.number
    dying.listen(lose)
    dying.lose_next(after=changes, is_carried_out=True)
    with suppress(RegistryAwayError):
        call(ZooKeeperRegistry(dying))
    has_died, ensemble.is_reachable = not ensemble.is_reachable, True
    ensemble.end_session(number)
    return has_died


def test_ids_whose_answer_was_lost_are_not_used() -> None:
    registry = ZooKeeperRegistry(SimZooKeeper().open())
    _led(registry)
    _session(registry).lose_next(is_carried_out=True)
    assert registry.reserve_topic_ids(2) == range(3, 5)


def test_an_epoch_whose_answer_was_lost_is_not_used() -> None:
    registry = ZooKeeperRegistry(SimZooKeeper().open())
    _led(registry)
    _session(registry).lose_next(is_carried_out=True)
    assert registry.draw_query_epoch() == 2


def test_a_cluster_from_before_gets_its_counter_of_epochs() -> None:
    for call, drawn in (
        (lambda _: None, 1),
        (lambda registry: registry.join(CLUSTER, Standing.MEMBER, Brought(0, 6)), 7),
    ):
        registry = ZooKeeperRegistry(SimZooKeeper().open())
        _led(registry)
        _session(registry).delete("/txmq/ids/queries", ANY_VERSION)
        call(registry)
        assert registry.draw_query_epoch() == drawn


def _loses_create(registry: Registry, behind: Callable[[], object], *, is_carried_out: bool) -> None:
    """Lose the connection in a change, and let others come after it before it is there again."""
    session = _session(registry)
    session.lose_next(is_carried_out=is_carried_out)
    reconnect = session.connect

    def connect() -> None:
        session.connect = reconnect  # type: ignore[method-assign]
        behind()
        reconnect()

    session.connect = connect  # type: ignore[method-assign]


@pytest.fixture
def pair() -> tuple[Registry, Registry]:
    """Two brokers' registries over one ensemble."""
    ensemble = SimZooKeeper()
    registry, other = ZooKeeperRegistry(ensemble.open()), ZooKeeperRegistry(ensemble.open())
    _led(registry)
    return registry, other


def test_a_lost_create_is_known_by_its_id(pair: tuple[Registry, Registry]) -> None:
    registry, other = pair
    _loses_create(registry, lambda: other.create_topic(topic(2, "audit"), [A, B]), is_carried_out=True)
    assert registry.create_topic(topic(1), [A, B]) == PLACED


def test_a_lost_create_that_cannot_be_told_is_a_conflict(pair: tuple[Registry, Registry]) -> None:
    registry, other = pair

    def made_and_gone() -> None:
        other.delete_topic(topic(1))
        other.drop_topic(1, A)
        other.drop_topic(1, B)

    _loses_create(registry, made_and_gone, is_carried_out=True)
    with pytest.raises(RegistryConflictError, match="look whether it was made"):
        registry.create_topic(topic(1), [A, B])
    assert registry.topics() == TopicMap(2, (), ())


def test_a_lost_alteration_that_others_came_behind_is_a_conflict(pair: tuple[Registry, Registry]) -> None:
    registry, other = pair
    registry.create_topic(topic(1), [A, B])
    mine, theirs = topic(1, retention_ms=5), topic(1, retention_ms=6)
    _loses_create(registry, lambda: other.alter_topic(PlacedTopic(theirs, (A, B), 1)), is_carried_out=False)
    with pytest.raises(RegistryConflictError):
        registry.alter_topic(PlacedTopic(mine, (A, B), 1))
    assert registry.topics().topics == (PlacedTopic(theirs, (A, B), 2),)


def test_a_lost_delete_is_known_by_its_tombstone(pair: tuple[Registry, Registry]) -> None:
    registry, other = pair
    registry.create_topic(topic(1), [A, B])
    _loses_create(registry, lambda: other.create_topic(topic(2, "other"), [A, B]), is_carried_out=True)
    registry.delete_topic(topic(1))
    assert registry.topics().topics == (PlacedTopic(topic(2, "other"), (A, B), 3),)
    assert registry.topics().deleted == (DeletedTopic(1, "orders", (A, B)),)


def test_away_means_that_nothing_is_sent_later() -> None:
    ensemble = SimZooKeeper()
    registry = ZooKeeperRegistry(ensemble.open())
    _led(registry)
    ensemble.is_reachable = False
    with pytest.raises(RegistryAwayError, match="ZooKeeper does not answer"):
        registry.create_topic(topic(1), [A, B])
    ensemble.is_reachable = True
    assert registry.topics() == TopicMap(0, (), ())


def test_a_watch_lost_with_the_connection_is_told(pair: tuple[Registry, Registry]) -> None:
    registry, _other = pair
    told: list[str] = []
    registry.topics(lambda: told.append("topics"))
    registry.homes(lambda: told.append("homes"))
    _session(registry).disconnect()
    assert set(told) == {"topics", "homes"}


def test_a_node_that_cannot_be_read_is_named() -> None:
    registry = ZooKeeperRegistry(SimZooKeeper().open(), "/prod")
    _with_topic(registry)
    session = _session(registry)
    spoiled: dict[str, Callable[[], object]] = {
        "/prod/txmq/topics/orders": registry.topics,
        f"/prod/txmq/homes/{A:016x}/state": registry.homes,
        f"/prod/txmq/homes/{A:016x}/replicas/1": registry.homes,
        "/prod/txmq/ids/topics": lambda: registry.reserve_topic_ids(1),
        "/prod/txmq/ids/queries": registry.draw_query_epoch,
        "/prod/txmq/cluster": lambda: registry.join(CLUSTER, Standing.MEMBER),
    }
    for path, read in spoiled.items():
        whole = session.get(path).value
        for value in (b"", b"\xff", b"{}", b"[]", b"null", b'{"homes": ["zz"]}', whole[:-1] + b"?"):
            session.set_value(path, value, ANY_VERSION)
            with pytest.raises(RegistryError, match=path):
                read()
        session.set_value(path, whole, ANY_VERSION)
        read()


def test_a_cluster_of_a_newer_format_is_not_touched() -> None:
    session = SimZooKeeper().open()
    registry = ZooKeeperRegistry(session)
    _founded(registry)
    session.set_value("/txmq/cluster", b'{"format": 3, "cluster": "000000000000c1a5"}', 0)
    with pytest.raises(RegistryError, match="format 3, this txmq reads 2: upgrade txmq"):
        registry.join(CLUSTER, Standing.MEMBER)


def test_a_topic_too_large_for_a_node_is_refused() -> None:
    registry = ZooKeeperRegistry(SimZooKeeper().open())
    _led(registry)
    placed = registry.create_topic(topic(1, partitions=10_000), [A] * 10_000)
    assert registry.topics().topics == (placed,)
    with pytest.raises(RegistryError, match="too large for ZooKeeper"):
        registry.create_topic(topic(2, "larger", partitions=60_000), [A] * 60_000)


def test_nothing_is_done_in_a_session_that_has_ended() -> None:
    ensemble = SimZooKeeper()
    session = ensemble.open()
    ensemble.end_session(session.number)
    with pytest.raises(ConnectionLossError):
        session.create("/mine", b"", is_ephemeral=True)
    assert ensemble.open().exists("/mine") is None


def test_a_session_that_was_cut_off_comes_back() -> None:
    ensemble = SimZooKeeper()
    session, number = ensemble.open(), 1
    session.is_cut_off = True
    with pytest.raises(ConnectionLossError):
        session.get("/")
    assert not session.wait_connected(1.0)
    ensemble.open().create("/others", b"")
    session.is_cut_off = False
    assert session.wait_connected(1.0)
    assert session.number == number
    assert session.exists("/others") is not None


def _noted(session: SimSession, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that are read from now on."""
    read, get_many = list[str](), session.get_many

    def noted(paths: Sequence[str]) -> list[Node | None]:
        read.extend(paths)
        return get_many(paths)

    monkeypatch.setattr(session, "get_many", noted)
    return read


def test_topics_are_read_again_only_if_one_has_changed(
    pair: tuple[Registry, Registry], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker reads the map whenever it is asked for a topic that it does not know."""
    here, there = pair
    session = _session(here)
    read = _noted(session, monkeypatch)
    first = there.create_topic(topic(1), [A, B])
    maps = [here.topics() for _ in range(3)]
    assert ([one.topics for one in maps], read) == ([(first,)] * 3, ["/txmq/topics/orders"])
    altered = there.alter_topic(first._replace(topic=topic(1, retention_ms=9)))
    assert here.topics().topics == (altered,)
    there.delete_topic(topic(1))
    assert here.topics() == TopicMap(3, (), (DeletedTopic(1, "orders", (A, B)),))
    there.drop_topic(1, A)
    assert here.topics() == TopicMap(3, (), (DeletedTopic(1, "orders", (B,)),))
    session.expire()
    assert session.wait_connected(0.0)
    read.clear()
    here.topics()
    here.topics()
    assert read == ["/txmq/deleted/1"] * 2


def test_a_change_of_one_topic_reads_that_one(pair: tuple[Registry, Registry], monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be ten thousand others; and the newest changes are named, not all."""
    here, there = pair
    read = _noted(_session(here), monkeypatch)
    for number in range(1, 100):
        there.create_topic(topic(number, f"t{number}"), [A, B])
    assert len(here.topics().topics) == len(read) == 99
    read.clear()
    there.create_topic(topic(100, "new"), [A, B])
    there.delete_topic(topic(7, "t7"))
    found = here.topics()
    assert read == ["/txmq/topics/new", "/txmq/topics/t7", "/txmq/deleted/7"]
    assert found == there.topics()
    version = 1
    for retention_ms in range(1, NEWEST_MAX + 2):
        version = there.alter_topic(PlacedTopic(topic(1, "t1", retention_ms=retention_ms), (A, B), version)).version
    assert here.topics() == there.topics()


def test_topics_of_an_emptied_ensemble_are_not_those_read_before(pair: tuple[Registry, Registry]) -> None:
    """Its numbers begin anew, and may reach those that were read; the session with it is another one."""
    here, there = pair
    there.create_topic(topic(1), [A, B])
    [first] = here.topics().topics
    session = _session(here)
    node = session._ensemble.nodes["/txmq/topics"]
    value, changed = node.value, node.changed
    there.alter_topic(first._replace(topic=topic(1, retention_ms=9)))
    node.value, node.changed = value, changed
    session.expire()
    assert session.wait_connected(0.0)
    assert here.topics().topics[0].topic == topic(1, retention_ms=9)
