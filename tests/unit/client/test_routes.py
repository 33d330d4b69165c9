"""One client over several homes: which broker a request goes to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.client.scripted import TOPIC_ID, ScriptedBroker, ScriptedStream
from tests.unit.client.scripted_cluster import ScriptedCluster, scripted_cluster
from txmq.client.bootstrap import Bootstrap
from txmq.client.client import Client
from txmq.client.transport import reconnecting
from txmq.client.transport.reconnecting import Login
from txmq.errors import BrokerAwayError, UnavailableError, UnknownTopicError
from txmq.runtime import net
from txmq.testing.eventually import eventually


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> ScriptedCluster:
    return scripted_cluster(monkeypatch, 1, 2, 3)


@pytest.fixture
def routed(cluster: ScriptedCluster) -> Iterator[Client]:
    with cluster.client(1) as opened:
        opened.ping()
        yield opened


# --- a broker that is alone ------------------------------------------------------------------------------------------


def test_lone_broker_has_one_link_and_gets_no_extra_request(broker: ScriptedBroker, client: Client) -> None:
    client.fetch("t", 0, 0, timeout=0)
    client.offsets("t", 1)
    only = client.routes.any_link()
    assert client.routes.links() == client.routes.all_links() == (only,)
    assert client.routes.topic_id("t") == 0
    assert client.routes.link_of_home(0xBAD) is client.routes.link_for("u", 99) is only
    assert broker.verbs == ["hello", "meta", "hello", "get", "offset"]


# --- routes are learned ----------------------------------------------------------------------------------------------


def test_address_that_answered_last_is_tried_first(monkeypatch: pytest.MonkeyPatch, broker: ScriptedBroker) -> None:
    """Each connection of a client waited for an address that was silent."""
    tried: list[str] = []

    def dial(host: str, port: int, timeout: float) -> ScriptedStream:
        tried.append(host)
        if host == "dead":
            broker.clock.now += timeout
            raise TimeoutError("timed out")
        return broker.connect(host, port, timeout)

    monkeypatch.setattr(net, "connect", dial)
    with Client([("dead", 1), ("good", 1)], clock=broker.clock) as client:
        client.ping()
        client.offsets("t", 0)
        broker.cut()
        client.ping()
    assert tried == ["dead", "good", "good", "good"]


def test_each_partition_is_asked_at_its_home(cluster: ScriptedCluster, routed: Client) -> None:
    for partition in range(3):
        assert routed.offsets("t", partition).end == 0
    assert [home.verbs.count("offset") for home in cluster.homes.values()] == [1, 1, 1]
    assert [link.home for link in routed.routes.links()] == [1, 2, 3]
    assert [routed.routes.link_for("t", partition).home for partition in range(3)] == [1, 2, 3]


def test_home_keeps_its_link(routed: Client) -> None:
    link = routed.routes.link_for("t", 2)
    routed.topics.refresh("t")
    assert routed.routes.link_for("t", 2) is routed.routes.link_of_home(3) is link


def test_first_request_of_a_lazy_client_finds_the_owner(cluster: ScriptedCluster) -> None:
    with cluster.client(1) as lazy:
        assert lazy.fetch_raw("t", 1, 0, timeout=0) == b""
    assert (cluster.homes[1].verbs.count("get"), cluster.homes[2].verbs.count("get")) == (1, 1)


def test_topic_made_anew_elsewhere_is_found_after_one_refusal(cluster: ScriptedCluster, routed: Client) -> None:
    routed.offsets("t", 0)
    cluster.topics["t"], cluster.version = [2, 3], 2
    assert routed.offsets("t", 0).end == 0
    assert [cluster.homes[home].verbs.count("offset") for home in (1, 2)] == [2, 1]


def test_map_of_a_broker_that_lags_is_not_taken_over(cluster: ScriptedCluster, routed: Client) -> None:
    cluster.topics["t"], cluster.version = [2, 3], 2
    routed.topics.refresh("t")
    cluster.topics["t"], cluster.version = [1, 2, 3], 1
    routed.topics.refresh("t")
    assert routed.routes.homes_of("t") == (2, 3)


def test_topic_has_one_id_until_it_is_forgotten(cluster: ScriptedCluster, routed: Client) -> None:
    assert [routed.routes.topic_id("t") for _ in range(2)] == [TOPIC_ID] * 2
    assert sum(home.verbs.count("meta") for home in cluster.homes.values()) == 1
    for home in cluster.homes.values():
        home.topic_id = TOPIC_ID + 1
    assert routed.routes.topic_id("t") == TOPIC_ID
    routed.routes.forget_topics()
    assert routed.routes.topic_id("t") == TOPIC_ID + 1
    assert routed.topics.known("t").topic_id == TOPIC_ID + 1


def test_later_topic_of_a_name_counts_whatever_its_version(cluster: ScriptedCluster, routed: Client) -> None:
    cluster.version = 9
    assert routed.routes.topic_id("t") == TOPIC_ID
    cluster.version = 1
    for topic_id, expected in ((TOPIC_ID + 1, TOPIC_ID + 1), (TOPIC_ID, TOPIC_ID + 1)):
        for home in cluster.homes.values():
            home.topic_id = topic_id
        routed.topics.refresh("t")
        assert routed.routes.topic_id("t") == expected


def test_partition_that_does_not_exist_is_the_brokers_answer(routed: Client) -> None:
    with pytest.raises(UnknownTopicError):
        routed.offsets("t", 3)
    with pytest.raises(UnknownTopicError):
        routed.offsets("u", 0)


def test_unknown_home_is_left_to_any_broker(routed: Client) -> None:
    assert routed.routes.link_of_home(0xBAD) is routed.routes.any_link()


# --- homes that are away, or move ------------------------------------------------------------------------------------


def test_home_is_followed_to_another_address(cluster: ScriptedCluster, routed: Client) -> None:
    routed.offsets("t", 1)
    cluster.kill(2)
    cluster.leaders[2] = ("host", 22)
    assert routed.offsets("t", 1).end == 0
    assert routed.routes.link_of_home(2).address == ("host", 22)


def test_session_is_never_resumed_at_a_stranger(cluster: ScriptedCluster, routed: Client) -> None:
    first = routed.routes.link_of_home(2).session
    cluster.kill(2)
    cluster.leaders[3], cluster.leaders[2] = ("host", 2), ("host", 22)
    cluster.homes[3].cut()
    assert routed.routes.link_of_home(2).session is first
    routed.routes.link_of_home(2).control.repeat("ping", timeout=5)
    assert routed.routes.link_of_home(2).control.session is first
    assert cluster.homes[3].next_session == 1  # the stranger has opened none


def test_any_broker_answers_for_one_that_is_away(cluster: ScriptedCluster, routed: Client) -> None:
    routed.topics.refresh("t")
    cluster.kill(1)
    assert routed.topics.refresh("t").config.partitions == 3
    assert routed.routes.link_of_home(1).is_away
    assert routed.routes.any_link().home == 2


def test_broker_that_waits_for_its_registry_is_passed_over(cluster: ScriptedCluster, routed: Client) -> None:
    routed.topics.refresh("t")
    cluster.homes[1].waits_for_registry = True
    assert routed.topics.refresh("t").config.partitions == 3


def test_reads_wait_for_a_home_that_starts(
    cluster: ScriptedCluster, routed: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    routed.topics.refresh("t")
    cluster.homes[2].waits_for_registry = True
    begun, sleep = cluster.clock.now, cluster.clock.sleep
    with pytest.raises(UnavailableError, match="waits for the registry"):
        routed.fetch("t", 1, 0, timeout=0)
    assert cluster.clock.now - begun == pytest.approx(routed.timeout, abs=0.1)

    def begin_to_serve(seconds: float) -> None:
        cluster.homes[2].waits_for_registry = False
        sleep(seconds)

    for read in (lambda: routed.fetch("t", 1, 0, timeout=0), lambda: routed.offsets("t", 1)):
        cluster.homes[2].waits_for_registry = True
        monkeypatch.setattr(cluster.clock, "sleep", begin_to_serve)
        read()
        assert not cluster.homes[2].waits_for_registry


def test_partitions_of_other_homes_go_on_beside_one_away(cluster: ScriptedCluster, routed: Client) -> None:
    routed.topics.refresh("t")
    cluster.kill(2)
    with pytest.raises(BrokerAwayError, match=r"cannot connect to home 0{15}2: it is not led at host:1"):
        routed.offsets("t", 1)
    assert routed.offsets("t", 2).end == 0
    assert routed.routes.link_of_home(2).is_away


def test_home_that_comes_back_is_noticed_without_a_request(cluster: ScriptedCluster, routed: Client) -> None:
    routed.topics.refresh("t")
    cluster.kill(2)
    with pytest.raises(BrokerAwayError):
        routed.offsets("t", 1)
    cluster.leaders[2] = ("host", 22)
    eventually(lambda: not routed.routes.link_of_home(2).is_away, "a thread has looked at the home")


def test_home_without_leader_is_away_until_it_has_one(cluster: ScriptedCluster, routed: Client) -> None:
    cluster.kill(3)
    routed.topics.refresh("t")
    assert routed.routes.link_of_home(3).is_away
    cluster.leaders[3] = ("host", 33)
    eventually(lambda: not routed.routes.link_of_home(3).is_away, "a thread has looked at the home")


def test_bootstrap_address_is_tried_when_all_brokers_have_moved(cluster: ScriptedCluster) -> None:
    with cluster.client(1, 9) as client:
        client.topics.refresh("t")
        for home in (1, 2, 3):
            cluster.kill(home)
        cluster.leaders = {1: ("host", 11), 2: ("host", 22), 3: ("host", 9)}
        assert client.offsets("t", 0).end == 0


def test_every_connection_logs_in_also_when_all_brokers_have_moved(
    cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    login, used = Login("shop", None), list[Login | None]()
    monkeypatch.setattr(reconnecting, "log_in", lambda _connection, shown, _deadline: used.append(shown))
    found = Bootstrap(lambda _timeout: [("host", 1), ("host", 9)], login=login)
    with Client(found, clock=cluster.clock) as client:
        client.topics.refresh("t")
        for home in (1, 2, 3):
            cluster.kill(home)
        cluster.leaders = {1: ("host", 11), 2: ("host", 22), 3: ("host", 9)}
        assert client.offsets("t", 0).end == 0
    assert len(used) > 2
    assert used == [login] * len(used)


def test_lists_of_all_homes_fail_if_no_broker_answers(cluster: ScriptedCluster, routed: Client) -> None:
    for home in (1, 2, 3):
        cluster.kill(home)
    with pytest.raises(BrokerAwayError, match="no broker of the cluster"):
        routed.routes.all_links()


def test_request_goes_on_when_the_last_home_loses_its_leader(
    cluster: ScriptedCluster, routed: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    routed.topics.refresh("t")
    cluster.homes[1].waits_for_registry = True
    links = routed.routes._known_links()
    known = iter([links[:2], links[:1]])  # home 1 was asked, and home 2 is not led any more
    monkeypatch.setattr(routed.routes, "_known_links", lambda: next(known, links))
    assert routed.topics.refresh("t").config.partitions == 3
