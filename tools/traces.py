"""The hands that one call passes on the client's side: calls of functions in ``txmq``, and their files.

Each call is made warm, the last of several alike, with the broker in another process. Counted are the calling thread
and the client's own threads, from the call until it returns. A *change* is a call or a return into another file.
"""

from __future__ import annotations

import json
import sqlite3
import sys
import tempfile
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import txmq
from txmq.testing.processes.broker import BrokerProcess

PACKAGE = str(Path(txmq.__file__).parent)
ROUNDS = 30
TOPIC = "traced"


class Trace(NamedTuple):
    """What one call cost.

    Attributes:
        changes: of the file.
    """

    name: str
    calls: int
    files: int
    changes: int


WANTED = {  # calls, files
    "last-resource transaction": (150, 20), "local transaction": (110, 16),
    "send": (60, 14), "consume and ack": (32, 6),
}  # fmt: skip


class Tracer:
    """Counts while it is on; ``start`` before the client's threads begin."""

    def __init__(self) -> None:
        self._is_on = False
        self._lists: dict[int, list[str]] = {}  # of each thread: the files it went through
        self._calls = 0

    def start(self) -> None:
        """Threads that begin from now on are counted, and this one."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    @staticmethod
    def stop() -> None:
        """Count no more."""
        sys.setprofile(None)
        threading.setprofile(None)

    def trace(self, name: str, call: Callable[[], Any]) -> Trace:
        """Make the call many times; what is usual."""
        found = sorted((self._one(call) for _ in range(ROUNDS)), key=lambda one: one[0])
        return Trace(name, *found[len(found) // 2])

    def _one(self, call: Callable[[], Any]) -> tuple[int, int, int]:
        self._lists, self._calls, self._is_on = {}, 0, True
        try:
            call()
        finally:
            self._is_on = False
        lists = list(self._lists.values())
        files = {file for one in lists for file in one}
        changes = sum(first != second for one in lists for first, second in pairwise(one))
        return self._calls, len(files), changes

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if not self._is_on or event not in ("call", "return"):
            return
        file = frame.f_code.co_filename if event == "call" else _caller(frame)
        if not file.startswith(PACKAGE):
            return
        self._lists.setdefault(threading.get_ident(), []).append(file)
        self._calls += event == "call"


def _caller(frame: FrameType) -> str:
    return "" if frame.f_back is None else frame.f_back.f_code.co_filename


def traces() -> list[Trace]:
    """Each call's trace, of a broker, a client and SQLite of their own."""
    with tempfile.TemporaryDirectory() as folder, BrokerProcess(Path(folder, "data")) as broker:
        tracer = Tracer()
        tracer.start()
        try:
            return _traced(tracer, broker.address, Path(folder, "orders.db"))
        finally:
            tracer.stop()


def _traced(tracer: Tracer, address: str, file: Path) -> list[Trace]:
    database = txmq.LastResource("orders", connect=lambda: sqlite3.connect(file))
    with txmq.connect(address) as client, client.producer() as producer:
        client.topics.ensure(TOPIC, partitions=1)
        database.install(client)
        with sqlite3.connect(file) as connection:
            connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, customer TEXT)")

        def last_resource() -> None:
            with producer.transaction(database) as tx:
                tx.connection(database).execute("INSERT INTO orders (customer) VALUES ('ada')")
                tx.send(TOPIC, b"created", key=b"ada")

        def local() -> None:
            with producer.transaction() as tx:
                tx.send(TOPIC, b"created", key=b"ada")

        def send() -> None:
            producer.send(TOPIC, b"created", key=b"ada")

        found = [
            tracer.trace("last-resource transaction", last_resource), tracer.trace("local transaction", local),
            tracer.trace("send", send),
        ]  # fmt: skip
        with client.consumer("traced", [TOPIC]) as consumer:
            messages = iter(consumer)
            next(messages).ack()

            def consume() -> None:
                next(messages).ack()

            found.append(tracer.trace("consume and ack", consume))
    return found


def report(found: list[Trace]) -> str:
    """A table of what was found and what is wanted."""
    lines = [f"{'a warm call':30}{'calls':>7}{'wanted':>8}{'files':>7}{'wanted':>8}{'changes of file':>17}"]
    for one in found:
        calls, files = WANTED[one.name]
        lines.append(f"{one.name:30}{one.calls:7}{calls:8}{one.files:7}{files:8}{one.changes:17}")
    return "\n".join(lines)


if __name__ == "__main__":
    found = traces()
    print(json.dumps([one._asdict() for one in found], indent=2) if "--json" in sys.argv else report(found))
