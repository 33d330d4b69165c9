"""Three real brokers and one ZooKeeper: what is killed, paused or away stops nobody else."""

from __future__ import annotations

import json
import signal
import sqlite3
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import txmq
from tests.services.broker.wire import Wire
from txmq.client.producer.producer import Producer
from txmq.testing.eventually import WITHIN_S, eventually
from txmq.testing.processes import fork_server
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.cluster import Cluster
from txmq.testing.processes.zookeeper import Ensemble
from txmq.xa import LastResource

from .asking import asked, described, dies_of, placed, put, session_state
from .branches import Home, OverTwoHomes, values

PARTITIONS = 6


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, ensemble: Ensemble) -> Iterator[Cluster]:
    """Three brokers, and a topic that is spread over them."""
    settings = {"registry_session_timeout_ms": 3000}
    with Cluster(tmp_path_factory.mktemp("cluster"), ensemble, chroot="/three", settings=settings) as made:
        code, body = asked(made.brokers[0], "topic", "create", "orders", f"partitions={PARTITIONS}")
        assert code == 200, body
        for broker in made.brokers:
            eventually(partial(_knows, broker, "orders"), "each broker has the topic")
            eventually(partial(_sees_all, broker), "each broker knows all leaders")
        yield made


def _knows(broker: BrokerProcess, topic: str) -> bool:
    return asked(broker, "topic", "describe", topic)[0] == 200


def _sees_all(broker: BrokerProcess) -> bool:
    return _unavailable(broker) == []


def _has_no(broker: BrokerProcess, topic: str) -> bool:
    return asked(broker, "topic", "describe", topic)[0] == 404


def _is(broker: BrokerProcess, state: str) -> bool:
    return session_state(broker) == state


def _own(broker: BrokerProcess, topic: str = "orders") -> list[int]:
    """The partitions of its home."""
    home = described(broker)["home"]
    return [number for number, other in enumerate(placed(broker, topic)) if other == home]


def _unavailable(broker: BrokerProcess) -> list[int]:
    [topic] = [topic for topic in described(broker)["topics"] if topic["topic"] == "orders"]
    numbers: list[int] = topic["unavailable"]
    return numbers


