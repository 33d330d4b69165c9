"""What every registry keeps, as tests to inherit: ``RegistryContract`` for one broker, ``ClusterContract`` for more."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest

from txmq.errors import (
    DeletionPendingError,
    DuplicateBrokerError,
    ForeignClusterError,
    HomeInUseError,
    HomeSupersededError,
    InvalidNameError,
    RegistryConflictError,
    RegistryError,
    TopicExistsError,
    UnknownTopicError,
)
from txmq.model import Storage, TopicConfig
from txmq.registry.cluster_metadata import (
    IDS_PER_CALL_MAX,
    NO_ACCESS,
    Access,
    Brought,
    Candidate,
    DeletedTopic,
    HomeEntry,
    Leadership,
    PlacedTopic,
    Registry,
    Standing,
    TopicMap,
)
from txmq.registry.topics import Topic

CLUSTER, A, B = 0xC1A5, 0xA0, 0xB0
USER: dict[str, object] = {"keys": None, "certificate": "CN=ops", "grants": []}


def candidate(home: int = A, start: int = 1, *, former: tuple[int, ...] = (), epoch: int = 0) -> Candidate:
    """A process that starts over the home's directory."""
    address = f"10.0.0.{start}:8123"
    return Candidate(home, f"broker-{home:x}", address, start, frozenset(former), epoch, f"lock of {home}")


def topic(topic_id: int, name: str = "orders", partitions: int = 2, **settings: int | None) -> Topic:
    """A topic to create."""
    return Topic(topic_id, TopicConfig(name, partitions=partitions, **settings))  # type: ignore[arg-type]


