"""A member of the campaign's group: ``python -m tools.crash.groups.member DIRECTORY ADDRESS NAME``.

It deals with messages until SIGTERM, and writes to the history each message before it is acknowledged, every save
with its answer, and every partition it is told to consume. What goes over the wire is heard at
``ReconnectingConnection.call``, so that nothing the consumer believes is taken for what the broker said.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import txmq
from tools.crash.directory import HistoryFile
from tools.crash.groups.directory import GROUP, TOPIC, GroupCampaignDirectory, member_options
from tools.crash.processes import connect
from txmq.client.transport.reconnecting import ReconnectingConnection
from txmq.model import TopicPartition

THREADS = 2
Call = Callable[..., bytes]


class Recorder:
    """Writes what a member tells its group and is told."""

    def __init__(self, history: HistoryFile) -> None:
        self._history = history
        self._saves = 0
        self._generations: dict[
            TopicPartition, int
        ] = {}  # the newest it heard of; kept when it is over: it may work on

    def call(self, call: Call, verb: str, *arguments: Any, **more: Any) -> bytes:
        """In place of ``ReconnectingConnection.call``."""
        if verb != "group":
            return call(verb, *arguments, **more)
        if arguments[0] == "save":
            return self._save(call, verb, *arguments, **more)
        answer = call(verb, *arguments, **more)
        if arguments[0] in ("join", "heartbeat"):
            self._told(json.loads(answer)["assigned"])
        return answer

    def _save(self, call: Call, *arguments: Any, **more: Any) -> bytes:
        self._saves += 1
        id = f"{self._history.process}-save-{self._saves}"
        rows = [row[:4] for row in json.loads(b"".join(more["body"]))]
        self._history.write("save", "invoke", id, rows)
        answer = call(*arguments, **more)
        refused = json.loads(answer)["refused"]
        self._history.write("save", "ok", id, [row[:2] for row in refused])
        return answer

    def _told(self, assigned: list[list[Any]]) -> None:
        fresh = [row[:4] for row in assigned if self._generations.get((row[0], row[1]), 0) < row[2]]
        if fresh:
            self._history.write("view", "ok", "view", fresh)
            self._generations |= {(topic, partition): generation for topic, partition, generation, _ in fresh}

    def handle(self, message: txmq.Message) -> None:
        """The listener."""
        generation = self._generations[message.topic, message.partition]
        row = [message.topic, message.partition, generation, message.offset]
        self._history.write("handle", "ok", "handle", [row])


def main(directory: str, address: str, name: str) -> None:
    """Work until SIGTERM."""
    recorder = Recorder(HistoryFile(GroupCampaignDirectory(Path(directory)).histories, name))
    original = ReconnectingConnection.call
    ReconnectingConnection.call = (  # type: ignore[method-assign]
        lambda self, verb, *arguments, **more: recorder.call(partial(original, self), verb, *arguments, **more)
    )
    with connect(address, name) as client, client.consumer(GROUP, [TOPIC], options=member_options(name)) as consumer:
        consumer.run(recorder.handle, threads=THREADS)


if __name__ == "__main__":
    main(*sys.argv[1:])
