"""A broker with a registry, from its start until it leads its home: nothing is served before that."""

from __future__ import annotations

import copy
import json

import pytest

from tests.stats_page import OF_CLUSTERS, fields
from tools.images.requests import batch
from tools.simulated.embedded_registry import EmbeddedRegistry
from tools.simulated.zookeeper import SimZooKeeper
from txmq.broker.cluster.cluster_view import RegistryState
from txmq.errors import HomeSupersededError, InvariantError
from txmq.redo import inspect

from ..support import node, put, values
from .support import CLUSTER, A, B, Broker, alone, pair, puts, zookeeper

WAITS = "unavailable the broker waits for the registry to say that it leads its home\n"


def test_broker_serves_nothing_before_it_leads() -> None:
    broker = alone()
    assert broker.ask("put", "a", 0, body=batch(b"v")) == (503, WAITS)
    assert broker.ask("topic", "create", "a") == (503, WAITS)
    assert broker.ask("meta", "*") == (503, WAITS)
    assert broker.ask("hello", 1, "me", session="new") == (503, WAITS)
    assert broker.read("hello", 1, "me")["registry"] is True
    assert broker.ask("ping") == (200, "pong\n")
    assert broker.read("cluster", "describe")["registry"]["state"] == "waiting"
    assert broker.journaled() == ["started"]
    broker.lead()
    assert broker.ask("topic", "create", "a")[0] == 200
    assert broker.ask("hello", 1, "me", session="new")[0] == 200
    assert broker.read("cluster", "describe")["registry"]["state"] == "connected"


def test_pipelined_puts_wait_for_the_registry() -> None:
    broker = alone().lead()
    broker.ask("topic", "create", "a")
    again = broker.again()
    content = batch(b"v")
    again.client.send_bytes(b"".join(b"put a 0 %d %d\r\n%s" % (len(content), n, content) for n in range(3)))
    again.node.pump()
    assert {answer.code for answer in again.client.received.values()} == {503}
    assert again.node.partition("a").next_offset == 0


def test_time_passes_without_a_record_before_it_leads() -> None:
    broker = alone().lead()
    broker.ask("topic", "create", "a")
    broker.ask("hello", 1, "me", session="new")
    again = broker.again()
    before = again.journaled()
    again.node.clock.advance(48 * 3600)
    again.node.core.tick(again.node.clock.now_ms())
    again.node.pump()
    assert again.journaled() == before


def test_session_may_come_back_from_leading_on() -> None:
    broker = alone().lead()
    broker.ask("hello", 1, "me", session="new")
    again = broker.again()
    again.node.clock.advance(60)
    again.node.core.tick(again.node.clock.now_ms())
    again.lead()
    assert again.node.state.sessions[1].gone_ms == again.node.clock.now_ms()


def test_epoch_of_the_registry_is_the_epoch_of_the_journal() -> None:
    broker = alone()
    assert broker.node.state.epoch == 1
    broker.lead()
    assert (broker.leadership.epoch, broker.node.state.epoch) == (2, 2)
    broker.ask("topic", "create", "a")
    assert [record.header.epoch for record in inspect.dump(broker.node.disk)] == [1, 2, 2]
    again = broker.again()
    assert again.node.state.epoch == 3
    again.lead()
    assert (again.leadership.epoch, again.node.state.epoch) == (4, 4)


def test_epoch_that_is_not_higher_is_refused() -> None:
    broker = alone()
    leadership = broker.draw()._replace(epoch=1)
    with pytest.raises(InvariantError, match="gave out epoch 1, and the journal has 1"):
        broker.node.core.led(leadership, broker.registry.topics(), [])


def test_start_that_dies_before_leading_is_known_to_the_next() -> None:
    registry = zookeeper(SimZooKeeper())
    broker = Broker(registry, A)
    broker.draw()  # the answer is lost, or the process dies before REGISTERED is durable
    for number in (2, 3):
        broker = broker.again()
        broker.draw()
        assert broker.leadership.epoch == number + 1
    broker.begin()
    assert broker.journaled() == ["started", "started", "started", "registered"]
    assert broker.node.state.registration.incarnations == [f"{number:032x}" for number in (1, 2, 3)]
    assert broker.again().lead().node.state.epoch == 6


