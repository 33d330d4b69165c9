"""Users in the simulated ZooKeeper: what is read again, what a former process may not do, clusters from before."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from tests.unit.registry.contract import CLUSTER, USER, A, B, candidate
from tools.simulated.zookeeper import SimSession, SimZooKeeper
from txmq.errors import RegistryConflictError, RegistryError
from txmq.registry.cluster_metadata import NO_ACCESS, Access, Brought, Standing
from txmq.registry.zookeeper.access import NEWEST_MAX
from txmq.registry.zookeeper.registry import ZooKeeperRegistry
from txmq.registry.zookeeper.session import Node, Operation


def _registry(session: SimSession) -> ZooKeeperRegistry:
    registry = ZooKeeperRegistry(session)
    registry.join(CLUSTER, Standing.USED)
    registry.announce(registry.lead(candidate()))
    return registry


def _read_paths(session: SimSession) -> list[str]:
    """The records that are read from now on."""
    paths: list[str] = []
    read = session.get_many

    def get_many(wanted: Sequence[str]) -> list[Node | None]:
        paths.extend(path.rpartition("/")[2] for path in wanted)
        return read(wanted)

    session.get_many = get_many  # type: ignore[assignment, method-assign]
    return paths


def test_only_what_changed_is_read_again() -> None:
    ensemble = SimZooKeeper()
    writing, session = _registry(ensemble.open()), ensemble.open()
    reading = ZooKeeperRegistry(session)
    writing.publish_access(A, {f"user.u{number}": USER for number in range(50)})
    reading.access()
    paths = _read_paths(session)
    for version in range(1, 4):
        writing.change_access(A, version, {f"user.u{version}": None, "quota.topic.a": {"n": version}})
    assert reading.access() == writing.access()
    assert sorted(paths) == ["quota.topic.a", "user.u1", "user.u2", "user.u3"]
    del paths[:]
    assert reading.access() is reading.access()
    assert not paths
    for version in range(4, 6 + NEWEST_MAX):
        writing.change_access(A, version, {"quota.topic.a": {"n": version}})
    assert reading.access() == writing.access()
    assert len(paths) == 48  # all: what changed first is not named any more


def test_a_change_that_was_lost_and_overtaken_is_known() -> None:
    ensemble = SimZooKeeper()
    session, other = ensemble.open(), ensemble.open()
    registry = _registry(session)
    overtaking = ZooKeeperRegistry(other)
    registry.access()

    def overtake(_state: object) -> None:
        if overtaking.access().version == 1:
            overtaking.change_access(B, 1, {"user.ops": None, "user.shop": USER})

    session.listen(overtake)
    session.lose_next(is_carried_out=True)
    assert registry.change_access(A, 0, {"user.ops": USER}) == Access(2, {"user.shop": USER})


def test_a_change_that_others_follow_at_once_is_made() -> None:
    ensemble = SimZooKeeper()
    session, following = ensemble.open(), ZooKeeperRegistry(ensemble.open())
    registry = _registry(session)
    for number in range(20):  # the other one comes at each call of the read after the change
        version, calls = registry.access().version, number

        def follow(version: int = version) -> None:
            nonlocal calls
            calls -= 1
            if calls < 0 and following.access().version == version + 1:
                following.change_access(B, version + 1, {"quota.topic.a": {"n": version}})

        session.before_call = follow
        changed = registry.change_access(A, version, {f"user.u{number}": USER})
        session.before_call = lambda: None
        assert f"user.u{number}" in changed.records


def test_a_change_that_was_lost_behind_anothers_is_none() -> None:
    ensemble = SimZooKeeper()
    session = ensemble.open()
    registry, overtaking = _registry(session), ZooKeeperRegistry(ensemble.open())

    def overtake(_state: object) -> None:
        if overtaking.access().version == 0:
            overtaking.change_access(B, 0, {"user.ops": USER})

    session.listen(overtake)
    session.lose_next(is_carried_out=False)
    with pytest.raises(RegistryConflictError, match="version 1"):
        registry.change_access(A, 0, {"user.ops": USER})  # the same, and not by this home


def test_a_former_process_publishes_nothing_behind_the_next_one() -> None:
    ensemble = SimZooKeeper()
    session = ensemble.open()
    former, then = ZooKeeperRegistry(session), ZooKeeperRegistry(ensemble.open())
    former.join(CLUSTER, Standing.USED, Brought(publisher=A))
    session.create("/txmq/access/user.ops", b"{}")  # by a process before both
    changed = {"user.ops": {**USER, "grants": []}}

    def overtake() -> None:
        session.before_change = lambda: None
        then.publish_access(A, {"user.ops": USER})
        then.change_access(A, 1, changed)

    session.before_change = overtake
    former.publish_access(A, {"user.ops": {**USER, "grants": ["all"]}})
    assert then.access() == former.access() == Access(2, changed)


def test_what_was_brought_in_part_is_brought_anew() -> None:
    ensemble = SimZooKeeper()
    session = ensemble.open()
    registry = ZooKeeperRegistry(session)
    registry.join(CLUSTER, Standing.USED, Brought(publisher=A))
    session.create("/txmq/access/user.removed", b"{}")  # by a process that died then
    registry.publish_access(A, {"user.ops": USER})
    assert registry.access() == Access(1, {"user.ops": USER})


def test_a_cluster_from_before_there_were_users_gets_them() -> None:
    ensemble = SimZooKeeper()
    session = ensemble.open()
    registry = _registry(session)
    session.delete("/txmq/access", 0)
    told: list[int] = []
    assert registry.access(lambda: told.append(1)) == NO_ACCESS
    assert registry.change_access(A, 0, {"user.ops": USER}) == Access(1, {"user.ops": USER})
    assert told == [1]


def test_records_that_cannot_be_read_are_told() -> None:
    ensemble = SimZooKeeper()
    session = ensemble.open()
    registry = _registry(session)
    registry.change_access(A, 0, {"user.ops": USER})
    for path, value in (("/txmq/access/user.ops", b"[]"), ("/txmq/access", b'{"version": 1}')):
        session.set_value(path, value, -1)
        with pytest.raises(RegistryError, match=rf"{path} in ZooKeeper cannot be read .* restore it, or upgrade txmq"):
            ZooKeeperRegistry(ensemble.open()).access()


def test_nodes_that_are_open_take_no_users() -> None:
    session = SimZooKeeper().open()
    registry = _registry(session)
    session.has_credentials = False
    for refused in (
        lambda: registry.change_access(A, 0, {"user.ops": USER}), lambda: registry.publish_access(A, {"user.a": USER}),
    ):  # fmt: skip
        with pytest.raises(RegistryError, match="who may write users there may do everything"):
            refused()
    assert registry.change_access(A, 0, {"quota.topic.a": {"n": 1}}).version == 1


def _format(session: SimSession) -> object:
    return json.loads(session.get("/txmq/cluster").value)["format"]


def test_first_user_keeps_older_brokers_from_joining() -> None:
    session = SimZooKeeper().open()
    registry = _registry(session)
    registry.change_access(A, 0, {"quota.topic.a": {"n": 1}})
    assert _format(session) == 1  # what these read: they would serve nobody in spite of a refusal
    registry.change_access(A, 1, {"user.ops": USER})
    assert _format(session) == 2
    registry.change_access(A, 2, {"user.shop": USER})
    registry.change_access(A, 3, {"user.shop": None})
    assert _format(session) == 2
    assert registry.join(CLUSTER, Standing.MEMBER) == CLUSTER


def test_users_that_are_brought_keep_older_brokers_from_joining() -> None:
    session = SimZooKeeper().open()
    registry = _registry(session)
    registry.publish_access(A, {"quota.topic.a": {"n": 1}})
    assert _format(session) == 1
    registry.publish_access(A, {"user.ops": USER})
    assert _format(session) == 2


def test_cluster_that_is_founded_with_users_begins_so() -> None:
    session = SimZooKeeper().open()
    registry = ZooKeeperRegistry(session)
    registry.join(CLUSTER, Standing.USED, Brought(publisher=A))
    assert _format(session) == 2


def test_format_is_raised_with_the_user_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    session = SimZooKeeper().open()
    registry = _registry(session)
    transact = session.transact
    seen: list[bool] = []

    def watched(operations: Sequence[Operation]) -> object:
        paths = {operation.path for operation in operations}
        seen.append({"/txmq/cluster", "/txmq/access/user.ops"} <= paths)
        return transact(operations)

    monkeypatch.setattr(session, "transact", watched)
    registry.change_access(A, 0, {"user.ops": USER})
    assert seen == [True]


def _led_by_an_older_broker(ensemble: SimZooKeeper, home: int) -> ZooKeeperRegistry:
    """Its leader's node is as such a broker writes it."""
    session = ensemble.open()
    registry = ZooKeeperRegistry(session)
    registry.join(CLUSTER, Standing.MEMBER)
    registry.announce(registry.lead(candidate(home)))
    path = f"/txmq/homes/{home:016x}/replicas/1"
    fields = json.loads(session.get(path).value)
    assert fields.pop("format") == 2
    session.set_value(path, json.dumps(fields).encode(), session.get(path).stat.version)
    return registry


def test_first_user_waits_until_no_older_broker_leads_a_home() -> None:
    ensemble = SimZooKeeper()
    session = ensemble.open()
    registry = _registry(session)
    older = _led_by_an_older_broker(ensemble, B)
    for refused in (
        lambda: registry.change_access(A, 0, {"user.ops": USER}), lambda: registry.publish_access(A, {"user.a": USER}),
    ):  # fmt: skip
        with pytest.raises(RegistryError, match=f"{B:016x} is led at .* by an older txmq.*: upgrade all brokers"):
            refused()
    assert (registry.access(), _format(session)) == (NO_ACCESS, 1)
    assert registry.change_access(A, 0, {"quota.topic.a": {"n": 1}}).version == 1
    older.close()
    assert registry.change_access(A, 1, {"user.ops": USER}).version == 2
    assert _format(session) == 2


def test_former_older_process_of_the_home_itself_is_gone() -> None:
    ensemble = SimZooKeeper()
    session = ensemble.open()
    registry = _registry(session)
    _led_by_an_older_broker(ensemble, B)
    assert registry.change_access(B, 0, {"user.ops": USER}).version == 1
