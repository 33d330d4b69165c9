"""Three brokers, three ZooKeeper servers: each is killed or paused before your eyes, while messages go in and out.

    python examples/cluster/demo.py            # or: make demo-cluster

Every message that was acknowledged is in the log once at the end, and the partitions of brokers that live went on. The
program prints how long no message at all was acknowledged, and how long each broker took to serve again.

Needs Java 17 and PySpark, whose jars have ZooKeeper; ``make demo-cluster`` installs PySpark.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import Future
from pathlib import Path

import txmq
from txmq.testing.processes.broker import BrokerProcess
from txmq.testing.processes.cluster import Cluster
from txmq.testing.processes.zookeeper import SESSION_TIMEOUT_MS_MIN, Ensemble

TOPIC, GROUP = "orders", "billing"
SENT_PER_SECOND = 200
WAIT_S = 60.0
DESCRIPTION = __doc__.splitlines()[0]


class Sender:
    """Sends numbers without a key: they go to partitions whose broker is there."""

    def __init__(self, address: str) -> None:
        self.client = txmq.connect(address)
        self.acknowledged: list[bytes] = []
        self.failed: list[BaseException] = []
        self._pauses_s = [0.0]
        self._acknowledged_at = time.monotonic()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        producer = self.client.producer()
        number = 0
        while not self._ends.wait(1 / SENT_PER_SECOND):
            value = b"%d" % number
            producer.send_async(TOPIC, value, timeout=WAIT_S).add_done_callback(
                lambda done, value=value: self._done(value, done)  # type: ignore[misc]
            )
            number += 1
        producer.close(WAIT_S)

    def _done(self, value: bytes, done: Future[txmq.SendResult]) -> None:
        error = done.exception()
        if error is not None:
            self.failed.append(error)
            return
        self._look(time.monotonic())
        self._acknowledged_at = time.monotonic()
        self.acknowledged.append(value)

    def _look(self, now: float) -> None:
        self._pauses_s[-1] = max(self._pauses_s[-1], now - self._acknowledged_at)

    def longest_pause_s(self) -> float:
        """The longest time without an acknowledgement since it was last asked for."""
        self._look(time.monotonic())
        self._pauses_s.append(0.0)
        return self._pauses_s[-2]

    def stop(self) -> None:
        """Send no more, and wait for the last acknowledgements."""
        self._ends.set()
        self._thread.join()
        self.client.close()


class Reader:
    """A member of a consumer group over all partitions."""

    def __init__(self, address: str) -> None:
        self.client = txmq.connect(address)
        self.seen: set[bytes | None] = set()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with self.client.consumer(GROUP, [TOPIC], start="earliest") as consumer:
            while not self._ends.is_set():
                for message in consumer.poll(timeout=0.1):
                    self.seen.add(message.value)
                    message.ack()

    def stop(self, wanted: set[bytes]) -> None:
        """Read until everything that is wanted was seen, for a while."""
        deadline = time.monotonic() + WAIT_S
        while not wanted <= self.seen and time.monotonic() < deadline:
            time.sleep(0.05)
        self._ends.set()
        self._thread.join()
        self.client.close()


class Play:
    """What happens to the servers, each in turn."""

    def __init__(self, cluster: Cluster, ensemble: Ensemble, sender: Sender, seconds: float) -> None:
        self.cluster, self.ensemble, self.sender, self.seconds = cluster, ensemble, sender, seconds
        self.pauses_s: list[float] = []

    def run(self) -> None:
        """All of it."""
        self._watch("everything runs")
        for broker in self.cluster.brokers:
            self._kill(broker)
        self._pause(self.cluster.brokers[-1])
        leader = self.ensemble.leader
        leader.kill()
        self._watch("the leading ZooKeeper server is killed")
        leader.start()
        self.ensemble.kill()
        self._watch("all ZooKeeper servers are killed: the brokers go on with what they know")
        self.ensemble.start()
        self._watch("ZooKeeper is back")
        print(f"longest pause of all: {max(self.pauses_s):.2f} s", flush=True)

    def _kill(self, broker: BrokerProcess) -> None:
        broker.kill()
        self._watch(f"{broker.data_dir.name} is killed (kill -9)")
        started = time.monotonic()
        broker.start()
        self._watch(f"{broker.data_dir.name} serves again, {time.monotonic() - started:.2f} s after its start")

    def _pause(self, broker: BrokerProcess) -> None:
        broker.pause()
        self._watch(f"{broker.data_dir.name} is paused for longer than its ZooKeeper session")
        broker.resume()
        self._watch(f"{broker.data_dir.name} goes on")

    def _watch(self, what: str) -> None:
        """Let time pass, and say what was acknowledged meanwhile."""
        before = len(self.sender.acknowledged)
        time.sleep(self.seconds)
        count, pause_s = len(self.sender.acknowledged) - before, self.sender.longest_pause_s()
        self.pauses_s.append(pause_s)
        print(f"  {what}: {count} messages acknowledged, longest pause {pause_s:.2f} s", flush=True)


def read_all(address: str) -> Counter[bytes | None]:
    """How often each value is stored; a home that answers late on a busy machine is asked again."""
    deadline = time.monotonic() + WAIT_S
    with txmq.connect(address) as client:
        while True:
            try:
                return Counter(message.value for message in client.browse(TOPIC))
            except txmq.errors.PartialResultError:
                if time.monotonic() >= deadline:
                    raise


def compare(address: str, sender: Sender, reader: Reader) -> bool:
    """Hold what was acknowledged against the log, and say what differs."""
    stored = read_all(address)
    lost = [value for value in sender.acknowledged if not stored[value]]
    twice = [value for value in sender.acknowledged if stored[value] > 1]
    unread = set(sender.acknowledged) - reader.seen
    print(f"{len(sender.acknowledged)} messages acknowledged: {len(lost)} lost, {len(twice)} stored twice")
    print(f"{len(sender.failed)} not acknowledged; {len(unread)} not read by the group")
    for error in sender.failed[:3]:
        print(f"  not acknowledged: {error}")
    return not (lost or twice or unread)


def main() -> int:
    """Play it in a temporary directory; 0 if nothing is lost or stored twice."""
    parser = argparse.ArgumentParser(description=DESCRIPTION)
    parser.add_argument("--seconds", type=float, default=3.0, help="how long each state is watched")
    parser.add_argument("--servers", type=int, default=3, choices=(1, 3), help="ZooKeeper servers")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        print("starting ZooKeeper and three brokers ...", flush=True)
        settings = {"registry_session_timeout_ms": max(SESSION_TIMEOUT_MS_MIN, int(chosen.seconds * 500))}
        with (
            Ensemble(Path(directory) / "zookeeper", chosen.servers) as ensemble,
            Cluster(Path(directory), ensemble, chroot="/demo", settings=settings) as cluster,
        ):
            with txmq.connect(cluster.registry) as client:
                client.topics.create(TOPIC, partitions=6)
            print(f"topic {TOPIC} has 2 partitions at each broker; clients connect to {cluster.registry}", flush=True)
            sender, reader = Sender(cluster.registry), Reader(cluster.registry)
            try:
                Play(cluster, ensemble, sender, chosen.seconds).run()
            finally:
                sender.stop()
                reader.stop(set(sender.acknowledged))
            return 0 if compare(cluster.address, sender, reader) else 1


if __name__ == "__main__":
    logging.getLogger("txmq").setLevel(logging.CRITICAL)  # it warns of every broker that is away, as it should
    sys.exit(main())
