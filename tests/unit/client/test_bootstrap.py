"""Where a client looks for its first broker: addresses of brokers, or a registry that knows them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import txmq
from tests.unit.client.scripted_cluster import ScriptedCluster, scripted_cluster
from tools.simulated.zookeeper import SimSession, SimZooKeeper
from txmq.addresses import Ensemble
from txmq.client import bootstrap
from txmq.client.client import Client
from txmq.errors import BrokerAwayError, ConfigError, RegistryAwayError, RegistryError
from txmq.registry.cluster_metadata import Candidate, Standing
from txmq.registry.zookeeper.registry import ZooKeeperRegistry

ADDRESS = "zk://zoo1,zoo2:2182/prod"


class Zoo:
    """An ensemble, and the sessions that clients opened."""

    def __init__(self) -> None:
        self.ensemble = SimZooKeeper()
        self.sessions: list[SimSession] = []
        self.asked: list[Ensemble] = []

    def open_session(self, ensemble: Ensemble, timeout: float) -> SimSession:
        self.asked.append(ensemble)
        self.sessions.append(self.ensemble.open())
        return self.sessions[-1]

    def found(self, *homes: int) -> ZooKeeperRegistry:
        """A cluster, led at host:<home>."""
        registry = ZooKeeperRegistry(self.ensemble.open(), "/prod")
        registry.join(0xC1, Standing.EMPTY)
        for home in homes:
            who = Candidate(home, f"b{home}", f"host:{home}", 1, frozenset(), 0, f"lock {home}")
            registry.announce(registry.lead(who))
        return registry


@pytest.fixture
def zoo(monkeypatch: pytest.MonkeyPatch) -> Zoo:
    made = Zoo()
    monkeypatch.setattr(bootstrap, "open_session", made.open_session)
    return made


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of what other tests have looked up."""
    monkeypatch.setattr(bootstrap, "_look_ups", {})


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> ScriptedCluster:
    made = scripted_cluster(monkeypatch, 1, 2)
    monkeypatch.setattr(bootstrap, "CLOCK", made.clock)
    return made


def connected(cluster: ScriptedCluster) -> Client:
    return Client(bootstrap.bootstrap_of(ADDRESS), clock=cluster.clock)


def test_leaders_are_read_and_the_registry_session_is_closed(zoo: Zoo, cluster: ScriptedCluster) -> None:
    zoo.found(1, 2)
    with connected(cluster) as client:
        assert client.offsets("t", 1).end == 0
    assert zoo.asked == [Ensemble("zoo1:2181,zoo2:2182", "/prod")]
    assert not zoo.ensemble.has_session(zoo.sessions[0].number)


def test_registry_is_read_again_if_no_known_address_answers(zoo: Zoo, cluster: ScriptedCluster) -> None:
    registry = zoo.found(1, 2)
    with connected(cluster) as client:
        client.topics.refresh("t")
        cluster.kill(1)
        cluster.kill(2)
        cluster.leaders[2] = ("host", 22)
        registry.close()
        again = ZooKeeperRegistry(zoo.ensemble.open(), "/prod")
        again.announce(again.lead(Candidate(2, "b2", "host:22", 2, frozenset({1}), 1, "lock 2")))
        assert client.offsets("t", 1).end == 0
    assert len(zoo.sessions) > 1


@pytest.mark.parametrize(
    ("prepare", "error", "text"),
    [
        (lambda _zoo: None, RegistryError, "/prod/txmq/cluster is not in ZooKeeper"),
        (
            lambda zoo: zoo.found(),
            BrokerAwayError,
            "cluster in zk://zoo1:2181,zoo2:2182/prod is alive",
        ),
        (lambda zoo: zoo.found(1).close(), BrokerAwayError, "homes that are known: 1"),
    ],
)
def test_registry_that_leads_to_no_broker_is_told(
    zoo: Zoo, prepare: Callable[[Zoo], object], error: type[Exception], text: str
) -> None:
    prepare(zoo)
    with pytest.raises(error, match=text):
        txmq.connect(ADDRESS, timeout=0.5)
    assert not any(zoo.ensemble.has_session(session.number) for session in zoo.sessions)


def test_ensemble_that_is_away_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(_ensemble: Ensemble, _timeout: float) -> SimSession:
        raise RegistryAwayError("no server answers")

    monkeypatch.setattr(bootstrap, "open_session", away)
    with pytest.raises(BrokerAwayError, match="ZooKeeper at zoo1:2181,zoo2:2182 does not tell where the brokers are"):
        txmq.connect(ADDRESS, timeout=0.5)
    with txmq.connect(ADDRESS, timeout=0.5, lazy=True) as lazy, pytest.raises(BrokerAwayError):
        lazy.ping()


def test_address_that_is_none_is_refused_without_its_password() -> None:
    with pytest.raises(ConfigError, match=r"bootstrap = 'zk://\*\*\*@zoo1/a b'"):
        txmq.connect("zk://name:secret@zoo1/a b")


def test_password_comes_from_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "shop.password"
    file.write_text("of the file\n")
    file.chmod(0o600)
    monkeypatch.setenv("TXMQ_PASSWORD", "of the environment")
    for text, password, expected in (
        ("txmq://shop@a", "stated", "stated"),
        ("txmq://shop@a", "", "of the environment"),
        (f"txmqs://shop@a?password_file={file}", "", "of the file"),
    ):
        login = bootstrap.bootstrap_of(text, password=password).login
        assert login is not None
        assert login.password is not None
        assert (login.user, login.password()) == ("shop", expected)
        if text.startswith("txmqs"):
            file.write_text("changed")
            assert login.password() == "changed"
    assert bootstrap.bootstrap_of("txmq://a").login is None


@pytest.mark.parametrize(
    ("text", "password", "told"),
    [
        ("txmq://shop@a", "", "there is no password of shop: set TXMQ_PASSWORD"),
        ("txmq://a", "hidden", "there is no user: write txmqs://USER@HOST"),
        ("txmq://a?password_file=x", "", "there is no user"),
        ("txmq://shop@a?password_file=x", "hidden", "the password is given twice"),
        ("txmq://shop@a?password_file=/nowhere", "", "/nowhere: cannot be read"),
        ("txmq://shop@a?ca=x", "hidden", "what stands behind [?] is for TLS"),
        ("txmq://shop@a?password_file=x&ca=y", "hidden", "expected password_file behind"),
        ("zk://a", "hidden", "there is no user: .*user=USER behind zk://"),
        ("zk://a?user=shop", "", "there is no password of shop"),
        ("zk://a?user=-", "hidden", "user='-' is no user's name"),
    ],
)
def test_password_that_cannot_be_used_is_refused(
    monkeypatch: pytest.MonkeyPatch, text: str, password: str, told: str
) -> None:
    monkeypatch.delenv("TXMQ_PASSWORD", raising=False)
    with pytest.raises(ConfigError, match=told) as caught:
        bootstrap.bootstrap_of(text, password=password)
    assert "hidden" not in str(caught.value)
