"""The producer of the ordered campaign: ``python -m tools.crash.ordered.worker DIRECTORY ADDRESS NAME``.

Two threads send under four keys each, in turn, through one ordered producer, until SIGTERM; each thread is a process of
the history. What was told is ``ok``, acknowledged (with its place) or spooled (without); ``fail`` where the library
says that nothing was stored, as where the spool is full. It begins and spools whether or not the broker is there.
"""

from __future__ import annotations

import itertools
import sys
import threading
from pathlib import Path

import txmq
from tools.crash.directory import HistoryFile
from tools.crash.ordered.directory import KEYS, PARTITIONS, THREADS, TOPIC, OrderedCampaignDirectory, options
from tools.crash.processes import run_in_threads
from txmq.runtime.threads import until_terminated

REST_S = 0.006
FULL_REST_S = 0.05


class Sender:
    """One thread."""

    def __init__(
        self, producer: txmq.OrderedMessageProducer, history: HistoryFile, keys: list[str], stop: threading.Event
    ) -> None:
        self._producer, self._history, self._keys, self._stop = producer, history, keys, stop
        self._number = 0

    def run(self) -> None:
        """Until ``stop``."""
        for key in itertools.cycle(self._keys):
            if self._stop.wait(REST_S):
                return
            self._send(key)

    def _send(self, key: str) -> None:
        self._number += 1
        operation = f"{self._history.process}-{self._number}O"
        planned = ["send", TOPIC, key, f"{operation}.0"]
        self._history.write("send", "invoke", operation, [planned])
        try:
            result = self._producer.send(TOPIC, planned[3].encode(), key.encode())
        except txmq.errors.SpoolFullError as error:
            self._history.write("send", "fail", operation, [], err=repr(error))
            self._stop.wait(FULL_REST_S)
        else:
            status = result.status.value
            self._history.write("send", "ok", operation, [[*planned, result.partition, result.offset]], status=status)


def main(directory: str, address: str, name: str) -> None:
    """Send until SIGTERM."""
    world, stop = OrderedCampaignDirectory(Path(directory)), threading.Event()
    keys = [KEYS[number::THREADS] for number in range(THREADS)]
    with (
        until_terminated(stop.set),
        txmq.connect(address, name=name, lazy=True) as client,
        client.ordered_producer(txmq.KeyHashSelector(), str(world.spool), options=options(PARTITIONS)) as producer,
    ):
        senders = [
            Sender(producer, HistoryFile(world.histories, f"{name}.t{number}"), list(keys[number]), stop)
            for number in range(THREADS)
        ]
        run_in_threads(sender.run for sender in senders)


if __name__ == "__main__":
    main(*sys.argv[1:])
