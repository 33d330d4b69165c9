"""A relay as a process of its own, for tests that kill it: ``python -m tests.services.outbox.relaying JSON``."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

import txmq
from tests.services.outbox.databases import connector_of
from txmq.client.relay.relay import Relay
from txmq.outbox.outbox import Outbox
from txmq.testing.processes.fork_server import Process, Streams, start

ROOT = Path(__file__).resolve().parents[3]


def started(broker: str, database: dict[str, object], crash: str = "") -> Process:
    """The process; it dies at ``crash``, a crash point and the visit, as ``TXMQ_CRASH`` has it."""
    environment = os.environ | ({"TXMQ_CRASH": crash} if crash else {})
    command = [sys.executable, "-m", "tests.services.outbox.relaying", json.dumps({"broker": broker, **database})]
    with (
        Path(os.devnull).open("rb") as nothing,
        open(1, "wb", closefd=False) as out,
        open(2, "wb", closefd=False) as errors,
    ):
        return start(command, Streams(nothing, out, errors), environment, str(ROOT))


def main(arguments: str) -> None:
    """Until SIGTERM."""
    fields = json.loads(arguments)
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    with txmq.connect(fields.pop("broker")) as client, Relay(client, Outbox("orders-db"), connector_of(fields)):
        ended.wait()


if __name__ == "__main__":
    main(sys.argv[1])
