"""``hello`` and sessions: made, resumed, fenced, ended to make room."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy

import pytest

from tests.growth import growth
from tools.images.node import Client, Node
from tools.images.requests import UUID, batch, part
from txmq.broker.state.session import BrokerSession
from txmq.broker.verbs.session_expiry import SESSION_IDLE_MS_MIN, end

from ..support import node, prepare, put, restarted, stated, values


def test_hello_introduces_the_broker() -> None:
    broker = node()
    identity = broker.recovered.identity
    told = json.loads(broker.connect().hello("new").body)
    assert told == {
        "cluster": f"{identity.cluster:016x}", "home": f"{identity.node:016x}", "broker": "small", "version": "0.1.0",
        "protocol": 1, "session": "1", "epoch": 0, "secret": broker.state.sessions[1].secret,
        "in_flight_max": 64, "request_size_bytes_max": 64 << 10,
        "outcomes_kept": 1024, "compression": ["gzip", "lz4", "zstd"], "time_ms": broker.clock.now_ms(),
        "database_fences": True,
    }  # fmt: skip


def test_hello_without_a_session_makes_none() -> None:
    broker = node()
    told = json.loads(broker.connect().ask("hello", 1, "tester").body)
    assert (told["session"], told["epoch"]) == (None, 0)
    assert not broker.state.sessions


def test_another_protocol_is_refused() -> None:
    assert node().connect().ask("hello", 2, "tester").error == "bad-request"


@pytest.mark.parametrize("wish", ["1.0", "1.1", "ff.0"])
def test_a_session_that_was_never_issued_is_not_resumed(wish: str) -> None:
    answer = node().connect().hello(wish)
    assert (answer.code, answer.error) == (410, "never-issued")


def test_session_numbers_are_never_used_again() -> None:
    broker = node()
    assert [json.loads(broker.connect().hello().body)["session"] for _ in range(3)] == ["1", "2", "3"]
    broker.checkpoint()
    broker.connect().hello()
    broker = restarted(broker)
    broker.session()
    assert broker.newest_session > 4


def test_broker_restored_from_a_backup_issues_no_number_again() -> None:
    broker = node()
    backup = deepcopy(broker.disk).kill()
    issued = set[int]()
    for disk in (broker.disk.kill(), backup):  # it goes on, and is lost: the copy, which lacks that, takes its place
        broker.clock.advance(1)
        alive = Node(disk, broker.settings, clock=broker.clock)
        numbers = {int(json.loads(alive.connect().hello().body)["session"], 16) for _ in range(3)}
        assert not issued & numbers
        issued |= numbers


def test_broker_restored_from_a_backup_knows_which_sessions_it_issued() -> None:
    """Through checkpoints and restarts: those of its history, living or ended; not those issued since the copy."""
    broker = node(sessions_max=2)
    broker.connect().hello()
    backup = deepcopy(broker.disk).kill()
    lost = [int(json.loads(broker.connect().hello().body)["session"], 16)]
    broker = restarted(broker)
    for session in list(broker.state.sessions.values()):
        end(broker.core.context, session)
    lost.append(int(json.loads(broker.connect().hello().body)["session"], 16))
    for with_checkpoint in (False, True):
        broker = restarted(broker)
        asking = broker.connect()
        assert [asking.ask("outcome", broker.txid(number, 1)).error for number in (1, *lost)][:2] == ["fenced"] * 2
        assert asking.ask("outcome", broker.txid(lost[1], 1)).text == "unknown\n"
        if with_checkpoint:
            broker.checkpoint()
    broker.clock.advance(1)
    restored = Node(backup, broker.settings, clock=broker.clock)
    issued = int(json.loads(restored.connect().hello().body)["session"], 16)
    end(restored.core.context, restored.state.sessions[1])
    for with_checkpoint in (False, True):
        if with_checkpoint:
            restored.checkpoint()
        asking = restored.connect()
        errors = [asking.ask("outcome", restored.txid(number, 1)).error for number in (1, *lost)]
        assert errors == ["fenced", "never-issued", "never-issued"]
        assert asking.ask("outcome", restored.txid(issued, 1)).text == "unknown\n"
        restored = restarted(restored)


def test_the_number_of_an_ended_session_is_not_used_again() -> None:
    broker = node(sessions_max=1)
    broker.session().disconnect()
    broker.clock.advance(SESSION_IDLE_MS_MIN / 1000)
    broker.pump()
    broker.session()
    for _ in range(2):
        broker.checkpoint()
    assert sorted(restarted(broker).state.sessions) == [2]


def test_a_resumed_session_takes_the_connection_of_the_older_one() -> None:
    broker = node()
    older = broker.session()
    newer = broker.session("1.0")
    assert older.client.closing
    assert put(newer, producer=1).code == 200
    older.disconnect()
    assert put(newer, producer=1, sequence=1).code == 200
    assert broker.state.sessions[1].bound == newer.client.number


def test_request_on_the_older_connection_after_the_takeover_is_dropped() -> None:
    """Neither a put, nor a part, nor a commit; the same put on the newer one is stored once."""
    broker = node()
    older = broker.session()
    newer = broker.session("1.0")
    late = part("a", 0, batch(b"late"))
    sent = [
        older.send("put", "a", 0, body=batch(b"1", producer=1)),
        older.send("put", "a", 0, extensions={"tx": broker.txid(1, 1)}, body=batch(b"streamed")),
        older.send("commit", broker.txid(1, 2), body=late),
        older.send(
            "prepare",
            broker.txid(1, 3),
            "last-resource",
            extensions={"resource": "db", "uuid": UUID, "table": "t"},
            body=late,
        ),
    ]
    broker.pump()
    assert not [older.received[opaque] for opaque in sent if opaque in older.received]
    assert values(broker) == []
    assert broker.state.transactions == {}
    assert put(newer, b"1", producer=1).text == "0\n"
    older.send("put", "a", 0, body=batch(b"1", producer=1))
    older.disconnect()
    broker.pump()
    assert values(broker) == [b"1"]
    assert newer.ask("commit", broker.txid(1, 2), body=late).code == 200


def test_puts_sent_before_the_takeover_are_duplicates_on_the_newer() -> None:
    """Taken in and not answered yet; the take-over comes in the same group commit."""
    broker = node()
    older, newer = broker.session(), broker.connect()
    first = older.send("put", "a", 0, body=batch(b"1", producer=1))
    hello = newer.send("hello", 1, "tester", extensions={"session": broker.wish("1.0")})
    again = newer.send("put", "a", 0, body=batch(b"1", producer=1))
    following = newer.send("put", "a", 0, body=batch(b"2", producer=1, sequence=1))
    broker.pump()
    assert newer.received[hello].code == 200
    assert (newer.received[again].text, newer.received[following].text) == ("0\n", "1\n")
    assert older.received[first].text == "0\n"
    assert values(broker) == [b"1", b"2"]


def test_a_stream_goes_on_over_the_connection_that_resumed() -> None:
    broker = node()
    older = broker.session()
    txid = broker.txid(1, 1)
    older.ask("put", "a", 0, extensions={"tx": txid}, body=batch(b"1"))
    newer = broker.session("1.0")
    older.disconnect()
    broker.pump()
    assert newer.ask("commit", txid, extensions=stated([batch(b"1")]), body=b"").code == 200


# --- room ------------------------------------------------------------------------------------------------------------


def _idle(broker: Node, *clients: Client) -> None:
    for client in clients:
        client.disconnect()
    broker.clock.advance(SESSION_IDLE_MS_MIN / 1000)
    broker.pump()


def test_the_session_that_has_been_away_longest_makes_room() -> None:
    broker = node(sessions_max=2)
    first, second = broker.session(), broker.session()
    first.disconnect()
    _idle(broker, second)
    broker.session()
    assert sorted(broker.state.sessions) == [2, 3]
    answer = broker.connect().hello("1.0")
    assert (answer.code, answer.error) == (410, "fenced")
    assert broker.connect().ask("outcome", broker.txid(1, 1), extensions={"fence": None}).error == "fenced"


def test_what_an_ended_session_left_in_partitions_goes_with_it() -> None:
    broker = node(sessions_max=1)
    client = broker.session()
    put(client, producer=1)
    _idle(broker, client)
    broker.session()
    assert broker.partition("a").producers == {}


def test_connected_busy_and_fresh_sessions_stay() -> None:
    broker = node(sessions_max=2)
    connected, busy = broker.session(), broker.session()
    prepare(busy, broker.txid(2, 1), ("a", 0, batch()))
    _idle(broker, busy)
    refused = broker.connect().hello()
    assert (refused.code, refused.error) == (429, "overloaded")
    assert busy.node.connect().ask("rollback", broker.txid(2, 1)).code == 200
    assert broker.connect().hello().code == 200
    connected.disconnect()
    assert broker.connect().hello().error == "overloaded"


def test_a_restart_gives_everybody_time_to_come_back() -> None:
    broker = node(sessions_max=1)
    _idle(broker, broker.session())
    broker = restarted(broker)
    assert broker.connect().hello().error == "overloaded"
    assert broker.connect().hello("1.0").code == 200


def test_outcomes_beyond_the_limit_without_a_floor_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txmq.broker.verbs.transaction_checks.UNFINISHED_OUTCOMES_MAX", 3)
    broker = node(outcomes_kept=2)
    client = broker.session()
    codes = [
        client.ask("commit", broker.txid(1, n), body=part("a", 0, batch(b"%d" % n))).code for n in range(1, 7)
    ]  # fmt: skip
    assert codes == [200, 200, 200, 200, 429, 429]
    body = part("a", 0, batch(b"5"))
    assert client.ask("commit", broker.txid(1, 5), extensions={"floor": 1}, body=body).code == 200
    assert client.ask("commit", broker.txid(1, 6), extensions={"floor": 4}, body=body).code == 200
    assert len(broker.state.sessions[1].outcomes) == 2


def test_outcomes_of_all_sessions_without_floor_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txmq.broker.verbs.transaction_checks.OUTCOMES_OVER_MAX", 3)
    broker = node(outcomes_kept=2)

    def commits(client: Client, counters: range, **words: int) -> list[int]:
        number = client.client.session.number if client.client.session is not None else 0
        return [
            client.ask("commit", broker.txid(number, n), body=part("a", 0, batch(b"1")), extensions={**words}).code
            for n in counters
        ]

    first, second, third = broker.session(), broker.session(), broker.session()
    assert commits(first, range(1, 5)) == [200] * 4  # two over
    assert commits(second, range(1, 5)) == [200, 200, 200, 429]  # one more over
    assert commits(first, range(5, 6)) == [429]
    assert commits(third, range(1, 5)) == [200, 200, 200, 429]  # what each may keep has always room
    for counter in range(4, 9):
        assert commits(third, range(counter, counter + 1), floor=counter - 1) == [200]
    assert broker.state.outcomes_over == 3
    first.disconnect()
    broker.clock.advance(SESSION_IDLE_MS_MIN / 1000)
    end(broker.context, broker.state.sessions[1])
    assert broker.state.outcomes_over == 1
    assert commits(second, range(4, 5)) == [200]
    broker.checkpoint()
    assert restarted(broker).state.outcomes_over == broker.state.outcomes_over == 2


def test_fences_for_unused_ids_are_bounded_and_rollbacks_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txmq.broker.verbs.transaction_checks.UNFINISHED_OUTCOMES_MAX", 1)
    monkeypatch.setattr("txmq.broker.verbs.transaction_checks.FENCES_BESIDE_MAX", 1)
    broker = node(outcomes_kept=2)
    owner, other = broker.session(), broker.connect()
    prepare(owner, broker.txid(1, 1), ("a", 0, batch()))
    owner.ask("put", "a", 0, extensions={"tx": broker.txid(1, 2)}, body=batch())
    fences = [other.ask("outcome", broker.txid(1, n), extensions={"fence": None}).code for n in range(11, 17)]
    assert fences == [200, 200, 200, 200, 429, 429]
    assert other.ask("rollback", broker.txid(1, 17)).error == "session-full"
    assert len(broker.state.sessions[1].outcomes) == 4
    assert other.ask("rollback", broker.txid(1, 1)).code == 200
    assert other.ask("outcome", broker.txid(1, 2), extensions={"fence": None}).text == "rolled-back\n"
    assert owner.ask("rollback", broker.txid(1, 18), extensions={"floor": 16}).code == 200


def test_session_that_is_full_of_commits_can_still_be_fenced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txmq.broker.verbs.transaction_checks.UNFINISHED_OUTCOMES_MAX", 3)
    broker = node(outcomes_kept=2)
    client, resolver = broker.session(), broker.connect()
    for n in range(2, 6):  # the first one's branch is prepared in a database that is away
        assert client.ask("commit", broker.txid(1, n), body=part("a", 0, batch(b"%d" % n))).code == 200
    refused = client.ask("commit", broker.txid(1, 6), body=part("a", 0, batch(b"6")))
    assert (refused.code, refused.error) == (429, "session-full")
    assert client.ask("put", "a", 0, extensions={"tx": broker.txid(1, 6)}, body=batch()).error == "session-full"
    fenced = resolver.ask("outcome", broker.txid(1, 1), extensions={"fence": None})
    assert (fenced.code, fenced.text) == (200, "rolled-back\n")
    assert client.ask("rollback", broker.txid(1, 6)).code == 200


def test_fence_of_an_unused_counter_does_not_keep_later_outcomes() -> None:
    broker = node(outcomes_kept=2)
    client, invented = broker.session(), 1 << 60
    assert client.ask("rollback", broker.txid(1, invented)).code == 200
    for n in range(1, 40):
        body = part("a", 0, batch(b"%d" % n))
        assert client.ask("commit", broker.txid(1, n), extensions={"floor": n - 1}, body=body).code == 200
    session = broker.state.sessions[1]
    assert len(session.outcomes) <= 4
    assert session.outcomes[invented] is None
    assert session.floor < 39
    again = restarted(broker).state.sessions[1]
    assert (again.outcomes, again.floor) == (session.outcomes, session.floor)


def test_cost_of_an_outcome_does_not_grow_with_their_number() -> None:
    def outcomes(kept_max: int) -> Callable[[], object]:
        session = BrokerSession(1, 0, "tester", 0)
        for counter in range(1, kept_max + 1):
            session.keep(counter, None, 0, kept_max)
        following = range(kept_max + 1, 2 * kept_max + 1)

        def keep() -> None:
            for counter in following:
                session.keep(counter, None, counter - 1, kept_max)

        return keep

    assert growth(outcomes, 1_000, 40_000) < 5
