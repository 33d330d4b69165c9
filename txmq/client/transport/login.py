"""A client logs in: SCRAM-SHA-256, before anything else is said on a connection.

Both sides prove that they know the password; who pretends to be the broker learns nothing that it could use.
"""

from __future__ import annotations

from txmq.addresses import Credentials
from txmq.client.transport.connection import Connection
from txmq.protocol.scram import ScramAttempt
from txmq.runtime.os_clock import OSRandom

_NONCE_BITS = 192


def log_in(connection: Connection, credentials: Credentials | None, deadline: float) -> None:
    """Log in, if there is a user to log in as.

    Raises:
        UnauthenticatedError: user or password is wrong, or the broker could not prove that it knows the user.
        BadRequestError: the broker has no users.
    """
    if credentials is None:
        return
    attempt = ScramAttempt(credentials.name, credentials.password, f"{OSRandom().bits(_NONCE_BITS):048x}")
    first = _ask(connection, attempt.first(), deadline)
    attempt.verify(_ask(connection, attempt.final(first), deadline))


def _ask(connection: Connection, message: bytes, deadline: float) -> bytes:
    answer = connection.request(deadline, "auth", "scram-sha-256", body=[message]).result()
    return bytes(answer).removesuffix(b"\n")
