"""Programs that find three real brokers with users by ZooKeeper, and log in: ``txmq.aio``, and ``txmq resolver``."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import txmq
import txmq.aio
from tests.crash_points import crash_at
from txmq.errors import ForbiddenError, UnauthenticatedError
from txmq.runtime.crashpoints import SimulatedCrash
from txmq.testing.eventually import eventually
from txmq.testing.processes import fork_server
from txmq.testing.processes.cluster import Cluster
from txmq.testing.processes.zookeeper import Ensemble
from txmq.xa import LastResource

from .conftest import NUMBERS
from .guarded import OPS, PENCIL, guarded, operator, until_all_know

TIMEOUT_S = 60.0
PARTITIONS = range(3)  # one at each home


@pytest.fixture
def cluster(tmp_path: Path, ensemble: Ensemble) -> Iterator[Cluster]:
    with guarded(tmp_path, ensemble, f"/clients-{next(NUMBERS)}") as made:
        yield made


def test_loop_client_of_a_user_works_over_all_homes(cluster: Cluster) -> None:
    with operator(cluster) as users, txmq.connect(cluster.registry_of(OPS), password=PENCIL) as client:
        client.topics.create("secrets", partitions=3)
        users.add("guest", "guest")
    until_all_know(cluster)

    async def main() -> None:
        connect = txmq.aio.connect
        async with (
            await connect(cluster.registry_of("shop"), password="orders") as client, client.producer() as producer,
        ):  # fmt: skip
            async with producer.transaction() as tx:
                for partition in PARTITIONS:
                    await tx.send("orders", b"%d" % partition, partition=partition)
            await tx.wait_visible(60.0)
            assert {message.value async for message in client.browse("orders")} == {b"0", b"1", b"2"}
            for partition in PARTITIONS:
                with pytest.raises(ForbiddenError, match="shop may do nothing with topic secrets"):
                    await producer.send("secrets", b"x", partition=partition)
        async with await connect(cluster.registry_of("guest"), password="guest") as client:
            with pytest.raises(ForbiddenError, match="guest may do nothing with topic orders"):
                _ = [message async for message in client.browse("orders")]
        with pytest.raises(UnauthenticatedError):
            await connect(cluster.registry_of("shop"), password="wrong")

    asyncio.run(main())


class Shop:
    """A service of the user ``shop`` with an order database, which dies inside a transaction over three homes."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster, self._folder, self.path = cluster, folder, folder / "shop.db"
        with closing(sqlite3.connect(self.path)) as database:
            database.execute("CREATE TABLE sold (value BLOB)")
        with txmq.connect(cluster.registry_of(OPS), password=PENCIL) as client:
            resource = self._resource([])
            resource.install(client)
        self.uuid = str(resource.uuid)
        resource.close()

    def _resource(self, opened: list[sqlite3.Connection]) -> LastResource:
        def connect() -> sqlite3.Connection:
            opened.append(sqlite3.connect(self.path, timeout=30.0, check_same_thread=False))
            return opened[-1]

        return LastResource("shop-db", connect=connect)

    def die_at(self, point: str) -> str:
        """Leave a transaction; its id."""
        opened: list[sqlite3.Connection] = []
        client = txmq.connect(self._cluster.registry_of("shop"), password="orders")
        resource = self._resource(opened)
        block = client.producer().transaction(resource)
        with crash_at(point), pytest.raises(SimulatedCrash):
            self._sell(block, resource)
        for connection in opened:
            connection.close()
        client.close()
        return block.txid

    @staticmethod
    def _sell(block: txmq.Transaction, resource: LastResource) -> None:
        with block as tx:
            tx.connection(resource).execute("INSERT INTO sold VALUES (x'31')")
            for partition in PARTITIONS:
                tx.send("orders", b"%d" % partition, partition=partition)

    def sold(self) -> int:
        """How many rows are committed."""
        with closing(sqlite3.connect(self.path)) as database:
            return len(database.execute("SELECT value FROM sold").fetchall())


class Settler:
    """``txmq resolver --once`` of a user of its own, for the databases of a shop; the broker is named in its file."""

    def __init__(self, cluster: Cluster, shop: Shop, folder: Path) -> None:
        secret, self._config = folder / "settler.password", folder / "resolver.toml"
        secret.write_text("settles")
        secret.chmod(0o600)
        self._config.write_text(
            f'bootstrap = "{cluster.registry_of("settler")}&password_file={secret}"\n[[resource]]\nname = "shop-db"\n'
            f'driver = "sqlite3"\nconnect = {{ database = "{shop.path}" }}\n'
        )

    def run(self) -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, "-m", "txmq.cli.main", "resolver", "--config", str(self._config), "--once"]
        return fork_server.run(command, stdin=b"", timeout=TIMEOUT_S)


@pytest.mark.parametrize("point", ["client.tx.prepared", "client.tx.db_committed"])
def test_resolver_of_another_user_settles_over_all_homes(cluster: Cluster, tmp_path: Path, point: str) -> None:
    shop = Shop(cluster, tmp_path)
    with operator(cluster) as users:
        users.acl("grant", "shop", {"may": "install,settle", "resource": shop.uuid})
        users.add("settler", "settles")
        until_all_know(cluster)
        settler = Settler(cluster, shop, tmp_path)
        txid = shop.die_at(point)
        runs = [settler.run()]
        assert b"0 settled, 0 in doubt" in runs[0].stderr, "without a grant it sees nothing"
        users.acl("grant", "settler", {"may": "settle", "resource": shop.uuid})

    with txmq.connect(cluster.registry_of(OPS), password=PENCIL) as client:
        assert len(list(client.transactions.list())) == len(PARTITIONS), "its branch at each home is in doubt"

        def settles() -> bool:
            runs.append(settler.run())
            return runs[-1].returncode == 0 and not list(client.transactions.list())

        eventually(settles, lambda: runs[-1].stderr.decode(), TIMEOUT_S)
        assert any(txid in run.stderr.decode() for run in runs if b"transaction resolved" in run.stderr)
        is_committed = point == "client.tx.db_committed"
        assert client.outcome(txid) is (txmq.Outcome.COMMITTED if is_committed else txmq.Outcome.ROLLED_BACK)
        assert shop.sold() == is_committed
        assert sorted(message.value or b"" for message in client.browse("orders")) == [b"0", b"1", b"2"] * is_committed
