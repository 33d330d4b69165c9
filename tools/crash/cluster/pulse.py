"""Sends to every partition without rest: ``python -m tools.crash.cluster.pulse DIRECTORY ADDRESS NAME``.

One producer, and a thread for each partition of its topic, so that it shows in the history whether the partitions of
one home wait for another home. Each thread is a process of the history. One more thread shows how long the machine
itself lets a thread wait.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from itertools import pairwise
from pathlib import Path

import txmq
from tools.crash.cluster.directory import PARTITIONS, PULSE, ClusterCampaignDirectory
from tools.crash.directory import HistoryFile
from tools.crash.processes import connect, run_in_threads
from txmq.runtime.threads import until_terminated

TIMEOUT_S = 60.0
REST_S = 0.02
KEYS_PER_PARTITION = 4  # what the stream makes of one partition goes to partitions of several homes
_TAIL_BYTES = 4096


def file_of(world: ClusterCampaignDirectory, run_name: str, partition: int) -> Path:
    """The history of one thread."""
    return world.histories / f"{run_name}.p{partition}.jsonl"


def machine_file_of(world: ClusterCampaignDirectory, run_name: str) -> Path:
    """The lines of the thread that no broker makes wait."""
    return world.directory / f"{run_name}.machine.jsonl"


def acknowledged_since(file: Path, since: float) -> bool:
    """Whether the last operation that was acknowledged, if it stands near the file's end, is of later."""
    if not file.exists():
        return False
    with file.open("rb") as lines:
        lines.seek(max(0, file.stat().st_size - _TAIL_BYTES))
        times = _acknowledged(lines.read().decode())
    return bool(times) and times[-1] > since


def longest_gap(file: Path, since: float) -> float:
    """The longest time between two acknowledgements, of those that ended later."""
    times = _acknowledged(file.read_text("utf-8"))
    return max((later - earlier for earlier, later in pairwise(times) if later > since), default=0.0)


def _acknowledged(text: str) -> list[float]:
    """When; lines that are not whole are left out."""
    whole = (line for line in text.splitlines() if line.startswith('{"t":') and line.endswith("}"))
    return [json.loads(line)["t"] / 1e9 for line in whole if '"ty":"ok"' in line]


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
        key = f"u{self._partition}.{self._number % KEYS_PER_PARTITION}"
        planned = ["send", PULSE, key, f"{operation}.0"]
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


class Machine:
    """A thread that forces a file as often as the others send: the pauses that are the machine's own."""

    def __init__(self, lines: HistoryFile, file: Path, stop: threading.Event) -> None:
        self._lines, self._file, self._stop = lines, file, stop

    def run(self) -> None:
        """Until ``stop``."""
        with self._file.open("wb") as forced:
            while not self._stop.wait(REST_S):
                os.pwrite(forced.fileno(), b"beat", 0)
                os.fdatasync(forced.fileno())
                self._lines.write("machine", "ok", "machine", [])


def main(directory: str, address: str, name: str) -> None:
    """Send until SIGTERM."""
    world, stop = ClusterCampaignDirectory(Path(directory)), threading.Event()
    with until_terminated(stop.set), connect(address, name) as client, client.producer(timeout=TIMEOUT_S) as producer:
        pulses = [
            Pulse(producer, HistoryFile(world.histories, f"{name}.p{partition}"), partition, stop)
            for partition in range(PARTITIONS[PULSE])
        ]
        machine = Machine(HistoryFile(world.directory, f"{name}.machine"), world.directory / f"{name}.forced", stop)
        run_in_threads([machine.run, *(pulse.run for pulse in pulses)])


if __name__ == "__main__":
    main(*sys.argv[1:])
