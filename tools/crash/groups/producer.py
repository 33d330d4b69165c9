"""The producer of the group campaign: ``python -m tools.crash.groups.producer DIRECTORY ADDRESS NAME``.

Round after round it sends one message to each partition. A round is one operation of the history: acknowledged where
all of it is; else what became of the rest is not said, and the process goes on under another name.
"""

from __future__ import annotations

import sys
import threading
from itertools import count
from pathlib import Path

import txmq
from tools.crash.directory import HistoryFile
from tools.crash.groups.directory import PARTITIONS, TOPIC, GroupCampaignDirectory
from tools.crash.processes import connect
from tools.crash.worker import Teller
from txmq.runtime.threads import until_terminated

TIMEOUT_S = 20.0
REST_S = 0.05


class Rounds(Teller):
    """See the module's docstring."""

    def run(self) -> None:
        """Until ``stop``."""
        with self.client.producer(timeout=TIMEOUT_S) as producer:
            for _ in count():
                if self.stop.wait(REST_S):
                    return
                self._round(producer)

    def _round(self, producer: txmq.Producer) -> None:
        operation = self.next("R")
        planned = [["send", TOPIC, f"p{partition}", f"{operation}.{partition}"] for partition in range(PARTITIONS)]
        self.history.write("send", "invoke", operation, planned)
        futures = [
            producer.send_async(TOPIC, value.encode(), key.encode(), partition=partition)
            for partition, (_, _, key, value) in enumerate(planned)
        ]
        try:
            results = [future.result() for future in futures]
        except txmq.TxmqError as error:
            self.history.write("send", "info", operation, [], err=repr(error))
            self.rename()
            self.rest_after(operation, error)
        else:
            places = zip(planned, results, strict=True)
            sends = [[*send, result.partition, result.offset] for send, result in places]
            self.history.write("send", "ok", operation, sends)


def main(directory: str, address: str, name: str) -> None:
    """Send until SIGTERM."""
    history, stop = HistoryFile(GroupCampaignDirectory(Path(directory)).histories, name), threading.Event()
    with until_terminated(stop.set), connect(address, name) as client:
        Rounds(client, history, stop).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
