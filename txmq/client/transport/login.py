"""A client logs in, before anything else is said on a connection: by SCRAM-SHA-256, or as the owner of its certificate.

By SCRAM both sides prove that they know the password; a fake broker learns nothing that it could use.
Over TLS the proof holds for the certificate that this client was shown, and for no other: a relay between two TLS
connections, with another certificate that the client trusts, cannot log in with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from txmq.client.transport.connection import Connection
from txmq.errors import OverloadedError, UnauthenticatedError, UnavailableError
from txmq.protocol.certificates import end_point
from txmq.protocol.scram import ScramAttempt
from txmq.runtime.os_clock import OSRandom

_NONCE_BITS = 192


@dataclass(frozen=True, slots=True)
class Login:
    """The user that logs in, and how. No text of it shows a password."""

    user: str
    password: Callable[[], str] | None = field(repr=False)  # asked at each login; None: the certificate proves it


def log_in(connection: Connection, login: Login | None, deadline: float) -> None:
    """Log in, if there is a user to log in as.

    Raises:
        UnauthenticatedError: user or password is wrong, or the broker could not prove that it knows the user.
        BadRequestError: the broker has no users.
        ConfigError: the password cannot be read.
        UnavailableError: the user has as many connections as its quota allows; to be tried again later.
    """
    if login is None:
        return
    if login.password is None:
        _by_certificate(connection, login.user, deadline)
        return
    nonce, shown = f"{OSRandom().bits(_NONCE_BITS):048x}", connection.stream.server_certificate
    attempt = ScramAttempt(login.user, login.password(), nonce, None if shown is None else end_point(shown))
    first = _ask(connection, "scram-sha-256", attempt.first(), deadline)
    attempt.verify(_ask(connection, "scram-sha-256", attempt.final(first), deadline))


def _by_certificate(connection: Connection, user: str, deadline: float) -> None:
    try:
        _ask(connection, "external", user.encode(), deadline)
    except UnauthenticatedError as error:
        raise UnauthenticatedError(
            f"{error}: this client's certificate is not {user}'s (txmq user add --certificate); there is no password"
        ) from None


def _ask(connection: Connection, mechanism: str, message: bytes, deadline: float) -> bytes:
    try:
        answer = connection.request(deadline, "auth", mechanism, body=[message]).result()
    except OverloadedError as error:  # the next attempt to connect comes later
        raise UnavailableError(str(error)) from None
    return bytes(answer).removesuffix(b"\n")
