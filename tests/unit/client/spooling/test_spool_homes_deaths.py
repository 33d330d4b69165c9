"""The process of an ordered producer dies between any two steps, with several homes: nothing twice, nothing lost."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.unit.client.homes import Cluster
from txmq.client.partitioner import RoundRobinSelector
from txmq.client.spooling import direct_or_spooled, direct_sender, spool
from txmq.client.spooling.ordered_producer import OrderedMessageProducer, OrderedOptions
from txmq.errors import StorageError, TxmqError
from txmq.model import SendResult
from txmq.runtime.threads import Future, Lock

POINTS = 18  # the first life passes more
MESSAGES = 24


def _opened(cluster: Cluster, path: Path) -> OrderedMessageProducer:
    client: Any = cluster.client
    return OrderedMessageProducer(client, RoundRobinSelector(), str(path), OrderedOptions(visibility_wait_s=0.0))


class Life:
    """A process that dies at its n-th crash point: nothing of it reaches a home or the spool's file any more."""

    def __init__(self, cluster: Cluster, path: Path, dies_at: int) -> None:
        self._cluster, self._left = cluster, dies_at
        self._lock = Lock()
        self.producer = _opened(cluster, path)
        self.is_dead = False

    def send_all(self) -> dict[bytes, Future[SendResult]]:
        """One home loses an answer, and one is away for a while."""
        cluster, futures = self._cluster, dict[bytes, Future[SendResult]]()
        cluster.homes[0].lose_answer["put"] = 1
        for number in range(MESSAGES):
            if number == MESSAGES // 3:
                cluster.homes[1].go_down()
            if number == MESSAGES // 2 and not self.is_dead:
                cluster.back(1)
            with suppress(TxmqError):
                futures[b"%d" % number] = self.producer.send_async("t", b"%d" % number)
        return futures

    def crash_point(self, name: str) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self.is_dead = True
                self.producer._spool._failure = "the process is dead"
                for home in self._cluster.homes:
                    home.go_down()
        if self.is_dead:
            raise StorageError(f"dead at {name}")


@pytest.mark.parametrize("dies_at", range(1, POINTS + 1))
def test_nothing_is_lost_or_twice_whenever_it_dies(
    cluster: Cluster, tmp_path: Path, dies_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(cluster, tmp_path, dies_at)
    with monkeypatch.context() as patched:
        for module in (direct_sender, direct_or_spooled, spool):
            patched.setattr(module, "crash_point", life.crash_point)
        with ThreadPoolExecutor(1) as threads:
            sent = threads.submit(life.send_all)
            cluster.pass_time_until(lambda: sent.done() and life.is_dead)
        life.producer.close()
    futures = sent.result()
    _check(cluster, tmp_path, {value for value, future in futures.items() if future.exception(60) is None})


def _check(cluster: Cluster, path: Path, acknowledged: set[bytes]) -> None:
    for number in range(3):
        cluster.back(number)
    client: Any = cluster.client
    with OrderedMessageProducer(
        client, RoundRobinSelector(), str(path), OrderedOptions(visibility_wait_s=0.0)
    ) as next_life:
        cluster.pass_time_until(lambda: not next_life.spooled)
        assert next_life.parked() == []
    counts = Counter(cluster.all_values())
    assert [value for value in acknowledged if counts[value] != 1] == []
    assert [value for value, count in counts.items() if count > 1] == []
    for partition in range(6):
        values = [int(value) for value in cluster.values(partition) if value is not None]
        assert values == sorted(values)
