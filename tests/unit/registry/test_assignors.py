"""Assignors: properties of all of them, and of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from txmq.model import TopicPartition
from txmq.registry.assignors import ASSIGNORS, Owners, exclusive, range_, round_robin, sticky

from ...growth import growth

TOPICS = ("a", "b", "c")
NAMES = st.sampled_from([f"m{number}" for number in range(8)])
PARTITIONS = st.dictionaries(st.sampled_from(TOPICS), st.integers(0, 12))
MEMBERS = st.dictionaries(NAMES, st.lists(st.sampled_from(TOPICS), unique=True))
SAME_WISH = st.sets(NAMES, min_size=1).map(lambda names: dict.fromkeys(names, TOPICS))
CURRENT = st.dictionaries(st.tuples(st.sampled_from(TOPICS), st.integers(0, 15)), NAMES)
EACH = pytest.mark.parametrize("name", ASSIGNORS)


def loads(owners: Owners, members: Iterable[str]) -> list[int]:
    """How many partitions each member has."""
    counts = Counter(owners.values())
    return [counts[member] for member in members]


# One draw for all strategies: it takes longer than they do.
@settings(max_examples=200)
@given(members=MEMBERS, partitions=PARTITIONS, current=CURRENT)
def test_each_wanted_partition_has_one_owner_who_wants_it(
    members: dict[str, list[str]], partitions: dict[str, int], current: dict[TopicPartition, str]
) -> None:
    wanted = {topic for topics in members.values() for topic in topics}
    slots = {(t, n) for t, count in partitions.items() if t in wanted for n in range(count)}
    for name, strategy in ASSIGNORS.items():
        owners = strategy(members, partitions, current)
        assert owners.keys() == slots, name
        assert all(topic in members[owner] for (topic, _), owner in owners.items()), name


@settings(max_examples=200)
@given(members=MEMBERS, partitions=PARTITIONS, current=CURRENT)
def test_the_order_in_which_facts_are_told_does_not_matter(
    members: dict[str, list[str]], partitions: dict[str, int], current: dict[TopicPartition, str]
) -> None:
    turned_members, turned_partitions, turned_current = (
        dict(reversed(members.items())), dict(reversed(partitions.items())), dict(reversed(current.items()))
    )  # fmt: skip
    for name, strategy in ASSIGNORS.items():
        expected = strategy(members, partitions, current)
        assert strategy(turned_members, turned_partitions, turned_current) == expected, name


@given(members=SAME_WISH, partitions=PARTITIONS, current=CURRENT)
def test_sticky_and_round_robin_are_balanced(
    members: dict[str, tuple[str, ...]], partitions: dict[str, int], current: dict[TopicPartition, str]
) -> None:
    for strategy in (sticky, round_robin):
        found = loads(strategy(members, partitions, current), members)
        assert max(found) - min(found) <= 1


@settings(max_examples=300)
@given(members=MEMBERS, partitions=PARTITIONS, current=CURRENT)
def test_sticky_leaves_nothing_to_be_moved_that_would_lessen_difference(
    members: dict[str, list[str]], partitions: dict[str, int], current: dict[TopicPartition, str]
) -> None:
    owners = sticky(members, partitions, current)
    load = Counter(owners.values())
    for (topic, _), rich in owners.items():
        assert all(load[rich] - load[poor] < 2 for poor, topics in members.items() if topic in topics)
    assert sticky(members, partitions, owners) == owners


def _everything_at_one(members: int) -> Callable[[], object]:
    """10 partitions a member; one has them all, and holds them until it has released them; half want more."""
    wishes = {f"m{number}": ("big", "other")[: 1 + number % 2] for number in range(members)}
    partitions = {"big": 10 * members, "other": 2}
    current = {("big", number): "m0" for number in range(10 * members)}
    return lambda: sticky(wishes, partitions, current)


def test_levelling_cost_per_partition_does_not_grow_with_members() -> None:
    """500 members of 5,000 partitions took seconds, in which everybody waited for the broker."""
    assert growth(_everything_at_one, 20, 500) < 5


@given(members=SAME_WISH, count=st.integers(0, 40))
def test_range_is_contiguous_and_balanced_within_a_topic(members: dict[str, tuple[str, ...]], count: int) -> None:
    owners = range_(members, {"a": count}, {})
    in_order = [owners["a", number] for number in range(count)]
    assert in_order == sorted(in_order)
    found = loads(owners, members)
    assert max(found) - min(found) <= 1


@given(members=SAME_WISH, partitions=PARTITIONS, gone=NAMES)
def test_who_leaves_a_sticky_group_moves_only_what_he_had(
    members: dict[str, tuple[str, ...]], partitions: dict[str, int], gone: str
) -> None:
    before = sticky(members, partitions, {})
    members.pop(gone, None)
    after = sticky(members, partitions, before)
    if members:
        assert all(after[slot] == owner for slot, owner in before.items() if owner != gone)


@given(members=SAME_WISH, partitions=PARTITIONS)
def test_who_joins_sticky_group_takes_no_more_than_his_share(
    members: dict[str, tuple[str, ...]], partitions: dict[str, int]
) -> None:
    before = sticky(members, partitions, {})
    after = sticky({**members, "new": TOPICS}, partitions, before)
    moved = [slot for slot, owner in after.items() if before[slot] != owner]
    assert all(after[slot] == "new" for slot in moved)
    assert len(moved) <= sum(partitions.values()) // (len(members) + 1)


@given(members=SAME_WISH, partitions=PARTITIONS)
def test_a_sticky_group_that_did_not_change_moves_nothing(
    members: dict[str, tuple[str, ...]], partitions: dict[str, int]
) -> None:
    before = sticky(members, partitions, {})
    assert sticky(members, partitions, before) == before


@given(members=SAME_WISH, partitions=PARTITIONS, more=PARTITIONS)
def test_owner_of_everything_keeps_it_and_gets_new_partitions(
    members: dict[str, tuple[str, ...]], partitions: dict[str, int], more: dict[str, int]
) -> None:
    before = exclusive(members, partitions, {})
    grown = {topic: max(partitions.get(topic, 0), more.get(topic, 0)) for topic in TOPICS}
    after = exclusive({"a-newcomer": TOPICS, **members}, grown, before)
    assert len(set(after.values())) <= 1
    assert not before or set(after.values()) == set(before.values())


@given(members=SAME_WISH, partitions=PARTITIONS, gone=NAMES)
def test_who_leaves_a_ring_moves_only_what_he_had(
    members: dict[str, tuple[str, ...]], partitions: dict[str, int], gone: str
) -> None:
    ring = ASSIGNORS["consistent-hash"]
    before = ring(members, partitions, {})
    members.pop(gone, None)
    after = ring(members, partitions, {})
    assert all(after[slot] == owner for slot, owner in before.items() if owner != gone and slot in after)


@EACH
@pytest.mark.parametrize(("partitions", "members"), [(10, 3), (10, 4), (3, 10)])
def test_every_partition_of_metaqs_own_cases_is_consumed(name: str, partitions: int, members: int) -> None:
    group = {f"m{number}": ("a",) for number in range(members)}
    owners = ASSIGNORS[name](group, {"a": partitions}, {})
    assert len(owners) == partitions
    if name == "exclusive":
        assert loads(owners, group)[0] == partitions
    elif name != "consistent-hash":
        assert max(loads(owners, group)) - min(loads(owners, group)) <= 1


@EACH
def test_cost_of_many_topics_grows_with_them_alone(name: str) -> None:
    def joining(topics: int) -> Callable[[], object]:
        wanted = tuple(f"t{number:04}" for number in range(topics))
        members, partitions = {f"m{number:02}": wanted for number in range(20)}, dict.fromkeys(wanted, 1)
        current = dict.fromkeys(((topic, 0) for topic in wanted), "m00")
        return lambda: ASSIGNORS[name](members, partitions, current)

    assert growth(joining, 50, 800) < 4
