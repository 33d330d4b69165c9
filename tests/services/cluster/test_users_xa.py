"""XA over three homes with users: a ``txmq resolver`` of its own user finishes what a killed service has left."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import txmq
from tests.services.xa.xa_owner import NAMES, resources
from txmq.testing.eventually import eventually
from txmq.testing.processes import fork_server
from txmq.testing.processes.cluster import Cluster
from txmq.testing.processes.mariadb import MariaDB
from txmq.testing.processes.zookeeper import Ensemble

from .conftest import NUMBERS
from .guarded import OPS, PENCIL, guarded, operator, until_all_know

WAIT_S = 60.0
PARTITIONS = [0, 1, 2]  # one at each home


@pytest.fixture
def cluster(tmp_path: Path, ensemble: Ensemble) -> Iterator[Cluster]:
    with guarded(tmp_path, ensemble, f"/xa-{next(NUMBERS)}") as made:
        yield made


class Banks:
    """Two databases of one server, and whoever works on them, by ZooKeeper's address and a password in a file."""

    def __init__(self, cluster: Cluster, mariadb: MariaDB, folder: Path) -> None:
        self._cluster, self._mariadb, self._folder = cluster, mariadb, folder
        for name in NAMES:
            mariadb.execute(f"CREATE OR REPLACE DATABASE `{name}`")
            mariadb.execute(f"CREATE TABLE `{name}`.transfers (value VARCHAR(20)) ENGINE=InnoDB")
        self._places = [{**mariadb.connect_arguments(), "db": name} for name in NAMES]
        made = resources(self._places)
        with txmq.connect(cluster.registry_of(OPS), password=PENCIL) as client:
            for bank in made:
                bank.install(client)
        self.uuids = [str(bank.uuid) for bank in made]

    def _address(self, user: str, password: str) -> str:
        secret = self._folder / f"{user}.password"
        secret.touch(mode=0o600)
        secret.write_text(password)
        return f"{self._cluster.registry_of(user)}&password_file={secret}"

    def die_at(self, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """A transaction of the user ``shop`` whose process is killed there."""
        given: dict[str, Any] = {
            "address": self._address("shop", "orders"), "databases": self._places, "value": "x", "topic": "orders",
            "timeout": 20.0, "partitions": PARTITIONS,
        }  # fmt: skip
        monkeypatch.setenv("TXMQ_CRASH", f"{point}:1")
        died = fork_server.run([sys.executable, "-m", "tests.services.xa.xa_owner", json.dumps(given)], timeout=WAIT_S)
        monkeypatch.delenv("TXMQ_CRASH")
        assert died.returncode == -9, died.stderr
        assert len(self.prepared()) == len(NAMES)

    def settle(self) -> subprocess.CompletedProcess[bytes]:
        """``txmq resolver --once`` of the user ``settler``."""
        config = self._folder / "resolver.toml"
        tables = [f"bootstrap = {json.dumps(self._address('settler', 'settles'))}\n"]
        for name, place in zip(NAMES, self._places, strict=True):
            connect = ", ".join(f"{key} = {json.dumps(value)}" for key, value in place.items())
            tables.append(f'name = "{name}"\nkind = "mysql-xa"\ndriver = "MySQLdb"\nconnect = {{ {connect} }}\n')
        config.write_text("[[resource]]\n".join(tables))
        command = [sys.executable, "-m", "txmq.cli.main", "resolver", "--config", str(config), "--once"]
        return fork_server.run(command, stdin=b"", timeout=WAIT_S)

    def prepared(self) -> list[Any]:
        """Branches that lock rows."""
        return list(self._mariadb.execute("XA RECOVER"))

    def rows(self) -> list[int]:
        """In each database."""
        return [len(self._mariadb.execute(f"SELECT value FROM `{name}`.transfers")) for name in NAMES]


@pytest.mark.parametrize("point", ["client.xa.all_prepared", "client.xa.decided"])
def test_resolver_of_another_user_finishes_xa_over_all_homes(
    cluster: Cluster, mariadb: MariaDB, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    banks, runs = Banks(cluster, mariadb, tmp_path), []
    with operator(cluster) as users:
        users.add("settler", "settles")
        for uuid in banks.uuids:
            users.acl("grant", "shop", {"may": "install,settle", "resource": uuid})
        until_all_know(cluster)
        banks.die_at(point, monkeypatch)
        banks.settle()
        assert len(banks.prepared()) == len(NAMES), "without a grant it settles nothing"
        for uuid in banks.uuids:
            users.acl("grant", "settler", {"may": "settle", "resource": uuid})

    with txmq.connect(cluster.registry_of(OPS), password=PENCIL) as client:

        def settles() -> bool:
            runs.append(banks.settle())
            return not banks.prepared() and not list(client.transactions.list())

        eventually(settles, lambda: runs[-1].stderr.decode(), WAIT_S)
        is_committed = point == "client.xa.decided"
        assert banks.rows() == [is_committed] * len(NAMES)
        assert [message.value for message in client.browse("orders")] == [b"x"] * len(PARTITIONS) * is_committed
        assert banks.settle().returncode == 0
