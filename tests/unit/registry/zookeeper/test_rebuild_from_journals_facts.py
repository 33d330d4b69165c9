"""What the journals of homes add up to: the newest of everything, and nothing of what contradicts itself."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.registry.contract import CLUSTER, USER, A, B, topic
from txmq.errors import RegistryError
from txmq.registry.cluster_metadata import NO_ACCESS, Access, PlacedTopic
from txmq.registry.zookeeper.rebuild_from_journals import Facts, rebuilt

ORDERS = PlacedTopic(topic(1), (A, B), 1)


def facts(home: int = A, **fields: Any) -> Facts:
    made = Facts(CLUSTER, home, 3, (1, 2), (ORDERS,), 1, (), 0, {}, {}, NO_ACCESS)
    return made._replace(**fields)


def test_facts_are_read_as_they_were_written() -> None:
    full = facts(
        queries=("totals",), last_query_epoch=7, grants={"billing": 4}, retired={B: "burnt"},
        access=Access(2, {"user.ops": USER}),
    )  # fmt: skip
    assert Facts.from_json(json.loads(json.dumps(full.to_json()))) == full
    samples: list[object] = [{}, [], {**full.to_json(), "home": "b0"}, {**full.to_json(), "topics": [1]}]
    for broken in samples:
        with pytest.raises(RegistryError, match="not the facts of a home"):
            Facts.from_json(broken)
    with pytest.raises(RegistryError, match="upgrade txmq"):
        Facts.from_json({**full.to_json(), "format": 2})


def test_the_newest_of_everything_counts() -> None:
    altered = PlacedTopic(topic(1, partitions=3), (A, B, B), 5)
    users = Access(2, {"user.ops": USER})
    made = rebuilt(
        [
            facts(A, topics=(altered,), last_topic_id=9, grants={"billing": 4, "only": 1}, access=users),
            facts(B, last_query_epoch=8, grants={"billing": 6}, queries=("totals",), access=Access(1, {})),
        ],
        {},
    )
    assert (made.topics, made.version, made.last_topic_id, made.last_query_epoch) == ((altered,), 5, 9, 8)
    assert made.anchors == {("group", "billing"): B, ("group", "only"): A, ("query", "totals"): B}
    assert (made.access, made.notes) == (users, ())


def test_a_topic_that_one_home_lacks_is_kept() -> None:
    made = rebuilt([facts(A, topics=()), facts(B)], {})
    assert made.topics == (ORDERS,)
    [note] = made.notes
    assert f"'orders' is kept, and home {A:016x} does not know it" in note


def test_facts_that_are_missing_are_named() -> None:
    with pytest.raises(RegistryError, match=f"home {B:016x} has partitions: give its facts"):
        rebuilt([facts(A)], {})
    assert rebuilt([facts(A)], {B: "burnt"}).retired == {B: "burnt"}
    assert rebuilt([facts(A, retired={B: "burnt"})], {}).retired == {B: "burnt"}
    with pytest.raises(RegistryError, match="is given up, and has facts"):
        rebuilt([facts(A), facts(B)], {B: "burnt"})


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (facts(B, cluster=0xAA), "of each home of one cluster"),
        (facts(A), "of each home of one cluster"),
        (facts(B, topics=(ORDERS._replace(homes=(B, A)),)), "in two ways of version 1"),
        (facts(B, topics=(ORDERS, PlacedTopic(topic(2), (A, B), 2))), "'orders' is known with ids 1 and 2"),
    ],
)
def test_contradictions_are_refused(other: Facts, why: str) -> None:
    with pytest.raises(RegistryError, match=why):
        rebuilt([facts(A), other], {})


def test_a_query_has_one_home() -> None:
    with pytest.raises(RegistryError, match="query 'totals' is that of home"):
        rebuilt([facts(A, queries=("totals",)), facts(B, queries=("totals",))], {})
