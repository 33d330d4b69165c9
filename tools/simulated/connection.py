"""A client's connection to a broker in memory: it carries request lines to the core, and answers back.

It does what ``ReconnectingConnection`` does, without sockets: a lost connection is made again for the next request, and
resumes the session.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from tools.images.node import Answer, Client
from tools.simulated.faults import Reply
from txmq.client.transport.session import ClientSession
from txmq.errors import BrokerAwayError, ConnectionLostError, RequestTimeoutError
from txmq.model import Outcome
from txmq.protocol import requests
from txmq.protocol.answers import broker_error
from txmq.runtime.ports import Buffer
from txmq.xid import TxId

if TYPE_CHECKING:
    from tools.simulated.broker import SimulatedBroker

Extensions = Mapping[str, Any]


class Sent(NamedTuple):
    """A request: its verb, the transaction that it names or "", its line, its body."""

    verb: str
    txid: str
    line: str
    body: bytes


class WireReply:
    """The answer to one request, which the core may give later. As ``Reply`` of a real connection."""

    def __init__(self, home: SimulatedBroker, wire: Client, opaque: bytes, timeout: float) -> None:
        self._home, self._wire, self._opaque = home, wire, opaque
        self._deadline = home.clock.monotonic() + timeout

    @property
    def answer(self) -> Answer | None:
        """What has come."""
        return self._wire.received.get(self._opaque)

    @property
    def done(self) -> bool:
        """See ``Answer``."""
        return self.answer is not None or self._wire.client.gone

    def look(self) -> None:
        """See ``Answer``."""

    def sent(self) -> Self:
        """Itself."""
        return self

    def result(self, timeout: float | None = None) -> bytes:
        """The answer's body; in vain the wait turns the clock."""
        if not self.done:
            clock = self._home.clock
            clock.advance(max(self._deadline - clock.monotonic(), 0.0) if timeout is None else timeout)
            self._home.pump()
        answer = self.answer
        if answer is None and self._wire.client.gone:
            raise ConnectionLostError("the connection ended")
        if answer is None:
            raise RequestTimeoutError("no answer in time")
        if answer.code != 200:
            raise broker_error(answer.code, answer.body)
        return answer.body


class SimulatedConnection:
    """See the module's docstring.

    Attributes:
        session: see ``BrokerControl``.
    """

    def __init__(self, home: SimulatedBroker) -> None:
        self._home = home
        self._wire: Client | None = None
        self._opaque = 0
        self.session: ClientSession | None = None

    # --- the connection ----------------------------------------------------------------------------------------------

    def end(self) -> None:
        """The connection is lost."""
        wire, self._wire = self._wire, None
        if wire is not None and not wire.client.gone:
            wire.disconnect()

    def close(self) -> None:
        """See ``BrokerControl``."""
        self.end()
        if self in self._home.connections:
            self._home.connections.remove(self)

    def _connected(self) -> Client:
        if self._wire is None:
            if self not in self._home.connections:
                self._home.connections.append(self)
            self._wire = self._home.node.connect()
            if self.session is not None:
                self._resume(self.session)
        return self._wire

    def _resume(self, session: ClientSession) -> None:
        if self._hello(session.wish).code != 200:  # ended meanwhile, or never issued here
            self.session = None

    def _hello(self, wish: str) -> Answer:
        wire = self._connected()
        opaque = wire.send("hello", 1, "test", extensions={"session": wish})
        self._home.pump()
        return wire.received.pop(opaque)

    def connect_with_session(self, deadline: float) -> tuple[SimulatedConnection, ClientSession]:
        """See ``BrokerControl``."""
        with self._home.lock:
            self.reach(deadline)
            self._connected()
            if self.session is None:
                monotonic_ms = int(self._home.clock.monotonic() * 1000)
                self.session = ClientSession(json.loads(self._hello("new").body), monotonic_ms)
            return self, self.session

    def have_session(self, deadline: float) -> ClientSession:
        """See ``BrokerControl``."""
        return self.connect_with_session(deadline)[1]

    def known_outcome(self, txid: TxId) -> Outcome | None:
        """See ``BrokerControl``."""
        return None if self.session is None else self.session.known_outcome(txid.counter)

    def measure_clock(self, session: ClientSession, timeout: float) -> None:
        """See ``BrokerControl``."""
        session.clock_ahead_ms = self._home.clock.now_ms() - int(self._home.clock.monotonic() * 1000)

    def reach(self, deadline: float) -> None:
        """See ``BrokerControl``."""
        if self._home.is_away:
            raise BrokerAwayError("planned")

    def regain(self, deadline: float) -> None:
        """See ``BrokerControl``."""
        if self._home.is_away:
            clock = self._home.clock
            clock.advance(max(deadline - clock.monotonic(), 0.0))
            raise BrokerAwayError("planned")

    # --- requests ----------------------------------------------------------------------------------------------------

    def call(self, verb: str, *arguments: str | int, timeout: float, **named: Any) -> bytes:
        """See ``Control``."""
        return self.submit(verb, *arguments, timeout=timeout, **named).result()

    def repeat(self, verb: str, *arguments: str | int, timeout: float, **named: Any) -> bytes:
        """See ``BrokerControl``, except that a planned loss is not tried again."""
        return self.call(verb, *arguments, timeout=timeout, **named)

    def submit(
        self, verb: str, *arguments: str | int, timeout: float,
        extensions: Extensions | None = None, body: Sequence[Buffer] | None = None,
    ) -> Reply:  # fmt: skip
        """See ``Control``."""
        if timeout < 0:
            raise ValueError(f"timeout {timeout}")
        opaque = self._next_opaque()
        line, *_ = requests.request(verb, *arguments, extensions=extensions, body=body, opaque=opaque)
        txid = (extensions or {}).get("tx") or (arguments[0] if arguments else "")
        return self._submit(Sent(verb, str(txid), bytes(line).decode(), b"".join(body or ())), opaque, timeout)

    def submit_transaction(
        self, head: str, fields: Mapping[str, str | int], body: Sequence[Buffer] | None, deadline: float
    ) -> Reply:
        """See ``BrokerControl``."""
        opaque = self._next_opaque()
        line = requests.transaction_line(head, fields, None if body is None else sum(map(len, body)), opaque)
        verb, txid = head.split(" ")[:2]
        timeout = max(deadline - self._home.clock.monotonic(), 0.0)
        return self._submit(Sent(verb, txid, line.decode(), b"".join(body or ())), opaque, timeout)

    def write_transaction(self, head: str, fields: Mapping[str, str | int], body: Sequence[Buffer] | None) -> Reply:
        """See ``BrokerControl``."""
        return self.submit_transaction(head, fields, body, self._home.clock.monotonic()).sent()

    def _next_opaque(self) -> bytes:
        self._opaque += 1
        return b"%x" % self._opaque

    def _submit(self, sent: Sent, opaque: bytes, timeout: float) -> Reply:
        return self._home.take(sent, lambda: self._send(sent, opaque, timeout))

    def _send(self, sent: Sent, opaque: bytes, timeout: float) -> WireReply:
        wire = self._connected()
        wire.send_bytes(sent.line.encode() + sent.body)
        self._home.pump()
        return WireReply(self._home, wire, opaque, timeout)
