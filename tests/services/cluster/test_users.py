"""Users of three real brokers and a real ZooKeeper: one truth, which no home outlives with an older one."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

import txmq
from tests.services.broker.wire import Wire
from txmq.broker.shell.first_administrator import content_of
from txmq.cli.main import app
from txmq.client.admin.cluster import Users
from txmq.errors import BadRequestError, UnauthenticatedError, UnavailableError
from txmq.protocol.scram import keys_of
from txmq.runtime.private_files import write_private
from txmq.testing.eventually import WITHIN_S, eventually
from txmq.testing.processes.broker import BrokerFailedError, BrokerProcess
from txmq.testing.processes.cluster import Cluster
from txmq.testing.processes.zookeeper import Ensemble

from .branches import Home, OverTwoHomes, values
from .conftest import NUMBERS
from .guarded import OPS, PENCIL, guarded, is_served, logs_in, operator, serves

REACHES_S, TRIES = 1.0, 3  # a machine that is busy for a moment must not turn it red


@pytest.fixture
def cluster(tmp_path: Path, ensemble: Ensemble) -> Iterator[Cluster]:
    with guarded(tmp_path, ensemble, f"/users-{next(NUMBERS)}") as made:
        yield made


def logged_in(broker: BrokerProcess, user: str = "shop", password: str = "orders") -> Wire:
    with contextlib.ExitStack() as opened:
        wire = opened.enter_context(Wire(broker))
        assert wire.log_in(user, password) == 200
        assert is_served(wire) == 200
        opened.pop_all()
        return wire


def test_user_is_served_by_every_home_and_strangers_by_none(cluster: Cluster) -> None:
    for broker in cluster.brokers:
        with Wire(broker) as wire:
            assert is_served(wire) == 401
    with txmq.connect(cluster.registry_of("shop"), password="orders") as client, client.producer() as producer:
        with producer.transaction() as tx:
            for partition in range(3):
                tx.send("orders", b"%d" % partition, partition=partition)
        tx.wait_visible(60.0)
        assert {message.value for message in client.browse("orders")} == {b"0", b"1", b"2"}
    with pytest.raises(UnauthenticatedError), txmq.connect(cluster.registry_of("shop"), password="wrong") as client:
        client.topics.list()


def test_removed_user_is_refused_by_every_home_within_a_second(cluster: Cluster) -> None:
    took_s = []
    with operator(cluster, 1) as users:
        for _ in range(TRIES):
            took_s.append(_removed_everywhere(cluster, users))
            for broker in cluster.brokers:
                assert not logs_in(broker, "shop", "orders")
            if took_s[-1] < REACHES_S:
                return
            users.add("shop", "orders")
            users.acl("grant", "shop", {"may": "read", "topic": "orders"})
            for broker in cluster.brokers:
                eventually(partial(serves, broker, "shop", "orders"), "every home knows the user")
    raise AssertionError(f"seconds until the last home knew: {took_s}")


def _removed_everywhere(cluster: Cluster, users: Users) -> float:
    """Seconds from the answer to the removal until the last home refuses."""
    with contextlib.ExitStack() as opened:
        wires = [opened.enter_context(logged_in(broker)) for broker in cluster.brokers]
        users.remove("shop")
        removed = time.monotonic()
        for wire in wires:
            eventually(partial(_is_refused, wire), "a removed user is refused")
        return time.monotonic() - removed


def _is_refused(wire: Wire) -> bool:
    return is_served(wire) == 401


def test_home_that_was_down_serves_no_removed_user(cluster: Cluster) -> None:
    away = cluster.brokers[2]
    away.kill()
    with operator(cluster) as users:
        users.remove("shop")
    cluster.ensemble.pause()
    away.launch()
    try:
        eventually(partial(_listens, away), "it listens, and waits for the registry")
        for user, password in (("shop", "orders"), (OPS, PENCIL)):
            with Wire(away) as wire:
                assert wire.log_in(user, password) == 503
                assert wire.ask(b"cluster describe 1\r\n")[0] == 401
    finally:
        cluster.ensemble.resume()
    eventually(partial(_lets_in, away), "it serves, and no removed user")
    assert not logs_in(away, "shop", "orders")


def _listens(broker: BrokerProcess) -> bool:
    try:
        with Wire(broker) as wire:
            return wire.ask(b"ping 1\r\n")[0] == 200
    except OSError:
        return False


def _lets_in(broker: BrokerProcess) -> bool:
    """Whether the administrator is served; the removed user never is."""
    assert not logs_in(broker, "shop", "orders")
    return logs_in(broker, OPS, PENCIL)


def test_home_that_was_paused_serves_no_removed_user(cluster: Cluster) -> None:
    paused = cluster.brokers[2]
    with logged_in(paused) as wire, logged_in(paused, OPS, PENCIL) as ours:
        paused.pause()
        with operator(cluster) as users:
            users.remove("shop")
        behind = time.monotonic() + 1.5
        eventually(lambda: time.monotonic() > behind, "it stands still for long enough to know that it did")
        wire.send(b"topic describe orders 1\r\n")
        ours.send(b"topic describe orders 1\r\n")
        paused.resume()
        assert wire.hear(1).codes == [401]
        assert ours.hear(1).codes == [200]


def test_nothing_changes_while_zookeeper_is_away_and_logins_go_on(cluster: Cluster) -> None:
    with operator(cluster) as users:
        cluster.ensemble.pause()
        try:
            with pytest.raises(UnavailableError, match="the registry does not answer"):
                users.add("late", "pencil")
            assert logs_in(cluster.brokers[0], "shop", "orders")
            assert {row["user"] for row in users.list()} == {OPS, "shop"}
        finally:
            cluster.ensemble.resume()
        eventually(lambda: _adds(users, "later"), "changes go on with ZooKeeper")


def _adds(users: Users, name: str) -> bool:
    try:
        users.add(name, "pencil")
    except UnavailableError:
        return False
    return True


def test_change_whose_broker_dies_behind_the_registry_is_known_everywhere(cluster: Cluster) -> None:
    broker = cluster.brokers[0]
    with operator(cluster, 0):
        pass
    broker.kill()
    broker.start(env={"TXMQ_CRASH": "registry.users_changed:1"})
    with logged_in(broker, OPS, PENCIL) as wire:
        wire.send(b"user remove shop 0 1\r\n")
        assert wire.hear(1).answers == []
    for other in cluster.brokers[1:]:
        eventually(partial(_is_unknown, other), "the others know it")
    assert broker.wait(WITHIN_S) == -signal.SIGKILL
    broker.start(env={})
    assert not logs_in(broker, "shop", "orders")


def _is_unknown(broker: BrokerProcess) -> bool:
    return not logs_in(broker, "shop", "orders")


def test_two_administrators_at_once_lose_no_change(cluster: Cluster) -> None:
    with contextlib.ExitStack() as opened:
        wires = [opened.enter_context(logged_in(broker, OPS, PENCIL)) for broker in cluster.brokers]
        _add_at_once(wires)
    with operator(cluster) as users:
        assert len(users.list()) == 32


def _add_at_once(wires: list[Wire]) -> None:
    for number in range(10):
        for home, wire in enumerate(wires):
            body = json.dumps({"keys": None, "certificate": f"CN=u{number}-{home}"})
            wire.send(f"user add u{number}-{home} {len(body)} 1\r\n{body}".encode())
        assert [wire.hear(1).codes for wire in wires] == [[200]] * 3


def test_brokers_settle_branches_with_users(cluster: Cluster) -> None:
    with operator(cluster) as users:
        users.acl("grant", "shop", {"cluster": None})
    homes = []
    for broker in cluster.brokers[:2]:
        eventually(partial(_tells_homes, broker), "the home knows the grant")
        homes.append(Home(broker, _own(broker), login=("shop", "orders")))
    decided = OverTwoHomes.prepared(homes[0], homes[1], b"decided there")
    decided.decide(b"decided here")
    there = cluster.brokers[1]
    for home in homes:
        home.close()
    there.restart()
    login = ("shop", "orders")
    eventually(lambda: b"decided there" in values(there, homes[1].partition, login), "the branch asked, and was told")
    assert b"decided here" in values(cluster.brokers[0], homes[0].partition, login)
    assert '"user": ".home-' in cluster.brokers[0].logs()


def test_stranger_ends_no_transaction_of_another_home(cluster: Cluster) -> None:
    """Its deadline made the broker of the branch fence the transaction, for whoever had prepared the branch."""
    with operator(cluster) as users:
        users.add("mallory", "writes")
        users.acl("grant", "mallory", {"may": "write", "topic": "orders"})
    here, there = cluster.brokers[:2]
    for broker in (here, there):
        eventually(partial(serves, broker, "mallory", "writes"), "every home knows the user")
        eventually(partial(_tells_homes, broker), "it knows the homes")
    with (
        contextlib.closing(Home(here, _own(here), ("shop", "orders"))) as shop,
        contextlib.closing(Home(there, _own(there), ("mallory", "writes"))) as mallory,
    ):
        txid, deadline_ms = shop.txid(), int(time.time() * 1000) + 1500
        mallory.ask(f"prepare {mallory.txid()} branch of={txid} deadline={deadline_ms}", b"of nobody")
        eventually(lambda: _was_asked(here), "its home was asked")
        eventually(lambda: time.time() * 1000 > deadline_ms, "the branch is overdue")
        shop.ask(f"commit {txid}", b"mine")
        assert values(here, shop.partition, ("shop", "orders")) == [b"mine"]
    assert '"event": "fenced"' not in here.logs()


def _was_asked(broker: BrokerProcess) -> bool:
    return any(word in broker.logs() for word in ("user's than mallory~", '"event": "fenced"'))


def _tells_homes(broker: BrokerProcess) -> bool:
    with logged_in(broker) as wire:
        return wire.ask(b"cluster homes 1\r\n")[0] == 200


def _own(broker: BrokerProcess) -> int:
    with logged_in(broker) as wire:
        described = json.loads(wire.ask(b"topic describe orders 1\r\n")[1])
        home = json.loads(wire.ask(b"cluster homes 1\r\n")[1])["homes"]
    names = {row["name"]: row["home"] for row in home}
    return int(described["homes"].index(names[broker.data_dir.name]))


def test_users_need_closed_nodes(tmp_path: Path, ensemble: Ensemble) -> None:
    made = Cluster(tmp_path, ensemble, chroot=f"/open-{next(NUMBERS)}", size=1)
    with made, txmq.connect(made.address) as client:
        with pytest.raises(BadRequestError, match="give the registry's address a name and a password"):
            Users(client.control, client.timeout).add(OPS, PENCIL)
        client.topics.list()


def test_lone_broker_brings_its_users_to_the_cluster(tmp_path: Path, ensemble: Ensemble) -> None:
    made = Cluster(tmp_path, ensemble, chroot=f"/brought-{next(NUMBERS)}", size=2, credentials="brokers:secret")
    founder, member = made.brokers
    lone = BrokerProcess(founder.data_dir)
    with lone, txmq.connect(lone.address) as client:
        client.topics.create("orders")
        Users(client.control, client.timeout).add(OPS, PENCIL)
    with made:
        for broker in (founder, member):
            with Wire(broker) as wire:
                assert is_served(wire) == 401
            assert logs_in(broker, OPS, PENCIL)


def test_first_administrator_of_a_file_is_the_clusters(tmp_path: Path, ensemble: Ensemble) -> None:
    files = []
    for name in ("one", "two"):
        files.append(tmp_path / name)
        write_private(str(files[-1]), content_of(name, keys_of(PENCIL, bytes(16))))
    made = Cluster(tmp_path, ensemble, chroot=f"/first-{next(NUMBERS)}", size=0, credentials="brokers:secret")
    brokers = [made.broker(f"b{n}", settings={"first_administrator": str(file)}) for n, file in enumerate(files)]
    with brokers[0], brokers[1]:
        for broker in brokers:
            with Wire(broker) as wire:
                assert wire.ask(b"topic list * 1\r\n")[0] == 401
            assert (logs_in(broker, "one", PENCIL), logs_in(broker, "two", PENCIL)) == (True, False)


def test_commands_find_a_cluster_and_its_users(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TXMQ_PASSWORD", PENCIL)
    monkeypatch.setenv("TXMQ_NEW_PASSWORD", "late")
    named = ["--bootstrap", cluster.registry_of(OPS)]
    run = CliRunner().invoke
    for words in (
        ["user", "add", "late"], ["acl", "add", "late", "--may", "read", "--topic", "orders"],
        ["quota", "set", "--user", "late", "--requests-per-s", "100"],
    ):  # fmt: skip
        done = run(app, [*words, *named])
        assert done.exit_code == 0, done.output
    assert "late" in run(app, ["acl", "list", *named]).output
    assert "100" in run(app, ["quota", "list", *named]).output
    assert run(app, ["user", "remove", "late", *named]).exit_code == 0
    assert "late" not in run(app, ["user", "list", *named]).output


def test_open_nodes_take_no_users_of_a_lone_broker(tmp_path: Path, ensemble: Ensemble) -> None:
    made = Cluster(tmp_path, ensemble, chroot=f"/open-{next(NUMBERS)}", size=2)
    founder, member = made.brokers
    lone = BrokerProcess(founder.data_dir)
    with lone, txmq.connect(lone.address) as client:
        Users(client.control, client.timeout).add(OPS, PENCIL)
    with pytest.raises(BrokerFailedError, match="give the registry's"):
        founder.start()
    with member:  # nothing of the founder stands in the registry
        pass
