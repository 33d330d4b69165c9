"""Peers that ask and do not read: what they leave is bounded over all of them, and others are served meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import txmq
from txmq.client.admin.cluster import Users
from txmq.testing.eventually import eventually
from txmq.testing.processes.broker import BrokerProcess

from .wire import Wire

MIB = 1 << 20
LIMIT = 16 * MIB
VALUE = bytes(900_000)
PASSWORD = "correct horse"
ASKED = 24  # answers of a value each: more than sockets hold, which take some 6 MiB by themselves
_READ = b"".join(b"get t 0 0 1000000 %x\r\n" % number for number in range(1, ASKED + 1))
_LIST = b"".join(b"%b %x\r\n" % (b"stats json", number) for number in range(1, 401))


def _figure(wire: Wire, name: str) -> int:
    """One of ``stats``."""
    lines = wire.ask(b"stats * s\r\n")[1].decode().splitlines()
    return int(dict(line.split(" ", 1) for line in lines)[name])


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    """With one large message, and long lists."""
    settings = {"memory_answer_bytes_max": LIMIT}
    with BrokerProcess(tmp_path / "broker", settings=settings) as made, Wire(made) as wire:
        assert wire.ask(b"topic create t 1\r\n")[0] == 200
        assert wire.ask(b"put t 0 raw %d 1\r\n%b" % (len(VALUE), VALUE))[0] == 200
        assert wire.ask(b"topic create long partitions=2000 1\r\n")[0] == 200
        yield made


@pytest.mark.parametrize(("strangers_count", "asked"), [(60, _READ), (15, _LIST)], ids=["reads", "lists"])
def test_unread_answers_stay_within_the_budget_and_others_are_served(
    broker: BrokerProcess, strangers_count: int, asked: bytes
) -> None:
    with ExitStack() as stack:
        strangers = [stack.enter_context(Wire(broker)) for _ in range(strangers_count)]
        other, watching = stack.enter_context(Wire(broker)), stack.enter_context(Wire(broker))
        for stranger in strangers:
            stranger.send(asked)
        eventually(lambda: _figure(watching, "answer_bytes_in_memory") > LIMIT // 2, "unread answers are in memory")
        for _ in range(100):
            code, value = other.ask(b"get t 0 0 1000000 1\r\n")
            assert (code, len(value) > len(VALUE)) == (200, True)
            assert other.ask(b"put t 0 raw 1 2\r\nx")[0] == 200
        assert _figure(watching, "answer_bytes_in_memory_max") <= LIMIT + 2 * MIB
    with Wire(broker) as watching:
        eventually(lambda: _figure(watching, "answer_bytes_in_memory") == 0, "the memory of the answers is free again")


def test_unread_answers_of_one_user_take_half_of_the_budget(broker: BrokerProcess) -> None:
    with txmq.connect(broker.address) as client:
        Users(client.control, client.timeout).add("billing", PASSWORD)
    with txmq.connect(broker.address.replace("://", "://billing@"), password=PASSWORD) as client:
        Users(client.control, client.timeout).add("shop", PASSWORD)
        Users(client.control, client.timeout).acl("grant", "shop", {"may": "read", "topic": "t"})
    with ExitStack() as stack:
        shops = [stack.enter_context(Wire(broker)) for _ in range(60)]
        billing, watching = stack.enter_context(Wire(broker)), stack.enter_context(Wire(broker))
        assert {wire.log_in("shop", PASSWORD) for wire in shops} == {200}
        assert {wire.log_in("billing", PASSWORD) for wire in (billing, watching)} == {200}
        for shop in shops:
            shop.send(_READ)
        eventually(lambda: _figure(watching, "answer_bytes_in_memory") >= LIMIT // 2 - MIB, "shop has its share")
        for _ in range(100):
            assert billing.ask(b"get t 0 0 1000000 1\r\n")[0] == 200
        assert (
            _figure(watching, "answer_bytes_in_memory_max") <= LIMIT // 2 + 3 * MIB
        )  # what billing is given comes on top
