"""The transport on an event loop: the connections and senders of ``txmq``, with the loop in place of threads.

Theory of operation. Everything runs in strands (``runtime/strands.py``). The loop reads a connection, and wakes all
whose answers came with one read. It writes what all tasks have sent by a few requests, and at the end of its turn the
rest. A sender adds messages to its core while the turn lasts; its background strand, woken once, sends them together:
one batch for each partition. An answer ends the futures of its batch at once: a loop runs nobody's callbacks in there.
"""

from __future__ import annotations

import asyncio

from txmq.client.client import Client
from txmq.client.home_link import HomeLink
from txmq.client.producer.core import Batch
from txmq.client.producer.home_senders import HomeSender
from txmq.client.producer.sender import completion_of
from txmq.client.transaction.half_message import CheckBacks
from txmq.client.transport.connection import Connection
from txmq.client.transport.reconnecting import ReconnectingConnection
from txmq.model import SendResult
from txmq.runtime import loop_stream, strands
from txmq.runtime.threads import Future, start_daemon


class LoopConnection(ReconnectingConnection):
    """A connection that comes back, read by the loop."""

    def dial(self, host: str, port: int, timeout: float) -> Connection:
        """See ``ReconnectingConnection``."""
        stream = loop_stream.connect(host, port, timeout, self._destination.tls)
        connection = Connection(stream, self._clock, f"{host}:{port}")
        connection.appoint(stream, stream.gather)
        stream.serve(connection.read_arrived, connection.write)
        return connection


class LoopSender(HomeSender):
    """The sender to one home, driven by its background strand."""

    def _new_future(self) -> Future[SendResult]:
        return strands.required().new_future()

    def _pump_new(self, now: float) -> None:
        """Nothing: messages of one turn of the loop leave together."""

    def _start_background(self) -> None:
        background = self._background
        if background is None:
            super()._start_background()
        else:
            background.nudge()

    def _notify(self, finished: list[Batch]) -> None:
        self._unreported.clear()
        for batch in finished:
            completion = completion_of(batch)
            completion.finish()
            self._futures -= len(completion.futures)
            completion.complete_futures()

    def take_arrived(self) -> None:
        """Between two slices of many messages: let the loop go on."""
        strands.required().wait_for(asyncio.sleep(0))


class LoopLink(HomeLink):
    """The client's side of one home."""

    connection_type = LoopConnection
    sender_type = LoopSender


class LoopClient(Client):
    """``txmq.Client`` for strands."""

    link_type = LoopLink

    def begin_check_backs(self, checks: CheckBacks) -> None:
        """In a task: homes may have to be asked, and ``client.producer`` does not wait."""
        start_daemon("txmq-checks", checks.start)