@pytest.mark.parametrize("with_checkpoint", [False, True])
def test_home_that_is_given_up_is_in_the_journal(with_checkpoint: bool) -> None:
    one, two = pair()
    named = f"{B:016x}"

    def retire() -> tuple[int, str]:
        return one.ask("cluster", "retire", body=None, home=named, reason="ada%3A%20burnt")

    assert retire()[0] == 503  # it is led
    two.registry.close()
    assert retire() == retire() == (200, "{}\n")
    assert one.journaled().count("home-retired") == 1
    shown = one.read("cluster", "homes")["homes"][1]
    assert (shown["home"], shown["leader"], shown["retired"]) == (named, None, "ada: burnt")
    one.ask("topic", "create", "a")
    assert one.read("meta", "a")["retired"] == {named: "ada: burnt"}
    if with_checkpoint:
        one.node.checkpoint()
    again = one.again()
    assert again.node.state.registration.retired == {B: "ada: burnt"}
    assert again.lead().journaled().count("home-retired") <= 1


def test_home_is_given_up_by_number_and_for_a_reason() -> None:
    one, _two = pair()
    for words, why in (
        ({"home": f"{B:016x}"}, "needs reason="),
        ({"home": f"{B:016x}", "reason": "x" * 1001}, "at most 1000 letters"),
        ({"home": "b0", "reason": "burnt"}, "16 hexadecimal digits"),
        ({"reason": "burnt"}, "16 hexadecimal digits"),
    ):
        code, text = one.ask("cluster", "retire", body=None, **words)
        assert (code, why in text) == (400, True), text
    assert "is not in the registry" in one.ask("cluster", "retire", home=f"{7:016x}", reason="burnt")[1]
    assert node().connect().ask("cluster", "retire", extensions={"home": f"{B:016x}", "reason": "burnt"}).code == 400


@pytest.mark.parametrize("with_checkpoint", [False, True])
def test_ensemble_of_a_backup_does_not_lock_the_home_out(with_checkpoint: bool) -> None:
    ensemble = SimZooKeeper()
    broker = Broker(zookeeper(ensemble), A).lead()
    broker.ask("topic", "create", "a")
    broker.registry.close()
    backup = ensemble.picture()
    for _ in range(3):
        broker.registry = zookeeper(ensemble)
        broker = broker.again().lead()
        broker.registry.close()
    if with_checkpoint:
        broker.node.checkpoint()
    epoch = broker.node.state.epoch
    ensemble.nodes.clear()
    ensemble.nodes.update(backup)
    broker.registry = zookeeper(ensemble)
    again = broker.again().lead()
    assert again.leadership.epoch > epoch
    assert puts(again, "a", 1) == [200]
    assert puts(again.again().lead(), "a", 1) == [200]


def test_copied_directory_does_not_lead() -> None:
    broker = Broker(zookeeper(SimZooKeeper()), A).lead()
    disk = broker.node.kill()
    copied = copy.deepcopy(disk)
    newer = Broker(broker.registry, A, disk, 2).lead()
    assert newer.node.state.epoch == 4
    with pytest.raises(HomeSupersededError, match="the directory is a copy, or was restored"):
        Broker(broker.registry, A, copied, 3).lead()


def test_existing_broker_moves_into_a_registry_with_its_topics() -> None:
    before = node()
    client = before.session()
    put(client, b"1", partition=1)
    disk = before.kill()
    identity = before.recovered.identity
    registry = EmbeddedRegistry(identity.cluster, identity.node, before.state.topics)
    broker = Broker(registry, identity.node, disk)
    broker.draw(identity.cluster)
    broker.begin()
    assert values(broker.node, "a", 1) == [b"1"]
    assert [placed.homes for placed in broker.node.state.placed.values()] == [(identity.node,) * 2, (identity.node,)]
    assert [name for name in broker.journaled() if name == "topic"] == ["topic"] * 4
    assert put(broker.node.connect(), b"2", partition=1).text == "1\n"
    again = broker.again()
    assert again.node.state.placed == broker.node.state.placed
    assert 1 in again.node.state.sessions


