"""The conversation of a broker with the leader of another home, sans-I/O: asks in, bytes out; bytes in, answers out.

Theory of operation. The first request is ``hello``. Asks are sent when its answer has proved that the other side leads
that home of this cluster: an address may have become another home's. An ask may be answered late (``complete`` waits
for databases), so silence is judged by ``ping``, which is answered at once.

Invariants:
    * a conversation that failed stays failed: the caller closes it and begins another one;
    * what the other side sends is bounded: an answer of more than ``ANSWER_SIZE_BYTES_MAX`` ends the conversation.
"""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

from txmq.broker.cluster.branch_asks import BranchAsk
from txmq.broker.state.identity import BrokerIdentity
from txmq.errors import ConnectionLostError, RemoteProtocolError
from txmq.protocol import commands
from txmq.protocol.answers import AnswerReader

ANSWER_SIZE_BYTES_MAX: Final = 16 << 10
PING_S: Final = 1.0
SILENCE_S_MAX: Final = 5.0
_PROTOCOL: Final = 1
_HELLO, _PING = b"hello", b"ping"  # opaques; those of asks are numbers


class BranchAnswer(NamedTuple):
    """The answer to an ask."""

    ask: BranchAsk
    code: int
    body: bytes


class HomeConversation:
    """See the module's docstring.

    Attributes:
        home: the other one.
        is_greeted: the other side has proved to lead it.
        output: bytes to be sent; the caller takes them out.
    """

    def __init__(self, identity: BrokerIdentity, home: int, now: float) -> None:
        self.home, self._cluster = home, identity.cluster
        self.output: list[bytes] = []
        self._reader = AnswerReader(ANSWER_SIZE_BYTES_MAX)
        self.is_greeted = False
        self._waiting: list[BranchAsk] = []  # for the greeting
        self._asked: dict[bytes, BranchAsk] = {}
        self._heard = self._pinged = now
        self._is_pinging = False
        self._send("hello", _PROTOCOL, f"home-{identity.node:016x}", opaque=_HELLO, home=f"{home:016x}")

    def ask(self, ask: BranchAsk) -> None:
        """One more."""
        if not self.is_greeted:
            self._waiting.append(ask)
            return
        opaque = b"%d" % ask.number
        self._asked[opaque] = ask
        self._send(ask.verb, ask.txid, opaque=opaque, **ask.extensions)

    def received(self, data: bytes, now: float) -> list[BranchAnswer]:
        """Take in what was read.

        Raises:
            RemoteProtocolError: the other side is not the leader of that home, or speaks another protocol.
        """
        self._heard = now
        answers = []
        for code, opaque, body, _ in self._reader.feed(data):
            if opaque == _HELLO:
                self._greeted(code, body)
            elif opaque == _PING:
                self._is_pinging = False
            else:
                ask = self._asked.pop(opaque, None)
                if ask is None:
                    raise RemoteProtocolError(f"home {self.home:016x} answered {opaque!r}, which was not asked")
                answers.append(BranchAnswer(ask, code, body))
        return answers

    def tick(self, now: float) -> None:
        """Time has passed.

        Raises:
            ConnectionLostError: nothing was heard for too long.
        """
        if self.is_greeted and not self._asked:
            return
        if (self._is_pinging or not self.is_greeted) and now - max(self._heard, self._pinged) > SILENCE_S_MAX:
            raise ConnectionLostError(f"home {self.home:016x} has not answered for {SILENCE_S_MAX:g} s")
        if self.is_greeted and not self._is_pinging and now - self._pinged >= PING_S:
            self._is_pinging, self._pinged = True, now
            self._send("ping", opaque=_PING)

    def _greeted(self, code: int, body: bytes) -> None:
        told = _fields(body) if code == 200 else {}
        if (told.get("home"), told.get("cluster")) != (f"{self.home:016x}", f"{self._cluster:016x}"):
            raise RemoteProtocolError(
                f"home {self.home:016x} of cluster {self._cluster:016x} was expected, answered {code} {body[:200]!r}"
            )
        self.is_greeted = True
        waiting, self._waiting = self._waiting, []
        for ask in waiting:
            self.ask(ask)

    def _send(self, verb: str, *arguments: str | int, opaque: bytes, **extensions: str | None) -> None:
        self.output.append(b"".join(commands.request(verb, *arguments, extensions=extensions, opaque=opaque)))


def _fields(body: bytes) -> dict[str, Any]:
    try:
        told = json.loads(body)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}
