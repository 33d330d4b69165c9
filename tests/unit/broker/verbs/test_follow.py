"""The verb ``follow``: what a leader tells a replica, and what it believes."""

from __future__ import annotations

from typing import Any

import pytest

from tools.images.node import Client, Node
from txmq.broker.state.followers import KEPT_MS
from txmq.broker.verbs import follow as verb

from ..support import node, put

REPLICA = "ab" * 16


def _send(client: Client, lsn: int, replica: str = REPLICA, **told: Any) -> bytes:
    home = f"{client.node.recovered.identity.node:016x}"
    return client.send("follow", home, lsn, extensions={"replica": replica, **told})


def _follow(client: Client, lsn: int, replica: str = REPLICA, **told: Any) -> tuple[int, bytes]:
    opaque = _send(client, lsn, replica, **told)
    client.node.pump()
    answer = client.received.pop(opaque)
    return answer.code, answer.body[verb.HEAD.size :] if answer.code == 200 else answer.body


def _kept_from(of: Node) -> int | None:
    return of.context.followers.kept_from(of.clock.now_ms())


def test_answer_holds_what_is_forced_from_there_on() -> None:
    leader = node()
    put(leader.session(), b"1")
    end = leader.store.journal.durable_lsn
    code, piece = _follow(leader.connect(), 0)
    assert (code, len(piece)) == (200, end)


def test_question_at_the_end_waits_until_there_is_more() -> None:
    leader = node()
    replica, writer = leader.connect(), leader.session()
    end = leader.store.journal.durable_lsn
    asked = _send(replica, end, forced=end, wait=1000)
    leader.pump()
    assert asked not in replica.received
    put(writer, b"1")
    assert len(replica.received.pop(asked).body) > verb.HEAD.size
    end = leader.store.journal.durable_lsn
    asked = _send(replica, end, forced=end, wait=1000)
    leader.clock.advance(1.1)
    leader.pump()
    assert len(replica.received.pop(asked).body) == verb.HEAD.size


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"follow x 0 replica=%s q1\r\n", b"bad-request"),
        (b"follow %016x 0 q1\r\n", b"bad-request"),
        (b"follow %016x -1 replica=%s q1\r\n", b"bad-request"),
        (b"follow %016x 0 replica=zz q1\r\n", b"bad-request"),
        (b"follow 00000000000000aa 0 replica=%s q1\r\n", b"not-owner"),
    ],
)
def test_malformed_question_is_refused(line: bytes, error: bytes) -> None:
    leader = node()
    home, replica = leader.recovered.identity.node, REPLICA.encode()
    words = [word for mark, word in ((b"%016x", home), (b"%s", replica)) if mark in line]
    client = leader.connect()
    client.send_bytes(line % tuple(words))
    leader.pump()
    [answer] = client.received.values()
    assert answer.body.split()[0] == error, answer
    assert _kept_from(leader) is None


def test_second_question_of_a_connection_is_refused() -> None:
    leader = node()
    client, end = leader.connect(), leader.store.journal.durable_lsn
    _send(client, end, forced=end, wait=1000)
    assert _follow(client, end)[0] == 400


def test_journal_is_kept_from_what_the_last_replica_has() -> None:
    leader = node()
    put(leader.session(), b"1")
    end = leader.store.journal.durable_lsn
    _follow(leader.connect(), 0)
    assert _kept_from(leader) is None, "it has nothing yet, and may never have"
    _follow(leader.connect(), 4096, forced=4096)
    _follow(leader.connect(), end, "cd" * 16, forced=end)
    assert _kept_from(leader) == 4096
    _follow(leader.connect(), 4096, "cd" * 16, forced=1 << 60)
    assert _kept_from(leader) == 4096, "it cannot have more than it asks for"
    leader.clock.advance(KEPT_MS / 1000 + 1)
    assert _kept_from(leader) == 1 << 63
    assert _kept_from(leader) is None


def test_more_replicas_than_a_home_serves_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb, "FOLLOWERS_MAX", 2)
    leader = node()
    for number in range(3):
        code, body = _follow(leader.connect(), 4096, f"{number:032x}", forced=4096)
        assert code == (200 if number < 2 else 429), body
    assert _follow(leader.connect(), 4096, f"{0:032x}", forced=4096)[0] == 200


def test_replica_that_hung_up_is_not_waited_for() -> None:
    leader = node()
    client, end = leader.connect(), leader.store.journal.durable_lsn
    _send(client, end, forced=end, wait=5000)
    client.disconnect()
    put(leader.session(), b"1")
    assert not leader.context.followers.waiting
