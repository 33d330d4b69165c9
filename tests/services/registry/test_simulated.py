"""The simulated ZooKeeper does what a real one does, call by call."""

from __future__ import annotations

import pytest

from tests.services.registry.scripts import RealWorld, Run, SimWorld, Step, World, drawn
from txmq.registry.zookeeper.session import Check, Create, Delete, SetValue
from txmq.testing.processes.zookeeper import ZooKeeper

ONE_BY_ONE = {
    "versions": [
        Step(0, "create", "/a"), Step(0, "create", "/a"), Step(0, "set", "/a", 0), Step(1, "set", "/a", 0),
        Step(1, "set", "/a", 1), Step(1, "set", "/a", -1), Step(0, "delete", "/a", 0), Step(0, "delete", "/a", 3),
        Step(0, "set", "/a", 0), Step(0, "delete", "/a", 0), Step(0, "get", "/a"), Step(0, "exists", "/a"),
        Step(0, "create", "/a"), Step(1, "get", "/a"), Step(1, "set", "/a", 3), Step(1, "set", "/a", 0),
    ],
    "children": [
        Step(0, "create", "/a/b"), Step(0, "create", "/a"), Step(0, "create", "/a/b"), Step(0, "delete", "/a", 0),
        Step(0, "children", "/a"), Step(0, "children", "/e"), Step(0, "delete", "/a/b", 0), Step(0, "exists", "/a"),
        Step(0, "delete", "/a", 0),
    ],
    "ephemeral nodes": [
        Step(1, "create", "/e", is_ephemeral=True), Step(0, "create", "/e/f"), Step(0, "children", "", 0),
        Step(0, "watch", "/e"), Step(2, "exists", "/e"), Step(1, "expire"), Step(0, "exists", "/e"),
        Step(1, "create", "/e", is_ephemeral=True), Step(1, "disconnect"), Step(0, "get", "/e"),
        Step(2, "delete", "/e", 0),
    ],
    "sequences": [
        Step(0, "create", "/a"), Step(0, "next", "/a/s-"), Step(1, "next", "/a/s-"), Step(0, "create", "/a/b"),
        Step(0, "delete", "/a/b", 0), Step(1, "next", "/a/t-", is_ephemeral=True), Step(1, "expire"),
        Step(1, "next", "/a/s-"), Step(0, "children", "/a"), Step(0, "exists", "/a"), Step(0, "next", "/none/s-"),
    ],
    "watches": [
        Step(0, "exists", "/a"), Step(0, "watch", "/a"), Step(0, "children", ""), Step(1, "create", "/a"),
        Step(1, "set", "/a"), Step(0, "watch", "/a"), Step(2, "watch", "/a"), Step(0, "children", "/a"),
        Step(1, "set", "/a"), Step(1, "set", "/a"), Step(1, "create", "/a/b"), Step(0, "watch", "/a/b"),
        Step(0, "children", "/a/b"), Step(0, "children", "/a"), Step(1, "delete", "/a/b"),
        Step(0, "watch", "/a"), Step(0, "disconnect"), Step(1, "set", "/a"), Step(0, "watch", "/a"),
        Step(0, "expire"), Step(1, "delete", "/a"),
    ],
    "transactions": [
        Step(0, "transact", operations=(Create("/a", b"1"), Create("/a/b", b"2"), SetValue("/a", b"3", 0))),
        Step(0, "watch", "/a"), Step(0, "children", "/a"), Step(2, "exists", "/a/c"),
        Step(1, "transact", operations=(SetValue("/a", b"4", 1), Create("/a/c", b"5"), Check("/a/b", 1))),
        Step(1, "transact", operations=(Delete("/a/b", 0), Delete("/a", 1), Create("/a", b""), Delete("/a/c", 0))),
        Step(1, "transact", operations=(Delete("/a/b", 0), Delete("/a", 1), Check("/a", 0))),
        Step(1, "transact", operations=(Check("/a", 1), Delete("/a/b", 0), Create("/a/b", b"6", is_ephemeral=True))),
        Step(1, "transact", operations=(Create("/a/s-", b"", False, True), Create("/a/s-", b"", False, True))),
        Step(1, "expire"), Step(0, "children", "/a"), Step(0, "exists", "/a"),
    ],
}  # fmt: skip


def _trace(world: World, base: str, steps: list[Step]) -> tuple[list[object], list[object]]:
    run = Run(world, base)
    try:
        run.carry_out(steps)
        return [*run.trace], [*run.tree()]
    finally:
        run.close()


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_each_rule_by_a_script(zookeeper: ZooKeeper, name: str) -> None:
    base = "/" + name.replace(" ", "-")
    assert _trace(SimWorld(), base, ONE_BY_ONE[name]) == _trace(RealWorld(zookeeper), base, ONE_BY_ONE[name])


@pytest.mark.parametrize("seed", range(12))
def test_scripts_drawn_at_random(zookeeper: ZooKeeper, seed: int) -> None:
    base, steps = f"/seed-{seed}", drawn(seed, 80)
    assert _trace(SimWorld(), base, steps) == _trace(RealWorld(zookeeper), base, steps)
