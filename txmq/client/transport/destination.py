"""Where a connection leads: the addresses that are tried, and the home that has to answer there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from txmq.client.transport.login import Login
from txmq.protocol.json_text import Fields

if TYPE_CHECKING:
    from txmq.runtime.tls import ClientTls  # a client without TLS does without the library

Address = tuple[str, int]


class Destination(Protocol):
    """The other end of a connection, through all its lives."""

    @property
    def tls(self) -> ClientTls | None:
        """How it is spoken to; None: in plaintext."""

    @property
    def login(self) -> Login | None:
        """How a connection logs in; None: it does not."""

    @property
    def home_wish(self) -> str | None:
        """The home that ``hello`` asks for; None if any broker will do."""

    def addresses(self, deadline: float) -> Sequence[Address]:
        """Where to look for it, tried in turn."""

    def greeted(self, introduction: Fields, address: Address) -> None:
        """A broker has answered ``hello``.

        Raises:
            ConnectionLostError: it is another one than the connection is for.
        """

    def failed(self) -> None:
        """No address could be connected to."""


class AnyBroker:
    """Any broker that answers at these addresses."""

    home_wish = None

    def __init__(self, addresses: Sequence[Address], tls: ClientTls | None = None, login: Login | None = None) -> None:
        self._addresses, self.tls, self.login = list(addresses), tls, login

    def addresses(self, deadline: float) -> Sequence[Address]:
        """See ``Destination``."""
        return self._addresses

    def greeted(self, introduction: Fields, address: Address) -> None:
        """See ``Destination``."""

    def failed(self) -> None:
        """See ``Destination``."""
