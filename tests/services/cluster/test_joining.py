"""Real brokers enter a cluster: one that was alone, empty ones, and those that are refused."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import txmq
from txmq.client.transaction.conversation import Conversation
from txmq.client.transaction.messages import MessageBuffer
from txmq.testing.eventually import WITHIN_S, eventually
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.cluster import Cluster
from txmq.testing.processes.zookeeper import Ensemble

from .asking import asked, described
from .conftest import NUMBERS

UUID = "0123456789abcdef" * 2
POINTS = (
    "registry.joined:1", "registry.led:1", "registry.topic_published:1", "registry.query_published:1",
    "registry.entered:1",
)  # fmt: skip


def _refused(broker: BrokerProcess, status: int = 1) -> str:
    """The last words of a broker that does not start."""
    broker.launch()
    assert broker.wait(WITHIN_S) == status
    return broker.logs().splitlines()[-1]


def _listens(broker: BrokerProcess) -> bool:
    try:
        return asked(broker, "ping")[0] == 200
    except ConnectionRefusedError:
        return False


def _ids(broker: BrokerProcess) -> dict[str, int]:
    """The ids of all topics."""
    code, body = asked(broker, "topic", "list", "*")
    assert code == 200, body
    return {topic["name"]: topic["topic_id"] for topic in json.loads(body)["topics"]}


def _prepare(client: txmq.Client) -> str:
    """A transaction of one message that waits for its database."""
    there = Conversation(client.routes.any_link(), client.clock, 30.0)
    there.begin()
    buffer = MessageBuffer(None, lambda _topic: 0)
    buffer.add("orders", 0, (None, b"prepared", [], 1_700_000_000_000))
    there.submit_prepare(there.take_parts(buffer), "shop", UUID, "txmq_marker").result()
    return there.txid


def test_a_single_broker_moves_with_all_it_has(tmp_path: Path, alone: Cluster) -> None:
    [member] = alone.brokers
    with BrokerProcess(member.data_dir) as single:
        with txmq.connect(single.address) as client:
            for name in ("orders", "payments", "gone"):
                client.topics.create(name, partitions=2)
            client.topics.delete("gone")
            client.producer().send("orders", b"kept", partition=0)
            with client.consumer("group", ["orders"], start="earliest") as consumer:
                [message] = consumer.poll(1, WITHIN_S)
                message.ack()
            txid = _prepare(client)
        for words in (("epoch", "*"), ("open", "totals", "epoch=1")):
            assert asked(single, "query", *words, "0")[0] == 200
        assert single.stop() == 0
    for point in POINTS:
        member.launch(env={"TXMQ_CRASH": point})
        assert member.wait(WITHIN_S) == -signal.SIGKILL
    member.start()
    with txmq.connect(member.address) as client:
        assert _ids(member) == {"orders": 1, "payments": 2}
        assert [row["txid"] for row in client.transactions.list()] == [txid]
        [partition] = [row for row in client.groups.describe("group")["partitions"] if row["partition"] == 0]
        assert partition["offset"] == 1
        client.transactions.commit(txid, "the database has its row")
        assert [message.value for message in client.browse("orders")] == [b"kept", b"prepared"]
        assert json.loads(asked(member, "query", "epoch", "*", "0")[1]) == {"epoch": 2}
        assert json.loads(asked(member, "query", "open", "totals", "epoch=2", "0")[1])["query"] == "totals"
        client.topics.create("later")
        assert _ids(member)["later"] == 4  # 3 was given to the topic that was deleted
    [home] = described(member)["homes"]
    assert home["leader"] == f"{member.host}:{member.port}"


def test_an_empty_directory_joins_a_used_one_is_refused(tmp_path: Path, alone: Cluster) -> None:
    alone.start()
    joining = alone.broker("joins")
    joining.launch(env={"TXMQ_CRASH": "registry.cluster_taken:1"})
    assert joining.wait(WITHIN_S) == -signal.SIGKILL
    assert not (joining.data_dir / "node.json").exists()
    used = alone.broker("used")
    with BrokerProcess(used.data_dir) as single:
        single.stop()
    with joining:
        assert described(joining)["cluster"] == described(alone.brokers[0])["cluster"]
        assert len(described(joining)["homes"]) == 2
        assert "start with an empty directory" in _refused(used)
        joining.kill()
        elsewhere = BrokerProcess(
            joining.data_dir, settings={"registry": alone.registry + "/mistyped", "broker_name": "joins"}
        )
        assert "correct the registry's address, or make the registry anew" in _refused(elsewhere)
        assert "start the broker with --registry" in _refused(BrokerProcess(joining.data_dir), 2)


def test_names_and_homes_are_led_once(tmp_path: Path, alone: Cluster) -> None:
    [original] = alone.start().brokers
    again = alone.broker("again", settings={"broker_name": "broker-0"})
    assert "give this one another broker_name" in _refused(again)
    copy = alone.broker("copy", settings={"broker_name": "broker-0"})
    shutil.copytree(original.data_dir, copy.data_dir)
    assert "stop that process" in _refused(copy)
    original.pause()  # for longer than its session
    with copy:
        original.resume()
        assert original.wait(WITHIN_S) == 1
        assert "stop" in original.logs().splitlines()[-1]
        assert "is a copy, or was restored" in _refused(original)
        assert described(copy)["homes"][0]["leader"] == f"{copy.host}:{copy.port}"


def test_a_member_listens_while_zookeeper_is_away(tmp_path: Path, alone: Cluster, ensemble: Ensemble) -> None:
    [broker] = alone.start().brokers
    assert asked(broker, "topic", "create", "orders")[0] == 200
    broker.kill()
    ensemble.kill()
    broker.launch()
    try:
        eventually(lambda: _listens(broker), "the broker listens")
        code, body = asked(broker, "get", "orders", "0", "0", "100")
        assert (code, body.split()[0]) == (503, "unavailable")
        assert described(broker)["registry"]["state"] == "waiting"
    finally:
        ensemble.start()
    broker.wait_until_ready()
    assert asked(broker, "topic", "describe", "orders")[0] == 200


def test_credentials_close_the_registry_and_stay_secret(tmp_path: Path, ensemble: Ensemble) -> None:
    hosts = f"{ensemble.hosts}/closed-{next(NUMBERS)}"
    address = f"zk://billing:sesame@{hosts}"
    with BrokerProcess(tmp_path / "closed", settings={"registry": address}) as broker:
        assert described(broker)["registry"]["address"] == f"zk://***@{hosts}"
        stranger = BrokerProcess(tmp_path / "stranger", settings={"registry": address.replace("billing:sesame@", "")})
        assert "give the credentials under which the nodes were made" in _refused(stranger)
        told = [asked(broker, "stats", item)[1] for item in ("config", "json", "registry")]
        assert "sesame" not in "".join([broker.logs(), stranger.logs(), *told])


def test_a_broker_with_credentials_leaves_an_open_cluster_alone(tmp_path: Path, alone: Cluster) -> None:
    """Its nodes would be closed to the others: none of them, nor a client, would read what the cluster has."""
    [broker] = alone.start().brokers
    registry = alone.registry.replace("zk://", "zk://billing:sesame@")
    assert "was made without credentials" in _refused(
        BrokerProcess(tmp_path / "later", settings={"registry": registry})
    )
    broker.restart()
    assert [home["home"] for home in described(broker)["homes"]] == [described(broker)["home"]]
