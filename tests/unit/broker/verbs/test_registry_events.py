"""Epochs and starts of a broker with a registry: copies, backups, and a process that dies before it leads."""

from __future__ import annotations

import copy
import json
import random

import pytest

from tests.stats_page import OF_CLUSTERS, fields
from tools.simulated.clock import SimRandom
from tools.simulated.embedded_registry import EmbeddedRegistry
from tools.simulated.zookeeper import SimZooKeeper
from txmq.errors import HomeSupersededError, InvariantError
from txmq.redo import inspect
from txmq.redo.replica_identity import PATH as REPLICA
from txmq.redo.replica_identity import load_or_create

from ...redo import support as files
from ..support import node, put, values
from .support import A, B, Broker, alone, pair, puts, zookeeper


def test_epoch_of_the_registry_is_the_epoch_of_the_journal() -> None:
    broker = alone()
    assert broker.node.state.epoch == 0
    broker.lead()
    assert (broker.leadership.epoch, broker.node.state.epoch) == (2, 2)
    broker.ask("topic", "create", "a")
    assert [record.header.epoch for record in inspect.dump(broker.node.disk)] == [2, 2]
    again = broker.again()
    assert again.node.state.epoch == 2
    again.lead()
    assert (again.leadership.epoch, again.node.state.epoch) == (4, 4)


def test_epoch_that_is_not_higher_is_refused() -> None:
    broker = alone()
    with pytest.raises(InvariantError, match="epoch would fall from 1 to 0"):
        broker.node.lead(0, broker.registry.topics(), [])


def test_start_that_dies_before_leading_is_known_to_the_next() -> None:
    registry = zookeeper(SimZooKeeper())
    broker = Broker(registry, A)
    starts = [broker.node.recovered.identity.start]
    broker.draw()  # the answer is lost, or the process dies before LED is durable
    for number in (2, 3):
        broker = broker.again()
        broker.draw()
        assert broker.leadership.epoch == number + 1
        starts.append(broker.node.recovered.identity.start)
    broker.begin()
    assert broker.journaled() == ["led"]
    pending = load_or_create(broker.node.disk, SimRandom(random.Random(1))).pending
    assert ([*pending], broker.node.state.registration.starts) == (starts[:2], starts[2:])
    assert broker.again().lead().node.state.epoch == 6


def test_reason_to_give_a_home_up_is_bounded() -> None:
    one, _two = pair()
    code, text = one.ask("cluster", "retire", home=f"{B:016x}", reason="x" * 1001)
    assert (code, "at most 1000 letters" in text) == (400, True)


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
    with pytest.raises(HomeSupersededError, match="it is a copy, or was restored"):
        Broker(broker.registry, A, copied, 3).lead()


def test_journal_that_was_put_back_alone_does_not_lead() -> None:
    broker = Broker(zookeeper(SimZooKeeper()), A).lead()
    older = broker.node.kill()
    newer = Broker(broker.registry, A, copy.deepcopy(older), 2).lead()
    # journal, log and checkpoints of a backup; the rest stays
    files.put(older, REPLICA, files.content(newer.node.disk, REPLICA))
    with pytest.raises(HomeSupersededError, match="it is a copy, or was restored"):
        Broker(broker.registry, A, older, 3).lead()


def test_member_appends_nothing_before_it_leads() -> None:
    broker = Broker(zookeeper(SimZooKeeper()), A).lead()
    again = broker.again()
    end = again.node.store.journal.next_lsn
    for _ in range(10):
        again.node.clock.advance(3600.0)
        again.node.core.tick(again.node.clock.now_ms())
        again.node.want_checkpoint()
        again.node.mark()
    assert (again.node.store.journal.next_lsn, again.node.pipeline.is_idle) == (end, True)


def test_broker_that_moves_into_a_registry_issues_no_session_again() -> None:
    before = node()
    copied = copy.deepcopy(before.kill())
    identity = before.recovered.identity
    broker = Broker(EmbeddedRegistry(identity.cluster, identity.node, before.state.topics), identity.node, copied)
    broker.draw(identity.cluster)
    broker.begin()
    assert broker.node.session().node.newest_session >= broker.node.context.now_ms  # the original may have issued 1


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


def test_figures_of_a_broker_with_registry_are_documented() -> None:
    broker = alone().lead()
    figures = dict(line.split(" ", 1) for line in broker.ask("stats", "registry")[1].splitlines())
    assert figures.keys() == fields("`registry`")
    everything = json.loads(broker.ask("stats", "json")[1])
    assert everything["broker"].keys() <= fields("The broker")
    assert everything["transactions"].keys() == fields("`transactions`") >= OF_CLUSTERS - {"registry"}


def test_lone_broker_tells_the_address_that_its_shell_knows() -> None:
    broker = node()
    broker.context.address = "here:8123"
    told = json.loads(broker.connect().ask("cluster", "homes").body)
    assert told["homes"][0]["leader"] == "here:8123"
