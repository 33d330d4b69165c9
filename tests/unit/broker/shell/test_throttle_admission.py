"""Which connections are let in, overall and from one address."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from txmq.broker.shell import throttle as admission_module
from txmq.broker.shell.throttle import Admission
from txmq.config import BrokerSettings


def admission(total: int = 100, each: int | None = None, per_s: int | None = None) -> Admission:
    return Admission(
        BrokerSettings(
            connections_max=total, connections_per_address_max=each, connects_per_address_per_s_max=per_s
        )
    )  # fmt: skip


def test_all_together_are_limited() -> None:
    door = admission(total=2)
    assert door.enter("10.0.0.1:1", 0.0) is None
    assert door.enter("10.0.0.2:1", 0.0) is None
    assert door.enter("10.0.0.3:1", 0.0) == "connections_max 2 is reached"
    door.leave("10.0.0.3:1")
    door.leave("10.0.0.1:1")
    assert door.enter("10.0.0.3:1", 0.0) is None
    assert door.refused == 1


def test_address_that_has_its_share_leaves_room_to_others() -> None:
    door = admission(each=2)
    assert [door.enter(f"10.0.0.1:{port}", 0.0) is None for port in range(1, 4)] == [True, True, False]
    told = door.enter("10.0.0.1:4", 0.0)
    assert told == "connections_per_address_max 2 is reached by 10.0.0.1: close some of its connections"
    assert door.enter("10.0.0.2:1", 0.0) is None
    for port in (1, 3, 4):
        door.leave(f"10.0.0.1:{port}")
    assert door.enter("10.0.0.1:5", 0.0) is None
    assert door.refused == 2


@pytest.mark.parametrize(
    ("addresses", "are_one"),
    [
        (["[2001:db8::1]:1", "[2001:db8::ffff:1]:1"], True),
        (["[2001:db8::1]:1", "[2001:db8:0:1::1]:1"], False),
        (["[::ffff:10.0.0.1]:1", "10.0.0.1:2"], True),
        (["[::ffff:10.0.0.1]:1", "[::ffff:10.0.0.2]:1"], False),
        (["[fe80::1%eth0]:1", "[fe80::2%eth0]:1"], True),
        (["", ""], True),
    ],
)
def test_network_of_ipv6_host_is_one_address(addresses: Sequence[str], are_one: bool) -> None:
    door = admission(each=1)
    first, second = addresses
    assert door.enter(first, 0.0) is None
    assert (door.enter(second, 0.0) is None) is not are_one


def test_nothing_is_kept_of_those_that_have_gone() -> None:
    door = admission(each=1)
    for number in range(100):
        door.enter(f"10.0.0.{number}:1", 0.0)
        door.enter(f"10.0.0.{number}:2", 0.0)
        door.leave(f"10.0.0.{number}:2")
        door.leave(f"10.0.0.{number}:1")
    assert not door._per_address


def test_address_that_comes_too_often_is_refused_for_a_while() -> None:
    door = admission(total=10_000, per_s=2)
    came = [door.enter(f"10.0.0.1:{port}", 100.0) for port in range(30)]
    assert [refusal is None for refusal in came] == [True] * 21 + [False] * 9  # ten seconds' worth, and one
    assert came[-1] is not None
    assert came[-1].startswith("connects_per_address_per_s_max 2 is exceeded by 10.0.0.1")
    assert door.enter("10.0.0.2:1", 100.0) is None
    assert [door.enter("10.0.0.1:1", 101.0) is None for _ in range(4)] == [True, True, False, False]
    assert door.refused == 11


def test_addresses_that_came_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_module, "BUCKETS_MAX", 3)
    door = admission(per_s=1)
    for number in range(10):
        door.enter(f"10.0.0.{number}:1", 0.0)
    assert list(door._buckets) == ["10.0.0.7", "10.0.0.8", "10.0.0.9"]
