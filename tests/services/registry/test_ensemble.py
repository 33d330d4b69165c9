"""Three real servers serve while two of them do."""

from __future__ import annotations

from pathlib import Path

from tests.unit.registry.contract import CLUSTER, candidate
from txmq.registry.port import Standing
from txmq.registry.zookeeper.kazoo_session import KazooSession
from txmq.registry.zookeeper.registry import ZooKeeperRegistry
from txmq.testing.eventually import WITHIN_S, eventually
from txmq.testing.processes.zookeeper import Ensemble


def test_ensemble_whose_leader_is_killed_keeps_session_and_leader(tmp_path: Path) -> None:
    with Ensemble(tmp_path, 3) as ensemble:
        session = KazooSession(ensemble.hosts, session_timeout_ms=20_000, call_timeout_ms=60_000)
        registry = ZooKeeperRegistry(session, "/three")
        registry.join(CLUSTER, Standing.USED)
        registry.announce(registry.lead(candidate()))
        number = session.number
        ensemble.leader.kill()
        eventually(lambda: session.wait_connected(WITHIN_S), "a connection to another server")
        assert registry.homes()[0].address is not None
        assert session.number == number
        ensemble.start()
        assert len({ensemble.leader.address, *(server.address for server in ensemble.servers)}) == 3
        registry.close()
