"""The conversation of a broker with the leader of another home, sans-I/O: asks in, bytes out; bytes in, answers out.

Theory of operation. The first request is ``hello``. Asks are sent when its answer has said that the other side leads
that home of this cluster: an address may have become another home's. Where there are users it proves that, in a login
by the secret that the brokers share (``protocol/scram.py``), and so does this side. An ask may be answered
late (``complete`` waits for databases), so silence is judged by ``ping``, which is answered at once.

Invariants:
    * with a secret nothing is asked, and no answer is believed, before both sides have proved to know it;
    * a conversation that failed stays failed: the caller closes it and begins another one;
    * the work that the other side asks for before it has proved anything is that of one login (2 ms);
    * what the other side sends is bounded: an answer that is too long ends the conversation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from txmq.broker.state.broker_identity import BrokerIdentity
from txmq.errors import ConnectionLostError, RemoteProtocolError, UnauthenticatedError
from txmq.protocol import requests
from txmq.protocol.answers import AnswerReader
from txmq.protocol.json_text import read_json
from txmq.protocol.scram import ITERATIONS, ScramAttempt, peer_name, peer_password
from txmq.runtime.ports import Random

ANSWER_SIZE_BYTES_MAX: Final = 16 << 10
PING_S: Final = 1.0
SILENCE_S_MAX: Final = 5.0
_PROTOCOL: Final = 1
_OK: Final = 200
_HELLO, _AUTH, _PING = b"hello", b"auth", b"ping"  # opaques; those of asks are numbers
_NONCE_BITS: Final = 192
_UNAUTHENTICATED: Final = 401


class HomeAsk(Protocol):
    """A request to the leader of a home; the answer comes back under its number."""

    @property
    def number(self) -> int: ...
    @property
    def verb(self) -> str: ...
    @property
    def arguments(self) -> tuple[str | int, ...]: ...
    @property
    def extensions(self) -> Mapping[str, str | None]: ...


Ask = TypeVar("Ask", bound=HomeAsk)


class HomeAnswer(NamedTuple, Generic[Ask]):
    """The answer to an ask."""

    ask: Ask
    code: int
    body: bytes


class InterbrokerConversation(Generic[Ask]):
    """See the module's docstring.

    Args:
        secret: of the brokers of the cluster; empty: there are no users, and nobody proves anything.
        answer_size_bytes_max: of an answer.

    Attributes:
        home: the other one.
        secret: see above.
        binding: over TLS the hash of the certificate that the other side has shown (RFC 5929); set before its first
            answer is handed in.
        is_greeted: the other side has said that it leads the home, and proved it if there is a secret.
        output: bytes to be sent; the caller takes them out.
    """

    def __init__(
        self, identity: BrokerIdentity, home: int, now: float, random: Random, secret: str = "",
        answer_size_bytes_max: int = ANSWER_SIZE_BYTES_MAX,
    ) -> None:  # fmt: skip
        self.home, self._cluster = home, identity.cluster
        self.secret, self.binding = secret, b""
        self._own, self._random = identity.node, random
        self._login: ScramAttempt | None = None
        self._is_proving = False
        self.output: list[bytes] = []
        self._reader = AnswerReader(answer_size_bytes_max)
        self.is_greeted = False
        self._waiting: list[Ask] = []  # for the greeting
        self._asked: dict[bytes, Ask] = {}
        self._heard = self._pinged = now
        self._is_pinging = False
        self._send("hello", _PROTOCOL, f"home-{identity.node:016x}", opaque=_HELLO, extensions={"home": f"{home:016x}"})

    def ask(self, ask: Ask) -> None:
        """One more."""
        if not self.is_greeted:
            self._waiting.append(ask)
            return
        opaque = b"%d" % ask.number
        self._asked[opaque] = ask
        self._send(ask.verb, *ask.arguments, opaque=opaque, extensions=ask.extensions)

    def received(self, data: bytes, now: float) -> list[HomeAnswer[Ask]]:
        """Take in what was read.

        Raises:
            RemoteProtocolError: the other side is not the leader of that home, or speaks another protocol.
        """
        self._heard = now
        answers = []
        for code, opaque, body, _ in self._reader.feed(data):
            if opaque == _HELLO:
                self._greeted(code, body)
            elif opaque == _AUTH:
                self._proved(code, body)
            elif opaque == _PING:
                self._is_pinging = False
            else:
                if code == _UNAUTHENTICATED:
                    raise RemoteProtocolError(f"home {self.home:016x} has users, of whom this home has yet to hear")
                ask = self._asked.pop(opaque, None)
                if ask is None:
                    raise RemoteProtocolError(f"home {self.home:016x} answered {opaque!r}, which was not asked")
                answers.append(HomeAnswer(ask, code, body))
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
        told = _fields(body) if code == _OK else {}
        if (told.get("home"), told.get("cluster")) != (f"{self.home:016x}", f"{self._cluster:016x}"):
            raise RemoteProtocolError(
                f"home {self.home:016x} of cluster {self._cluster:016x} was expected, answered {code} {body[:200]!r}"
            )
        if self.secret:
            self._log_in()
        else:
            self._begin()

    def _log_in(self) -> None:
        """Begin to prove that this is a broker of the cluster, and have the other side prove it."""
        name, password = peer_name(self._own), peer_password(self.secret, self._own, self.home)
        nonce = f"{self._random.bits(_NONCE_BITS):048x}"
        self._login = ScramAttempt(name, password, nonce, self.binding or None, ITERATIONS)  # what ``peer_keys`` has
        self._send("auth", "scram-sha-256", opaque=_AUTH, body=[self._login.first()])

    def _proved(self, code: int, body: bytes) -> None:
        """The other side's first or final message of the login."""
        if code != _OK or self._login is None:
            raise RemoteProtocolError(f"home {self.home:016x} takes no login of this broker: {code} {body[:200]!r}")
        message = body.removesuffix(b"\n")
        try:
            if not self._is_proving:
                self._is_proving = True
                self._send("auth", "scram-sha-256", opaque=_AUTH, body=[self._login.final(message)])
                return
            self._login.verify(message)
        except UnauthenticatedError:
            raise RemoteProtocolError(
                f"what answers in the name of home {self.home:016x} does not know the cluster's secret"
            ) from None
        self._login = None
        self._begin()

    def _begin(self) -> None:
        self.is_greeted = True
        waiting, self._waiting = self._waiting, []
        for ask in waiting:
            self.ask(ask)

    def _send(
        self, verb: str, *arguments: str | int, opaque: bytes, extensions: Mapping[str, str | None] | None = None,
        body: list[bytes] | None = None,
    ) -> None:  # fmt: skip
        request = requests.request(verb, *arguments, extensions=extensions, body=body, opaque=opaque)
        self.output.append(b"".join(request))


def _fields(body: bytes) -> dict[str, Any]:
    told = read_json(body)
    return told if isinstance(told, dict) else {}
