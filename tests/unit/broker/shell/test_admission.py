"""Who is let in, over all and of one address."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from txmq.broker.shell.admission import Admission
from txmq.config import BrokerSettings


def admission(total: int = 100, each: int | None = None) -> Admission:
    return Admission(BrokerSettings(connections_max=total, connections_per_address_max=each))


def test_all_together_are_limited() -> None:
    door = admission(total=2)
    assert door.enter("10.0.0.1:1") is None
    assert door.enter("10.0.0.2:1") is None
    assert door.enter("10.0.0.3:1") == "connections_max 2 is reached"
    door.leave("10.0.0.3:1")
    door.leave("10.0.0.1:1")
    assert door.enter("10.0.0.3:1") is None
    assert door.refused == 1


def test_address_that_has_its_share_leaves_room_to_others() -> None:
    door = admission(each=2)
    assert [door.enter(f"10.0.0.1:{port}") is None for port in range(1, 4)] == [True, True, False]
    told = door.enter("10.0.0.1:4")
    assert told == "connections_per_address_max 2 is reached by 10.0.0.1: close some of its connections"
    assert door.enter("10.0.0.2:1") is None
    for port in (1, 3, 4):
        door.leave(f"10.0.0.1:{port}")
    assert door.enter("10.0.0.1:5") is None
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
    assert door.enter(first) is None
    assert (door.enter(second) is None) is not are_one


def test_nothing_is_kept_of_those_that_have_gone() -> None:
    door = admission(each=1)
    for number in range(100):
        door.enter(f"10.0.0.{number}:1")
        door.enter(f"10.0.0.{number}:2")
        door.leave(f"10.0.0.{number}:2")
        door.leave(f"10.0.0.{number}:1")
    assert not door._per_address
