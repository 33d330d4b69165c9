"""A replica follows its leader: real processes, a real ZooKeeper, kill -9."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import txmq
from tests.services.broker.wire import Wire
from txmq.client.admin.cluster import Users
from txmq.redo import checkpoint, replica_identity
from txmq.runtime.os_disk import OSDisk
from txmq.testing.certificates import CertificateAuthority
from txmq.testing.eventually import WITHIN_S, eventually
from txmq.testing.processes.broker import BrokerFailedError, BrokerProcess
from txmq.testing.processes.cluster import Cluster
from txmq.testing.processes.zookeeper import Ensemble

from .conftest import NUMBERS


def _replica(cluster: Cluster, name: str = "replica") -> BrokerProcess:
    return cluster.broker(name, settings={"replica_of": cluster.brokers[0].data_dir.name})


@contextmanager
def _reader(broker: BrokerProcess) -> Iterator[Wire]:
    """A connection that may read a copy."""
    with Wire(broker) as wire:
        assert wire.ask(b"hello 1 test replica 1\r\n")[0] == 200
        yield wire


def _end(broker: BrokerProcess) -> int:
    with _reader(broker) as wire:
        code, body = wire.ask(b"offset orders 0 latest 2\r\n")
    return int(body.split()[0]) if code == 200 else -1


def _is_told(broker: BrokerProcess, user: str, password: str) -> bool:
    """Whether a user sees the first message."""
    with Wire(broker) as wire:
        if wire.log_in(user, password) != 200:
            return False
        assert wire.ask(b"hello 1 test replica 1\r\n")[0] == 200
        code, body = wire.ask(b"offset orders 0 latest 2\r\n")
    return code == 200 and body.split()[0] == b"1"


def _holds(cluster: Cluster, replica: BrokerProcess) -> None:
    """Wait until readers of the replica see what those of the leader see; then the files are the same."""
    leader = cluster.brokers[0]
    eventually(lambda: _end(replica) == _end(leader) >= 0, "the replica has what its leader has")
    assert _segments(replica) == _segments(leader)


def _segments(broker: BrokerProcess) -> dict[str, bytes]:
    log = broker.data_dir / "log"
    return {str(path.relative_to(log)): path.read_bytes() for path in log.rglob("*.log")}


def _same_checkpoint(one: Path, other: Path) -> bool:
    disks = OSDisk(str(one)), OSDisk(str(other))
    common = set(checkpoint.list_lsns(disks[0])) & set(checkpoint.list_lsns(disks[1]))
    for lsn in common:
        first, second = (checkpoint.read(disk, lsn, node_id=None) for disk in disks)
        assert (first.chain, first.state) == (second.chain, second.state)
    return bool(common)


def _figures(broker: BrokerProcess) -> dict[str, str]:
    with Wire(broker) as wire:
        code, body = wire.ask(b"stats replication 1\r\n")
    assert code == 200, body
    return dict(line.split(" ", 1) for line in body.decode().splitlines())


def test_replica_holds_what_its_leader_holds(alone: Cluster) -> None:
    alone.start()
    with txmq.connect(alone.address) as client, ExitStack() as stack:
        client.topics.create("orders", partitions=1)
        producer = client.producer()
        for number in range(200):
            producer.send("orders", b"%d" % number)
        replica = stack.enter_context(_replica(alone))
        for number in range(200, 400):
            with producer.transaction() as tx:
                tx.send("orders", b"%d" % number)
        _holds(alone, replica)
        replica.kill()
        for number in range(400, 600):
            producer.send("orders", b"%d" % number)
        replica.start()
        _holds(alone, replica)
        eventually(
            lambda: _same_checkpoint(alone.brokers[0].data_dir, replica.data_dir), "both took the same checkpoint"
        )


def test_replica_goes_on_when_its_leader_is_back(alone: Cluster) -> None:
    alone.start()
    with txmq.connect(alone.address) as client, _replica(alone) as replica:
        client.topics.create("orders", partitions=1)
        client.producer().send("orders", b"before")
        _holds(alone, replica)
        alone.brokers[0].kill()
        alone.brokers[0].start()
        client.producer().send("orders", b"after")
        _holds(alone, replica)


def test_replica_waits_for_a_leader_that_is_away(alone: Cluster) -> None:
    alone.start()
    alone.brokers[0].kill()
    replica = _replica(alone)
    replica.launch()
    eventually(lambda: "waits for the leader of the home" in replica.logs(), "it waits")
    assert replica.stop() == -signal.SIGTERM
    assert not list(replica.data_dir.glob("journal/*")), "it has begun nothing"
    replica.launch()
    try:
        alone.start()
        with txmq.connect(alone.address) as client:
            client.topics.create("orders", partitions=1)
            client.producer().send("orders", b"first")
        replica.wait_until_ready(WITHIN_S)
        _holds(alone, replica)
    finally:
        replica.kill()


def test_replica_of_an_unknown_home_is_told_which_there_are(alone: Cluster) -> None:
    alone.start()
    replica = alone.broker("replica", settings={"replica_of": "nobody"})
    replica.launch()
    assert replica.wait(WITHIN_S) == 1
    assert "replica_of: the cluster has no home 'nobody'; it has broker-0 (" in replica.logs()


def test_replica_serves_readers_and_nothing_else(alone: Cluster) -> None:
    alone.start()
    leader = alone.brokers[0]
    with txmq.connect(alone.address) as client, _replica(alone) as replica:
        client.topics.create("orders", partitions=1)
        client.producer().send("orders", b"one")
        _holds(alone, replica)
        with Wire(replica) as wire:
            assert json.loads(wire.ask(b"hello 1 test 1\r\n")[1])["replica"] is True
            code, body = wire.ask(b"get orders 0 0 1000 2\r\n")
            assert (code, body.decode().split()[1]) == (409, f"leader={leader.host}:{leader.port}")
        with _reader(replica) as wire:
            assert wire.ask(b"get orders 0 0 1000 2\r\n")[0] == 200
            assert wire.ask(b"get orders 0 7 1000 3\r\n") == (200, b"")  # the leader may have it already
            assert wire.ask(b"get orders 1 0 1000 4\r\n")[0] == 404
            assert wire.ask(b"topic describe orders 5\r\n")[0] == 200
            for line in (b"put orders 0 raw 1 6\r\nx", b"topic delete orders 7\r\n", b"hello 1 test session=new 8\r\n"):
                assert wire.ask(line)[0] == 409, line
            assert wire.ask(b"ping 9\r\n") == (200, b"pong\n")
        assert _figures(replica)["role"] == "replica"
        eventually(lambda: _figures(replica)["lag_bytes"] == "0", "the replica has all of it")
        told = _figures(leader)
        assert (told["role"], told["replicas"]) == ("leader", "1")


def test_silent_leader_ends_reads_at_its_replica(alone: Cluster) -> None:
    alone.start()
    replica = alone.broker("replica", settings={"replica_of": "broker-0", "replica_reads_ms_max": 1500})
    with txmq.connect(alone.address) as client, replica:
        client.topics.create("orders", partitions=1)
        client.producer().send("orders", b"one")
        _holds(alone, replica)
        alone.brokers[0].pause()
        with _reader(replica) as wire:
            ask = b"offset orders 0 latest 2\r\n"
            eventually(lambda: wire.ask(ask)[0] == 503, "readers are refused")
            alone.brokers[0].resume()
            eventually(lambda: wire.ask(ask)[0] == 200, "readers are served again")


def test_leader_with_older_directory_is_no_leader_of_the_replica(alone: Cluster, tmp_path: Path) -> None:
    """The registry would refuse the older copy; here it was made the truth by hand."""
    alone.start()
    leader = alone.brokers[0]
    with txmq.connect(alone.address) as client, _replica(alone) as replica:
        client.topics.create("orders", partitions=1)
        client.producer().send("orders", b"kept")
        _holds(alone, replica)
        leader.stop()
        shutil.copytree(leader.data_dir, tmp_path / "older")
        leader.start()
        client.producer().send("orders", b"lost at the leader")
        _holds(alone, replica)
        leader.kill()
        shutil.rmtree(leader.data_dir)
        shutil.copytree(tmp_path / "older", leader.data_dir)
        newest = replica.data_dir
        replica_identity.add_start(OSDisk(str(leader.data_dir)), _led_start(newest))
        eventually(lambda: _starts(leader), "the older directory leads")
        assert replica.wait(WITHIN_S) == 1
        assert "this directory is no copy of it" in replica.logs()


def _led_start(directory: Path) -> int:
    """The newest start that the journal of a directory names: the one that the registry knows."""
    from txmq.redo import entries, inspect

    starts = [
        int(json.loads(bytes(body))["start"], 16)
        for record in inspect.dump(OSDisk(str(directory)))
        if record.kind == "group"
        for kind, _flags, body in entries.split(record.payload)
        if kind == entries.LED
    ]
    return starts[-1]


def _starts(broker: BrokerProcess) -> bool:
    try:
        broker.start()
    except BrokerFailedError:
        return False
    return True


def test_replica_that_was_away_for_too_long_ends(alone: Cluster) -> None:
    alone.start()
    with txmq.connect(alone.address) as client:
        client.topics.create("orders", partitions=1)
        producer = client.producer()
        checkpoints = alone.brokers[0].data_dir / "checkpoint"

        def is_released() -> bool:
            producer.send("orders", b"x" * 1000)
            return min((int(path.stem) for path in checkpoints.glob("*.checkpoint")), default=0) > 1 << 20

        eventually(is_released, "two checkpoints are past the journal's first file")
        replica = _replica(alone)
        replica.launch()
        assert replica.wait(WITHIN_S) == 1
        assert "begin this replica anew" in replica.logs()


def test_replica_of_a_home_with_users_over_tls(tmp_path: Path) -> None:
    files = CertificateAuthority(tmp_path / "ca").issue("everybody")
    with Ensemble(tmp_path / "zookeeper", tls=files) as ensemble:
        cluster = Cluster(
            tmp_path, ensemble, chroot=f"/{next(NUMBERS)}", size=1, tls=files, credentials="brokers:secret"
        )
        with cluster:
            with txmq.connect(cluster.address) as client:
                client.topics.create("orders", partitions=1)
                Users(client.control, client.timeout).add("ops", "pencil")
            address = cluster.address.replace("://", "://ops@")
            with txmq.connect(address, password="pencil") as client, _replica(cluster) as replica:
                client.producer().send("orders", b"one")
                eventually(lambda: _is_told(replica, "ops", "pencil"), "the replica has it")
                with _reader(replica) as stranger, Wire(replica) as ops:
                    assert stranger.ask(b"offset orders 0 latest 2\r\n")[0] == 401
                    assert ops.log_in("ops", "pencil") == 200
                    assert ops.ask(b"hello 1 test replica 1\r\n")[0] == 200
                    assert ops.ask(b"offset orders 0 latest 2\r\n")[0] == 200
                    users = Users(client.control, client.timeout)
                    users.add("ada", "secret")
                    users.acl("grant", "ada", {"cluster": None})
                    users.remove("ops")
                    eventually(lambda: ops.ask(b"offset orders 0 latest 3\r\n")[0] == 401, "ops is removed here, too")
                assert replica.stop() == 0