class RegistryContract:
    """One broker, whose home is A."""

    def fresh(self) -> Registry:
        """A registry that nobody has used, of a broker of its own."""
        raise NotImplementedError

    @pytest.fixture
    def registry(self) -> Iterator[Registry]:
        """A registry in which the cluster is founded, and home A is led."""
        registry = self.fresh()
        assert registry.join(CLUSTER, Standing.USED) == CLUSTER
        registry.announce(registry.lead(candidate()))
        yield registry
        registry.close()

    # --- the cluster and the home ------------------------------------------------------------------------------------

    @pytest.mark.parametrize("standing", Standing)
    def test_a_member_joins_again_and_again(self, registry: Registry, standing: Standing) -> None:
        assert registry.join(CLUSTER, standing) == CLUSTER

    @pytest.mark.parametrize("standing", [Standing.USED, Standing.MEMBER])
    def test_a_directory_of_another_cluster_is_refused(self, registry: Registry, standing: Standing) -> None:
        with pytest.raises(ForeignClusterError, match=r"belongs to cluster 00000000000000aa, .*000000000000c1a5"):
            registry.join(0xAA, standing)

    def test_an_empty_directory_takes_the_id_of_the_cluster(self, registry: Registry) -> None:
        assert registry.join(0xAA, Standing.EMPTY) == CLUSTER

    def test_ids_are_above_those_that_the_founder_has_given(self) -> None:
        registry = self.fresh()
        registry.join(CLUSTER, Standing.USED, Brought(last_topic_id=7))
        assert registry.reserve_topic_ids(1) == range(8, 9)
        registry.close()

    def test_each_start_draws_a_higher_epoch(self, registry: Registry) -> None:
        first = registry.lead(candidate())
        assert first == Leadership(candidate(), 1)
        second = registry.lead(candidate(start=2, former=(1,), epoch=1))
        third = registry.lead(candidate(start=3, former=(1, 2), epoch=700))  # a journal from before
        assert (second.epoch, third.epoch) == (2, 701)

    def test_a_claim_that_is_repeated_gets_the_same_epoch(self, registry: Registry) -> None:
        again = candidate(start=2, former=(1,), epoch=1)
        assert registry.lead(again) == registry.lead(again)

    def test_directory_that_misses_the_last_leader_is_refused(self, registry: Registry) -> None:
        registry.lead(candidate(start=2, former=(1,)))
        with pytest.raises(HomeSupersededError, match="does not know"):
            registry.lead(candidate(start=3, former=(1,), epoch=1))

    def test_a_superseded_leader_announces_nothing(self, registry: Registry) -> None:
        first = registry.lead(candidate())
        second = registry.lead(candidate(start=2, former=(1,)))
        with pytest.raises(HomeSupersededError, match="stop"):
            registry.announce(first)
        registry.announce(second)
        registry.announce(second)
        assert registry.homes() == [HomeEntry(A, "broker-a0", 2, "10.0.0.2:8123")]

    def test_replicas_are_told_with_their_home(self, registry: Registry) -> None:
        told: list[str] = []
        registry.homes(lambda: told.append("homes"))
        registry.announce_replica(A, 7, "10.0.0.7:8126")
        self.settle(registry)
        assert told
        for _ in range(2):  # again: nothing changes
            registry.announce_replica(A, 5, "10.0.0.5:8126")
        [home] = registry.homes()
        assert (home.address, home.replicas) == ("10.0.0.1:8123", ("10.0.0.5:8126", "10.0.0.7:8126"))

    def test_a_home_that_is_led_is_not_retired(self, registry: Registry) -> None:
        with pytest.raises(HomeInUseError, match="it is not lost"):
            registry.retire_home(A, "ada: disk burnt")
        with pytest.raises(RegistryError):
            registry.retire_home(0x77, "ada: disk burnt")
        assert registry.homes() == [HomeEntry(A, "broker-a0", 1, "10.0.0.1:8123")]

    def test_a_change_of_leader_is_told(self, registry: Registry) -> None:
        told: list[str] = []
        assert registry.homes(lambda: told.append("homes"))[0].address == "10.0.0.1:8123"
        assert told == []
        registry.announce(registry.lead(candidate(start=2, former=(1,))))
        self.settle(registry)
        assert told

    def settle(self, registry: Registry) -> None:
        """Return when listeners that are due have been called."""

    # --- topics ------------------------------------------------------------------------------------------------------

    def test_ids_of_topics_are_drawn_once_and_grow(self, registry: Registry) -> None:
        assert registry.reserve_topic_ids(3) == range(1, 4)
        assert registry.reserve_topic_ids(1, above=2) == range(4, 5)
        assert registry.reserve_topic_ids(2, above=100) == range(101, 103)
        assert registry.reserve_topic_ids(1) == range(103, 104)
        for count in (0, -1, IDS_PER_CALL_MAX + 1):
            with pytest.raises(RegistryError, match="1 to 10000 can be drawn"):
                registry.reserve_topic_ids(count)

    def test_a_created_topic_stands_in_the_map_with_its_settings(self, registry: Registry) -> None:
        config = dataclasses.replace(
            TopicConfig("orders", partitions=3),
            storage=Storage.MEMORY,
            retention_size_bytes=1 << 40,
            segment_age_ms=None,
            accept_publish=False,
        )
        placed = registry.create_topic(Topic(7, config), [A, A, A])
        assert placed == PlacedTopic(Topic(7, config), (A, A, A), 1)
        assert registry.topics() == TopicMap(1, (placed,), ())

    def test_an_id_brought_along_is_not_drawn_again(self, registry: Registry) -> None:
        registry.create_topic(topic(40), [A, A])
        registry.create_topic(topic(7, "audit"), [A, A])
        assert registry.reserve_topic_ids(1) == range(41, 42)

    def test_creating_the_same_topic_again_changes_nothing(self, registry: Registry) -> None:
        placed = registry.create_topic(topic(1), [A, A])
        assert registry.create_topic(topic(1), [A, A]) == placed
        with pytest.raises(TopicExistsError):
            registry.create_topic(topic(2), [A, A])
        assert registry.topics() == TopicMap(1, (placed,), ())

    def test_settings_change_and_partitions_are_added(self, registry: Registry) -> None:
        placed = registry.create_topic(topic(1), [A, A])
        more = placed._replace(topic=topic(1, partitions=3, retention_ms=5000), homes=(A, A, A))
        altered = registry.alter_topic(more)
        assert altered == more._replace(version=2)
        assert registry.alter_topic(more) == altered  # repeated: it is so already
        assert registry.topics() == TopicMap(2, (altered,), ())

    def test_an_alteration_of_what_was_changed_since_is_refused(self, registry: Registry) -> None:
        placed = registry.create_topic(topic(1), [A, A])
        registry.alter_topic(placed._replace(topic=topic(1, retention_ms=5000)))
        with pytest.raises(RegistryConflictError, match="read it again"):
            registry.alter_topic(placed._replace(topic=topic(1, retention_ms=6000)))
        assert registry.topics().topics[0].topic.config.retention_ms == 5000

    def test_what_cannot_be_altered_is_refused(self, registry: Registry) -> None:
        placed = registry.create_topic(topic(1), [A, A])
        refused = [
            placed._replace(topic=topic(1, partitions=1), homes=(A,)),
            placed._replace(homes=(A,)),
            placed._replace(homes=(A, B)),
            placed._replace(topic=Topic(1, dataclasses.replace(placed.topic.config, storage=Storage.MEMORY))),
        ]
        for changed in refused:
            with pytest.raises(RegistryError):
                registry.alter_topic(changed)
        for unknown in (topic(2), topic(1, "other")):
            with pytest.raises(UnknownTopicError):
                registry.alter_topic(placed._replace(topic=unknown))
        assert registry.topics() == TopicMap(1, (placed,), ())

    def test_a_topic_needs_a_name_and_known_homes(self, registry: Registry) -> None:
        for name in ("", "..", "a/b", "x" * 201):
            with pytest.raises(InvalidNameError):
                registry.create_topic(topic(1, name), [A, A])
        for homes in ([A], [A, A, A], [A, 0x77]):
            with pytest.raises(RegistryError):
                registry.create_topic(topic(1), homes)
        assert registry.topics() == TopicMap(0, (), ())

    def test_a_deleted_topic_is_listed_until_its_home_dropped_it(self, registry: Registry) -> None:
        registry.create_topic(topic(1), [A, A])
        registry.delete_topic(topic(1))
        assert registry.topics() == TopicMap(2, (), (DeletedTopic(1, "orders", (A,)),))
        registry.drop_topic(1, B)
        registry.drop_topic(2, A)
        with pytest.raises(DeletionPendingError, match=f"{A:016x}"):
            registry.create_topic(topic(2), [A, A])
        other = registry.create_topic(topic(3, "other"), [A, A])
        assert registry.topics() == TopicMap(3, (other,), (DeletedTopic(1, "orders", (A,)),))
        registry.drop_topic(1, A)
        registry.drop_topic(1, A)
        again = registry.create_topic(topic(2), [A, A])  # the name is free
        assert registry.topics() == TopicMap(4, (again, other), ())

    def test_deleting_names_one_topic_by_its_id(self, registry: Registry) -> None:
        placed = registry.create_topic(topic(2), [A, A])
        for unknown in (topic(1), topic(2, "other")):
            with pytest.raises(UnknownTopicError):
                registry.delete_topic(unknown)
        assert registry.topics() == TopicMap(1, (placed,), ())

    def test_each_change_of_the_map_is_told_once(self, registry: Registry) -> None:
        told: list[str] = []
        changes: list[Callable[[], object]] = [
            lambda: registry.create_topic(topic(1), [A, A]),
            lambda: registry.alter_topic(PlacedTopic(topic(1, retention_ms=1), (A, A), 1)),
            lambda: registry.delete_topic(topic(1)),
        ]
        for number, change in enumerate(changes):
            registry.topics(lambda: told.append("topics"))
            self.settle(registry)
            assert len(told) == number
            change()
            registry.reserve_topic_ids(1)
            self.settle(registry)
            assert len(told) == number + 1

    # --- queries and groups ------------------------------------------------------------------------------------------

    def test_epochs_of_drivers_are_drawn_once_and_grow(self, registry: Registry) -> None:
        assert [registry.draw_query_epoch() for _ in range(3)] == [1, 2, 3]
        assert [registry.draw_query_epoch(above=2), registry.draw_query_epoch(above=100)] == [4, 101]
        registry.join(CLUSTER, Standing.MEMBER, Brought(last_query_epoch=7))
        assert registry.draw_query_epoch() == 102
        registry.join(CLUSTER, Standing.MEMBER, Brought(last_query_epoch=200))
        assert registry.draw_query_epoch() == 201

    def test_epochs_are_above_those_that_the_founder_has_given(self) -> None:
        registry = self.fresh()
        registry.join(CLUSTER, Standing.USED, Brought(last_query_epoch=7))
        assert registry.draw_query_epoch() == 8
        registry.close()

    def test_anchors_that_are_there_are_told(self, registry: Registry) -> None:
        registry.anchor("query", "q", A)
        registry.anchor("group", "other", A)
        assert registry.anchors("query", ["other", "q", "none"]) == {"q": A}
        assert registry.anchors("query", []) == {}

    def test_the_home_of_a_group_is_the_first_one_named(self, registry: Registry) -> None:
        assert registry.anchor("group", "billing", A) == A
        assert registry.anchor("query", "billing", A) == A
        with pytest.raises(RegistryError):
            registry.anchor("group", "other", 0x77)
        for kind, name in (("group", "a/b"), ("gr/up", "a"), ("", "a")):
            with pytest.raises(InvalidNameError):
                registry.anchor(kind, name, A)

    def test_a_released_name_chooses_anew(self, registry: Registry) -> None:
        registry.anchor("group", "billing", A)
        registry.release_anchor("group", "billing", A)
        registry.release_anchor("group", "billing", A)
        assert registry.anchor("group", "billing", A) == A

    # --- users, grants and quotas ------------------------------------------------------------------------------------

    def test_users_are_changed_as_of_a_version(self, registry: Registry) -> None:
        assert registry.access() == NO_ACCESS
        first = registry.change_access(A, 0, {"user.ops": USER, "secret": {"mock": "5ec"}})
        assert first == registry.access() == Access(1, {"user.ops": USER, "secret": {"mock": "5ec"}})
        second = registry.change_access(A, 1, {"user.ops": None, "user.shop": USER, "quota.topic.a": {"n": 1}})
        assert second == Access(2, {"secret": {"mock": "5ec"}, "user.shop": USER, "quota.topic.a": {"n": 1}})
        with pytest.raises(RegistryConflictError, match="version 2"):
            registry.change_access(A, 1, {"user.ops": USER})
        assert registry.change_access(A, 2, {"user.nobody": None}) == second._replace(version=3)
        assert registry.access() == second._replace(version=3)

    def test_a_look_at_users_changes_nothing(self, registry: Registry) -> None:
        changed = registry.change_access(A, 0, {"user.ops": USER})
        assert registry.change_access(A, 1, {}) == changed == registry.access()
        with pytest.raises(RegistryConflictError):
            registry.change_access(A, 0, {})

    def test_many_users_at_once_are_refused(self, registry: Registry) -> None:
        with pytest.raises(RegistryError, match="11 records in one change: at most 10"):
            registry.change_access(A, 0, {f"user.u{number}": USER for number in range(11)})
        assert registry.access() == NO_ACCESS

    def test_users_are_brought_to_a_cluster_that_has_none(self, registry: Registry) -> None:
        registry.change_access(A, 0, {"quota.topic.a": {"n": 1}})
        brought = {f"user.u{number}": {**USER, "certificate": "x" * 900} for number in range(700)}
        registry.publish_access(A, brought)
        assert registry.access() == Access(2, {"quota.topic.a": {"n": 1}, **brought})
        registry.publish_access(A, {"user.other": USER})  # what the cluster has is the truth
        assert registry.access().version == 2
        assert registry.change_access(A, 2, {"user.u1": None}).records.keys() == {
            "quota.topic.a", *brought
        } - {"user.u1"}  # fmt: skip

    def test_quotas_are_brought_to_a_cluster_that_never_had_any(self, registry: Registry) -> None:
        registry.publish_access(A, {"quota.topic.a": {"n": 1}})
        registry.publish_access(A, {"quota.topic.b": {"n": 1}})
        assert registry.access() == Access(1, {"quota.topic.a": {"n": 1}})

    def test_each_change_of_users_is_told_once(self, registry: Registry) -> None:
        told: list[str] = []
        for version in range(3):
            registry.access(lambda: told.append("access"))
            assert len(told) == version
            registry.change_access(A, version, {"user.ops": {**USER, "n": version}})
            registry.reserve_topic_ids(1)
            self.settle(registry)
            assert len(told) == version + 1


