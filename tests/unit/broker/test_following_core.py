"""What a replica answers: readers that may read a copy, while it hears of its leader, and nobody else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tools.images.follower import encoded
from tools.images.node import Client, Node
from tools.images.replica import Replica
from tools.simulated.disk import SimDisk
from txmq.log import records

from .support import node, put
from .verbs.access.access_support import add, operator
from .verbs.access.verb_cases import CASES, Case, World

READS = {"get", "offset", "meta", "topic describe", "topic list"}
SERVED = {"ping", "stats", "version", "help", "quit", "cluster homes", "cluster describe", "auth"}


def _replica_of(leader: Node) -> Replica:
    made = Replica(SimDisk(), leader, clock=leader.clock)
    made.follow(leader)
    return made


def _reader(replica: Replica, user: str = "") -> Client:
    client = operator(replica, user) if user else replica.connect()
    assert client.ask("hello", 1, "reader", extensions={"replica": None}).code == 200
    return client


def _values(body: bytes) -> list[bytes]:
    return [message.value or b"" for message in records.decode(body, "a", 0)]


@contextmanager
def _sent(client: Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """What a client sends meanwhile."""
    found = list[bytes]()

    def send_bytes(data: bytes) -> None:
        found.append(data)
        Client.send_bytes(client, data)

    with monkeypatch.context() as patch:
        patch.setattr(client, "send_bytes", send_bytes)
        yield found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_request_that_changes_something_is_refused(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(has_users=False)
    case.before(world)
    replica = _replica_of(world.made)
    reader, stranger = _reader(replica), replica.connect()
    with _sent(world.shop, monkeypatch) as requests:
        case.ask(world)
    state = encoded(replica.state)
    for client, is_served in ((reader, READS | SERVED), (stranger, SERVED)):
        client.send_bytes(requests[-1])
        replica.pump()
        [answer] = client.received.values()
        if case.verb in is_served or f"{case.verb} {case.action}" in is_served:
            assert answer.code == 200, answer
        else:
            assert (answer.code, answer.error) == (409, "not-owner"), answer
    assert encoded(replica.state) == state


def test_reader_waits_for_what_has_yet_to_come() -> None:
    leader = node()
    writer, replica = leader.session(), _replica_of(leader)
    reader = _reader(replica)
    asked = reader.send("get", "a", 0, 0, 1000, extensions={"wait": 5000})
    replica.pump()
    assert not reader.received
    put(writer, b"1", b"2")
    replica.pump()
    assert not reader.received, "it was not sent yet"
    replica.follow(leader)
    replica.pump()
    assert _values(reader.received[asked].body) == [b"1", b"2"]


def test_topic_in_memory_is_read_at_its_leader_alone() -> None:
    leader = node()
    writer = leader.session()
    assert writer.ask("topic", "create", "m", extensions={"storage": "memory"}).code == 200
    put(writer, b"1", topic="m")
    answer = _reader(_replica_of(leader)).ask("get", "m", 0, 0, 1000)
    assert (answer.code, answer.error) == (409, "not-owner")


def test_replica_that_has_heard_of_nobody_serves_no_reader() -> None:
    leader = node()
    replica = Replica(SimDisk(), leader, clock=leader.clock)
    answer = _reader(replica).ask("get", "a", 0, 0, 1000)
    assert (answer.code, answer.error) == (503, "unavailable")
    assert "has yet to hear of its leader" in answer.text


def test_silence_ends_reads_until_all_is_caught_up() -> None:
    leader = node(replica_reads_ms_max=2000)
    writer, replica = leader.session(), _replica_of(leader)
    reader = _reader(replica)
    assert reader.ask("get", "a", 0, 0, 1000).code == 200
    leader.clock.advance(2.5)
    assert "for 2 s" in reader.ask("get", "a", 0, 0, 1000).text
    for _ in range(20):
        put(writer, b"x" * 1000)
    replica.receive(leader, 2000)
    assert "has to catch up" in reader.ask("get", "a", 0, 0, 1000).text
    replica.follow(leader)
    assert reader.ask("get", "a", 0, 0, 1000).code == 200


def test_first_user_makes_strangers_of_all_readers() -> None:
    leader = node()
    replica = _replica_of(leader)
    reader = _reader(replica)
    add(leader.connect(), "ops")
    assert reader.ask("get", "a", 0, 0, 1000).code == 200
    replica.follow(leader)
    answer = reader.ask("get", "a", 0, 0, 1000)
    assert (answer.code, answer.error) == (401, "unauthenticated")


def test_user_that_is_removed_is_logged_out() -> None:
    leader = node()
    add(leader.connect(), "ops")
    operating = operator(leader)
    add(operating, "shop")
    assert operating.ask("acl", "grant", "shop", extensions={"may": "read", "topic": "a"}).code == 200
    replica = _replica_of(leader)
    reader = _reader(replica, "shop")
    assert reader.ask("get", "a", 0, 0, 1000).code == 200
    assert reader.ask("get", "b", 0, 0, 1000).code == 403
    assert operating.ask("user", "remove", "shop", body=b"").code == 200
    replica.follow(leader)
    assert reader.ask("get", "a", 0, 0, 1000).code == 401
