"""Sends to every partition without rest: ``python -m tools.crash.cluster.pulse DIRECTORY ADDRESS NAME``.

One producer, and a thread for each partition of its topic, so that it shows in the history whether the partitions of
one home wait for another home. Each thread is a process of the history.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import txmq
from tools.crash.cluster.directory import PARTITIONS, PULSE, ClusterCampaignDirectory
from tools.crash.directory import HistoryFile
from tools.crash.processes import connect, run_in_threads
from txmq.runtime.threads import until_terminated

TIMEOUT_S = 60.0
REST_S = 0.02
_TAIL_BYTES = 4096


def file_of(world: ClusterCampaignDirectory, run_name: str, partition: int) -> Path:
    """The history of one thread."""
    return world.histories / f"{run_name}.p{partition}.jsonl"


def newest_ok(file: Path) -> dict[str, Any] | None:
    """The last message that was acknowledged, if it stands near the file's end."""
    if not file.exists():
        return None
    with file.open("rb") as lines:
        lines.seek(max(0, file.stat().st_size - _TAIL_BYTES))
        tail = lines.read().decode().splitlines()[1:]
    found = [json.loads(line) for line in tail if '"ty":"ok"' in line]
    return found[-1] if found else None


class Pulse:
    """One thread."""

    def __init__(self, producer: txmq.Producer, history: HistoryFile, partition: int, stop: threading.Event) -> None:
        self._producer, self._history, self._partition, self._stop = producer, history, partition, stop
        self._base, self._names, self._number = history.process, 0, 0

    def run(self) -> None:
        """Until ``stop``."""
        while not self._stop.wait(REST_S):
            self._send()

    def _send(self) -> None:
        self._number += 1
        operation = f"{self._history.process}-{self._number}S"
        planned = ["send", PULSE, f"u{self._partition}", f"{operation}.0"]
        self._history.write("send", "invoke", operation, [planned])
        try:
            result = self._producer.send(
                PULSE, planned[3].encode(), key=planned[2].encode(), partition=self._partition, timeout=TIMEOUT_S
            )
        except txmq.TxmqError as error:  # what became of it is not known: the thread goes on as another process
            self._history.write("send", "info", operation, [], err=repr(error))
            self._names += 1
            self._history.process = f"{self._base}.{self._names}"
        else:
            self._history.write("send", "ok", operation, [[*planned, result.partition, result.offset]])


def main(directory: str, address: str, name: str) -> None:
    """Send until SIGTERM."""
    world, stop = ClusterCampaignDirectory(Path(directory)), threading.Event()
    with until_terminated(stop.set), connect(address, name) as client, client.producer(timeout=TIMEOUT_S) as producer:
        pulses = [
            Pulse(producer, HistoryFile(world.histories, f"{name}.p{partition}"), partition, stop)
            for partition in range(PARTITIONS[PULSE])
        ]
        run_in_threads(pulse.run for pulse in pulses)


if __name__ == "__main__":
    main(*sys.argv[1:])