class ClusterContract(RegistryContract):
    """Several brokers over one ensemble."""

    def another(self) -> Registry:
        """The registry of another process, over the same ensemble as the last fresh one."""
        raise NotImplementedError

    def expire(self, registry: Registry) -> None:
        """The session of the registry's process expires."""
        raise NotImplementedError

    @pytest.fixture
    def other(self, registry: Registry) -> Iterator[Registry]:
        """Home B is led, too, by another broker."""
        other = self.another()
        assert other.join(0xAA, Standing.EMPTY) == CLUSTER
        other.announce(other.lead(candidate(B)))
        yield other
        other.close()

    def test_all_see_the_same_users(self, registry: Registry, other: Registry) -> None:
        for version in range(80):  # more than the newest changes that are named
            changing, reading = (registry, other) if version % 2 else (other, registry)
            changed = changing.change_access(B, version, {f"user.u{version % 7}": {**USER, "n": version}})
            if version % 5 == 0 or version > 40:
                assert reading.access() == changed
            if version == 40:
                assert self.another().access() == changed
        assert registry.access() == other.access()

    def test_nobody_reads_users_that_are_yet_to_be_published(self) -> None:
        registry = self.fresh()
        registry.join(CLUSTER, Standing.USED, Brought(publisher=A))
        other = self.another()
        other.join(CLUSTER, Standing.MEMBER)
        for call in (
            other.access, lambda: other.change_access(B, 0, {}), lambda: other.publish_access(B, {"user.x": USER}),
        ):  # fmt: skip
            with pytest.raises(RegistryConflictError, match=f"home {A:016x} brings users .* start its broker"):
                call()
        registry.publish_access(A, {"user.ops": USER})
        assert other.access() == Access(1, {"user.ops": USER})
        for each in (registry, other):
            each.close()

    def test_all_see_all_homes_and_topics(self, registry: Registry, other: Registry) -> None:
        placed = registry.create_topic(topic(1), [A, B])
        homes = [HomeEntry(A, "broker-a0", 1, "10.0.0.1:8123"), HomeEntry(B, "broker-b0", 1, "10.0.0.1:8123")]
        for each in (registry, other):
            assert each.homes() == homes
            assert each.topics() == TopicMap(1, (placed,), ())

    def test_a_change_of_one_is_told_to_the_other(self, registry: Registry, other: Registry) -> None:
        told: list[str] = []
        other.topics(lambda: told.append("topics"))
        other.homes(lambda: told.append("homes"))
        registry.create_topic(topic(1), [A, B])
        self.settle(other)
        assert told == ["topics"]
        registry.close()
        self.settle(other)
        assert "homes" in told

    def test_no_epoch_is_drawn_by_two(self, registry: Registry, other: Registry) -> None:
        drawn = [each.draw_query_epoch() for _ in range(5) for each in (registry, other)]
        assert drawn == sorted({*drawn})

    def test_no_id_is_drawn_by_two(self, registry: Registry, other: Registry) -> None:
        drawn = [number for _ in range(5) for each in (registry, other) for number in each.reserve_topic_ids(3)]
        assert len(set(drawn)) == 30

    def test_each_home_drops_a_deleted_topic_for_itself(self, registry: Registry, other: Registry) -> None:
        registry.create_topic(topic(1, partitions=3), [B, A, B])
        other.delete_topic(topic(1))
        assert registry.topics().deleted == (DeletedTopic(1, "orders", (A, B)),)
        registry.drop_topic(1, A)
        assert other.topics().deleted == (DeletedTopic(1, "orders", (B,)),)
        other.drop_topic(1, B)
        assert registry.topics().deleted == ()

    def test_two_processes_anchor_one_home(self, registry: Registry, other: Registry) -> None:
        assert registry.anchor("group", "billing", B) == other.anchor("group", "billing", A) == B
        registry.release_anchor("group", "billing", A)
        assert other.anchor("group", "billing", A) == B  # another home's anchor stays
        registry.release_anchor("group", "billing", B)
        assert other.anchor("group", "billing", A) == A

    def test_two_homes_have_two_names(self, registry: Registry, other: Registry) -> None:
        third = self.another()
        with pytest.raises(DuplicateBrokerError, match=r"'broker-a0' is that of home 0+a0: .* another broker_name"):
            third.lead(candidate(0xC0)._replace(name="broker-a0"))
        assert [home.home for home in registry.homes()] == [A, B]
        third.lead(candidate(0xC0))
        with pytest.raises(InvalidNameError):
            third.lead(candidate(0xD0)._replace(name="a/b"))
        third.close()

    def test_a_home_that_changes_its_name_frees_the_former_one(self, registry: Registry) -> None:
        registry.lead(candidate(start=2, former=(1,))._replace(name="renamed"))
        other = self.another()
        other.lead(candidate(B)._replace(name="broker-a0"))
        assert [home.name for home in other.homes()] == ["renamed", "broker-a0"]
        other.close()

    def test_a_restart_does_not_wait_for_the_former_session(self, registry: Registry) -> None:
        """Killed and started at once: the session of the process before still lives, and the lock proves it gone."""
        again = self.another()
        again.announce(again.lead(candidate(start=2, former=(1,))))
        assert again.homes() == [HomeEntry(A, "broker-a0", 2, "10.0.0.2:8123")]
        self.expire(registry)  # the former session ends late, and takes nothing along
        assert again.homes() == [HomeEntry(A, "broker-a0", 2, "10.0.0.2:8123")]
        again.close()

    def test_a_copied_directory_does_not_start_beside_the_original(self, registry: Registry) -> None:
        copy = self.another()
        copied = candidate(start=2, former=(1,))._replace(lock="another lock")
        with pytest.raises(HomeInUseError, match=r"led at 10\.0\.0\.1:8123"):
            copy.lead(copied)
        registry.close()
        copy.announce(copy.lead(copied))
        original = self.another()
        with pytest.raises(HomeSupersededError):
            original.lead(candidate(start=3, former=(1,)))
        copy.close()
        with pytest.raises(HomeSupersededError):
            original.lead(candidate(start=3, former=(1,)))
        original.close()

    def test_a_leader_whose_session_expired_announces_again(self, registry: Registry, other: Registry) -> None:
        leadership = registry.lead(candidate())
        for _ in range(3):
            self.expire(registry)
            assert other.homes()[0] == HomeEntry(A, "broker-a0", 1, None)
            registry.announce(leadership)
            assert other.homes()[0] == HomeEntry(A, "broker-a0", 1, "10.0.0.1:8123")

    def test_a_replica_is_told_for_as_long_as_it_lives(self, registry: Registry, other: Registry) -> None:
        registry.announce(registry.lead(candidate()))
        other.announce_replica(A, 7, "10.0.0.7:8126")
        assert registry.homes()[0].replicas == ("10.0.0.7:8126",)
        self.expire(other)
        assert registry.homes()[0].replicas == ()
        other.announce_replica(A, 7, "10.0.0.8:8126")
        assert registry.homes()[0].replicas == ("10.0.0.8:8126",)
        registry.announce_replica(A, 7, "10.0.0.9:8126")  # the next process, before the session of the former expires
        assert registry.homes()[0].replicas == ("10.0.0.9:8126",)

    def test_a_paused_leader_that_was_superseded_finds_out(self, registry: Registry) -> None:
        leadership = registry.lead(candidate())
        self.expire(registry)
        successor = self.another()
        successor.announce(successor.lead(candidate(start=2, former=(1,))._replace(lock="another host")))
        with pytest.raises(HomeSupersededError):
            registry.announce(leadership)
        assert successor.homes() == [HomeEntry(A, "broker-a0", 2, "10.0.0.2:8123")]
        successor.close()

    def test_a_member_does_not_found_a_cluster_anew(self) -> None:
        """An ensemble that was wiped, or a wrong chroot, is no reason to forget anything."""
        registry = self.fresh()
        with pytest.raises(RegistryError, match="is not in ZooKeeper, and this directory is a member"):
            registry.join(CLUSTER, Standing.MEMBER)
        with pytest.raises(RegistryError, match="is not in ZooKeeper: correct the address"):
            registry.topics()
        registry.close()
