"""Ship a log file, line by line and in order: through outages of the broker, restarts of this program, and rotation.

Start a broker with ``txmq broker``, then ``python examples/log_shipping.py /var/log/app.log``; Ctrl-C ends it. Kill it,
kill the broker, rotate the file (``app.log`` becomes ``app.log.1``): each line is in the topic ``logs`` once, in order.

While the broker is away, lines wait on local disk (the ordered producer's spool). How far this program got is nowhere
but in the messages: each says which file it came from and where it ends there. So position and message cannot differ.
"""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from os import fstat
from pathlib import Path
from typing import BinaryIO

import txmq

TOPIC, PARTITIONS = "logs", 4
LOOK_EVERY_S = 0.2
WINDOW = 1000


@dataclass(frozen=True)
class Place:
    """A position in a file, which keeps its name here when it is rotated."""

    file: str
    position: int


def read_on(path: Path, place: Place | None) -> Iterator[tuple[bytes, Place]]:
    """The lines after a place that are there now, oldest first; all of them if the place is gone, or None."""
    with ExitStack() as opened:
        files = dict(_rotations(path, opened))  # newest first
        names = list(files)
        if place is not None and place.file in files:
            names = names[: names.index(place.file) + 1]
        for name in reversed(names):
            file = files[name]
            file.seek(place.position if place is not None and place.file == name else 0)
            for line in file:
                if not line.endswith(b"\n") and name == names[0]:
                    break  # still being written; an older file will not be finished
                yield line.rstrip(b"\n"), Place(name, file.tell())


def _rotations(path: Path, opened: ExitStack) -> Iterator[tuple[str, BinaryIO]]:
    """``app.log``, ``app.log.1``, ...: from the newest on, so that one which moves meanwhile comes twice, not never.

    A file without a whole line is left out: until it has one, the older file may still be written to.
    """
    number = 0
    while True:
        try:
            file = opened.enter_context((path.with_name(f"{path.name}.{number}") if number else path).open("rb"))
        except FileNotFoundError:
            if number:
                return
        else:
            first_line = file.readline()
            if first_line.endswith(b"\n"):
                yield f"{fstat(file.fileno()).st_ino}-{zlib.crc32(first_line):08x}", file
        number += 1


def shipped(client: txmq.Client, partition: int, key: bytes) -> Place | None:
    """How far the topic has the file: the newest message with its key, looked for backwards."""
    held = client.offsets(TOPIC, partition)
    end = held.end
    while end > held.start:
        begin = offset = max(held.start, end - WINDOW)
        found = None
        while offset < end:
            for message in client.fetch(TOPIC, partition, offset):
                if message.key == key and message.offset < end:
                    found = Place(message.headers["file"].decode(), int(message.headers["position"]))
                offset = message.offset + 1
        if found is not None:
            return found
        end = begin
    return None


def ship(producer: txmq.OrderedMessageProducer, path: Path, key: bytes, place: Place | None) -> Place | None:
    """Send the lines after a place; the place after the last one that was sent, or stored."""
    for line, behind in read_on(path, place):
        headers = {"file": behind.file.encode(), "position": b"%d" % behind.position}
        try:
            producer.send(TOPIC, line, key, headers=headers)
        except txmq.errors.SpoolFullError:
            break  # the log itself keeps the rest
        place = behind
    return place


def main(log: str, spool: str | None = None, bootstrap: str = "txmq://127.0.0.1:8123") -> None:
    """Ship until Ctrl-C."""
    path = Path(log).absolute()
    key = str(path).encode()  # same key, same partition, same order
    selector = txmq.KeyHashSelector()
    with txmq.connect(bootstrap) as client:
        client.topics.ensure(TOPIC, PARTITIONS)
        with client.ordered_producer(selector, spool or f"{path}.spool") as producer:
            producer.flush()  # what a former life had in hand is in the topic now, so the topic knows how far it got
            place = shipped(client, selector.partition_of(key, client.topics.describe(TOPIC).partitions), key)
            print(f"shipping {path} from {place}", flush=True)
            try:
                while True:
                    place = ship(producer, path, key, place)
                    time.sleep(LOOK_EVERY_S)
            except KeyboardInterrupt:
                print(f"stopped; {producer.spooled} lines wait in the spool", flush=True)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        print(f"usage: {sys.argv[0]} LOGFILE [SPOOL [BOOTSTRAP]]", file=sys.stderr)
        sys.exit(2)
    try:
        main(*sys.argv[1:])
    except txmq.BrokerAwayError as error:
        sys.exit(f"the broker is away: {error}")