def test_loss_of_the_session_is_told_and_stops_nothing() -> None:
    broker = alone().lead()
    broker.ask("topic", "create", "a")
    for state in (RegistryState.SUSPENDED, RegistryState.EXPIRED, RegistryState.CONNECTED):
        broker.node.core.registry_state(state)
        broker.node.clock.advance(3)
        assert broker.ask("put", "a", 0, body=batch(b"v"))[0] == 200
        told = broker.read("cluster", "describe")["registry"]
        assert (told["state"], told["since_ms"]) == (state.value, 3000)
        figures = dict(line.split(" ", 1) for line in broker.ask("stats", "registry")[1].splitlines())
        assert figures.keys() == fields("`registry`")
        assert (figures["state"], figures["since_ms"], figures["epoch"]) == (state.value, "3000", "2")
        assert f"registry {state.value}\n" in broker.ask("stats", "*")[1]
    everything = json.loads(broker.ask("stats", "json")[1])
    assert everything["broker"].keys() <= fields("The broker")
    assert everything["transactions"].keys() == fields("`transactions`") >= OF_CLUSTERS - {"registry"}


def test_stats_of_a_lone_broker_name_no_registry() -> None:
    client = node().connect()
    assert client.ask("stats", "registry").text == "address none\n"
    assert "registry" not in client.ask("stats", "*").text
    assert json.loads(client.ask("stats", "json").body).get("registry") is None


def test_describe_tells_homes_leaders_and_what_is_unavailable() -> None:
    one, two = pair()
    one.ask("topic", "create", "a", partitions=4)
    two.refresh()
    homes = [
        {"home": f"{home:016x}", "name": f"broker-{home:x}", "epoch": 2, "leader": f"10.0.0.{home}:8123"}
        for home in (A, B)
    ]
    assert two.read("cluster", "homes") == {"cluster": f"{CLUSTER:016x}", "map_version": 1, "homes": homes}
    told = two.read("cluster", "describe")
    assert (told["home"], told["homes"]) == (f"{B:016x}", homes)
    assert told["topics"] == [{"topic": "a", "partitions": 4, "unavailable": []}]
    one.registry.close()
    two.refresh()
    told = two.read("cluster", "describe")
    assert [home["leader"] for home in told["homes"]] == [None, f"10.0.0.{B}:8123"]
    assert told["topics"] == [{"topic": "a", "partitions": 4, "unavailable": [0, 2]}]


def test_lone_broker_describes_itself() -> None:
    broker = node()
    told = json.loads(broker.connect().ask("cluster", "describe").body)
    home = f"{broker.recovered.identity.node:016x}"
    assert (told["home"], told["registry"], told["map_version"]) == (home, None, 0)
    assert told["homes"] == [{"home": home, "name": "small", "epoch": 1, "leader": broker.settings.listen}]
    assert told["topics"] == [
        {"topic": "a", "partitions": 2, "unavailable": []}, {"topic": "b", "partitions": 1, "unavailable": []},
    ]  # fmt: skip
    broker.context.address = "here:8123"  # as the shell says it, which knows the port
    told = json.loads(broker.connect().ask("cluster", "homes").body)
    assert told["homes"][0]["leader"] == "here:8123"
    refused = broker.connect().ask("cluster", "move")
    assert (refused.code, refused.text) == (400, "bad-request unknown action 'move'; known: describe, homes, retire\n")


def test_hello_for_another_home_binds_no_session() -> None:
    one, two = pair()
    secret = one.read("hello", 1, "me", session="new")["secret"]
    for wish in (f"1.0.{secret}", "new", "none", f"9.0.{secret}"):
        code, text = two.ask("hello", 1, "me", session=wish, home=f"{A:016x}")
        assert (code, text) == (
            409,
            f"not-owner leader=10.0.0.{A}:8123 home={A:016x} is not led here, but home {B:016x}\n",
        )
    assert not two.node.state.sessions
    assert two.ask("hello", 1, "me", home=f"{0xDEF:016x}")[1].startswith("not-owner leader=- home=0000000000000def")
    assert two.read("hello", 1, "me", session="new", home=f"{B:016x}")["session"] == "1"


def test_hello_of_a_lone_broker_knows_its_home() -> None:
    broker = node()
    home = broker.recovered.identity.node
    told = broker.connect().ask("hello", 1, "me", extensions={"home": f"{home:016x}"})
    assert "registry" not in json.loads(told.body)
    assert broker.connect().ask("hello", 1, "me", extensions={"home": "0" * 16}).error == "not-owner"