def test_a_topic_is_spread_and_each_home_has_its_own(cluster: Cluster) -> None:
    assert set(Counter(placed(cluster.brokers[0], "orders")).values()) == {PARTITIONS // len(cluster.brokers)}
    addresses = {number: f"{broker.host}:{broker.port}" for broker in cluster.brokers for number in _own(broker)}
    assert sorted(addresses) == list(range(PARTITIONS))
    for broker in cluster.brokers:
        own = _own(broker)
        for number in range(PARTITIONS):
            code, body = put(broker, "orders", number)
            assert (code, f"not-owner leader={addresses[number]} home=" in body) == (
                (200, False) if number in own else (409, True)
            )


def test_a_topic_is_known_to_every_broker_at_once(cluster: Cluster) -> None:
    one, *others = cluster.brokers
    for number in range(5):
        assert asked(one, "topic", "create", f"fresh-{number}")[0] == 200
        for broker in others:
            with Wire(broker) as wire:
                wire.send(b"meta fresh-%d 1\r\nping 2\r\nmeta never-%d 3\r\nping 4\r\n" % (number, number))
                told = {opaque: code for code, opaque, _ in wire.hear(4).answers}
            assert told == {b"1": 200, b"2": 200, b"3": 404, b"4": 200}
        assert asked(one, "topic", "delete", f"fresh-{number}")[0] == 200


def test_an_operator_sees_homes_leaders_and_topics(cluster: Cluster) -> None:
    command = [sys.executable, "-m", "txmq.cli.main", "cluster", "describe", "--bootstrap", cluster.brokers[0].address]
    shown, as_json = (fork_server.run([*command, *more], timeout=60.0) for more in ([], ["--json"]))
    assert (shown.returncode, as_json.returncode) == (0, 0), shown.stderr + as_json.stderr
    found = json.loads(as_json.stdout)
    assert [row["registry"] for row in found["homes"]].count("connected") >= 1
    for broker in cluster.brokers:
        assert f"{broker.host}:{broker.port}" in shown.stdout.decode()
    assert found["topics"] == [{"topic": "orders", "partitions": PARTITIONS, "unavailable": []}]


def test_a_session_has_one_node_however_many_topics(cluster: Cluster, ensemble: Ensemble) -> None:
    """Its end is one transaction over its nodes, which ZooKeeper must be able to read again (ZOOKEEPER-4306)."""
    assert asked(cluster.brokers[0], "topic", "create", "more", "partitions=3")[0] == 200
    for broker in cluster.brokers:
        eventually(partial(_knows, broker, "more"), "each broker has the topic")
    homes = [f"/three/txmq/homes/{home['home']}/replicas/1" for home in described(cluster.brokers[0])["homes"]]
    shown = [line.strip() for line in ensemble.leader.ask("dump").splitlines()]
    assert sorted(path for path in shown if path.startswith("/three/")) == sorted(homes)
    assert asked(cluster.brokers[0], "topic", "delete", "more")[0] == 200


def test_partitions_added_later_move_nothing(cluster: Cluster) -> None:
    assert asked(cluster.brokers[1], "topic", "create", "grows", "partitions=2")[0] == 200
    before = placed(cluster.brokers[1], "grows")
    eventually(partial(_knows, cluster.brokers[2], "grows"), "another broker has it")
    assert asked(cluster.brokers[2], "topic", "alter", "grows", "partitions=6")[0] == 200
    after = placed(cluster.brokers[2], "grows")
    assert after[:2] == before
    assert set(Counter(after).values()) == {2}
    assert asked(cluster.brokers[0], "topic", "delete", "grows")[0] == 200
    for broker in cluster.brokers:
        eventually(partial(_has_no, broker, "grows"), "it is deleted")


def test_a_killed_broker_is_back_inside_its_old_session(cluster: Cluster) -> None:
    killed, other = cluster.brokers[0], cluster.brokers[1]
    [mine, *_], [theirs, *_] = _own(killed), _own(other)
    before = int(put(killed, "orders", mine)[1])
    killed.kill()
    assert put(other, "orders", theirs)[0] == 200
    killed.start()
    assert int(put(killed, "orders", mine)[1]) == before + 1
    eventually(lambda: _unavailable(other) == [], "the others see it")


def test_a_broker_paused_past_its_session_announces_itself_again(cluster: Cluster) -> None:
    paused, other = cluster.brokers[1], cluster.brokers[2]
    mine = _own(paused)
    paused.pause()
    try:
        eventually(lambda: _unavailable(other) == mine, "its session is over")
        assert put(other, "orders", _own(other)[0])[0] == 200
    finally:
        paused.resume()
    assert put(paused, "orders", mine[0])[0] == 200
    eventually(lambda: _unavailable(other) == [], "its leader is announced again")
    eventually(partial(_is, paused, "connected"), "it says so")


def test_brokers_serve_what_they_have_while_zookeeper_is_away(cluster: Cluster, ensemble: Ensemble) -> None:
    ensemble.kill()
    try:
        for broker in cluster.brokers:
            eventually(partial(_is, broker, "expired"), "the session is over")
            assert put(broker, "orders", _own(broker)[0])[0] == 200
        code, body = asked(cluster.brokers[0], "topic", "create", "later")
        assert (code, body.split()[0]) == (503, "unavailable")
    finally:
        ensemble.start()
    for broker in cluster.brokers:
        eventually(partial(_is, broker, "connected"), "the session is back")
    assert asked(cluster.brokers[0], "topic", "create", "later", "partitions=3")[0] == 200
    eventually(lambda: _unavailable(cluster.brokers[0]) == [], "all leaders are announced again")


def test_brokers_settle_branches_that_clients_left(cluster: Cluster) -> None:
    here, there = cluster.brokers[:2]
    [mine, *_], [theirs, *_] = _own(here), _own(there)
    homes = Home(here, mine), Home(there, theirs)
    decided = OverTwoHomes.prepared(*homes, b"decided there")
    decided.decide(b"decided here")
    OverTwoHomes.prepared(*homes, b"of a client that dies")
    for home in homes:
        home.close()
    there.kill()
    there.start()
    eventually(lambda: b"decided there" in values(there, theirs), "the branch asked the home that decided")
    here.kill()
    here.start()
    eventually(lambda: not _branches(here) and not _branches(there), "nothing is in doubt, nothing to be reported")
    assert b"decided here" in values(here, mine)
    assert b"of a client that dies" not in values(there, theirs)


def test_an_operator_gives_a_lost_home_up(cluster: Cluster) -> None:
    here, there = cluster.brokers[:2]
    mine, theirs = _own(here)[0], _own(there)[0]
    homes = Home(here, mine), Home(there, theirs)
    decided = OverTwoHomes.prepared(*homes, b"lost there")
    there.kill()
    decided.decide(b"found here")
    eventually(lambda: theirs in _unavailable(here), "nobody leads the home")
    lost = decided.branch.split("-")[1]
    with txmq.connect(f"txmq://{here.host}:{here.port}") as client:
        client.transactions.give_up_home(decided.txid, lost, "ada: it is a test")
        [row] = client.transactions.show(decided.txid)["heuristics"]
        assert (row["what"], row["resource"], row["reason"]) == ("heuristic-hazard", lost, "ada: it is a test")
        client.transactions.forget(decided.txid)
    there.start()
    for home in homes:
        home.close()
    eventually(lambda: not _branches(here) and not _branches(there), "nothing is in doubt, nothing to be reported")
    assert (b"found here" in values(here, mine), b"lost there" in values(there, theirs)) == (True, False)


SYNCS_OF_OTHERS_MAX = 5  # it may die of a sync that was under way, of an earlier group


@pytest.mark.parametrize("behind", ["", ">journal.sync.done"])
def test_giving_a_home_up_survives_a_kill(cluster: Cluster, behind: str) -> None:
    """Before it is journaled, and before it is answered: of a decision, and of a part that is placed here."""
    here, lost = cluster.brokers[:2]
    lost.restart(env={"TXMQ_CRASH": "broker.decision.reported:1"})
    home, other = Home(here, _own(here)[0]), Home(lost, _own(lost)[0])
    decided = OverTwoHomes.prepared(home, other, b"lost there")
    placed = OverTwoHomes.prepared(other, home, b"placed here")
    placed.decide(b"lost with its home")
    home.ask(f"commit {placed.branch}")
    assert lost.wait(WITHIN_S) == -signal.SIGKILL, "it dies of the report"
    decided.decide(b"decided here")
    for txid, words, point in (
        (decided.txid, f"branch={decided.branch}", "broker.decision.reported"),
        (placed.branch, f"of={placed.txid}", "broker.branch.reported"),
    ):
        complete = f"complete {txid} {words} heuristic=hazard reason=ada"
        for _ in range(SYNCS_OF_OTHERS_MAX):
            here.restart(env={"TXMQ_CRASH": f"{point}{behind}:1"})
            dies_of(here, f"{complete} 1\r\n".encode())
            is_journaled = _waits_for(here, txid) == []
            if is_journaled or not behind:
                break
        assert is_journaled is bool(behind)
        assert asked(here, *complete.split())[0] == 200
        [row] = _waits_for(here, txid, "heuristic")
        assert len(row["heuristics"]) == 1
        assert asked(here, "forget", txid)[0] == 200
    lost.start(env={})
    assert asked(lost, "complete", placed.txid, f"branch={placed.branch}")[0] == 200
    for session in (home, other):
        session.close()
    eventually(lambda: not _branches(here) and not _branches(lost), "nothing is in doubt, nothing to be reported")
    assert {b"placed here", b"decided here"} <= set(values(here, home.partition))
    assert b"lost there" not in values(lost, other.partition)


def _waits_for(broker: BrokerProcess, txid: str, state: str = "") -> list[dict[str, Any]]:
    words = [f"state={state}"] if state else []
    rows: list[dict[str, Any]] = json.loads(asked(broker, "recover", f"txid={txid}", *words)[1])["transactions"]
    return rows


def _branches(broker: BrokerProcess) -> list[object]:
    branches: list[object] = described(broker)["branches"]
    return branches


def _send_both(producer: Producer, value: bytes, *partitions: int) -> list[int | None]:
    with producer.transaction() as tx:
        for number in partitions:
            tx.send("orders", value, partition=number)
    return [result.offset for result in tx.results]


def test_blocks_over_homes_are_all_or_nothing(cluster: Cluster, tmp_path: Path) -> None:
    database = LastResource("orders-db", connect=lambda: sqlite3.connect(tmp_path / "orders.db"))
    first, second, third = (_own(broker)[0] for broker in cluster.brokers)
    addresses = ",".join(f"{broker.host}:{broker.port}" for broker in cluster.brokers)
    with txmq.connect(f"txmq://{addresses}") as client, client.producer() as producer:
        ends = [client.offsets("orders", number).end for number in (first, second, third)]
        with producer.transaction() as tx:
            for number in (first, second, third):
                tx.send("orders", b"local", partition=number)
        assert [(tx.outcome, tx.pending)] == [(txmq.Outcome.COMMITTED, ())]
        assert [result.offset for result in tx.results] == ends
        database.install(client)
        with producer.transaction(database) as tx:
            tx.connection(database).execute("CREATE TABLE orders (id INTEGER)")
            for number in (first, second, third):
                tx.send("orders", b"with a row", partition=number)
        assert [result.offset for result in tx.results] == [end + 1 for end in ends]
        cluster.brokers[2].kill()
        with pytest.raises(txmq.errors.RolledBackError):
            _send_both(producer, b"never", first, third)
        cluster.brokers[2].start()
        eventually(lambda: _unavailable(cluster.brokers[0]) == [], "the others see it")
        sent: list[int | None] = []

        def sends() -> bool:
            with suppress(txmq.errors.TransactionAwayError):  # nothing happened: run it again
                sent.extend(_send_both(producer, b"again", first, third))
            return bool(sent)

        eventually(sends, "the client has found it, too")
        assert sent == [ends[0] + 2, ends[2] + 2]
        eventually(lambda: not client.transactions.list(), "no home waits for another one")
