"""SCRAM-SHA-256 (RFC 5802, RFC 7677): what is kept of a password. The only home of ``scramp``.

A password never leaves the process that was given it: the broker is told keys, which let it recognise the password
and not say it. ``scramp`` prepares passwords by SASLprep (RFC 4013).
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Any, Final, NamedTuple

from txmq.errors import BadRequestError, ConfigError

ITERATIONS: Final = 4096  # RFC 7677's least, and PostgreSQL's; some 2 ms of the client at each login
ITERATIONS_MAX: Final = 1_000_000  # a client would be busy for half a second
SALT_SIZE: Final = 16
_SALT_SIZE_MAX: Final = 64
_KEY_SIZE: Final = 32


class ScramKeys(NamedTuple):
    """What is kept of a password: salt and keys in base64, as they are journaled."""

    salt: str
    iterations: int
    stored_key: str
    server_key: str

    def to_json(self) -> dict[str, str | int]:
        """As ``user add`` and ``user passwd`` take it."""
        return self._asdict()

    @classmethod
    def from_json(cls, fields: Any) -> ScramKeys:
        """Keys as a peer sent them.

        Raises:
            BadRequestError: a field is missing, or is not what docs/protocol.md says. The text holds none of them.
        """
        if not isinstance(fields, dict) or fields.keys() != set(cls._fields):
            raise BadRequestError(f"user: keys are a JSON object of {', '.join(cls._fields)}")
        iterations = fields["iterations"]
        if isinstance(iterations, bool) or not isinstance(iterations, int):
            raise BadRequestError("user: iterations is a number")
        if not ITERATIONS <= iterations <= ITERATIONS_MAX:
            raise BadRequestError(f"user: iterations {iterations}: {ITERATIONS} to {ITERATIONS_MAX}")
        if not SALT_SIZE <= _decoded_size(fields["salt"]) <= _SALT_SIZE_MAX:
            raise BadRequestError(f"user: salt is {SALT_SIZE} to {_SALT_SIZE_MAX} bytes in base64")
        for name in ("stored_key", "server_key"):
            if _decoded_size(fields[name]) != _KEY_SIZE:
                raise BadRequestError(f"user: {name} is {_KEY_SIZE} bytes in base64")
        return cls(**fields)


def keys_of(password: str, salt: bytes, iterations: int = ITERATIONS) -> ScramKeys:
    """The keys of a password.

    Raises:
        ConfigError: it is empty, or has characters that no password has (SASLprep). The text does not hold it.
    """
    from scramp import ScramException, ScramMechanism
    from scramp.utils import saslprep

    try:
        is_empty = not saslprep(password)
        made = ScramMechanism("SCRAM-SHA-256").make_auth_info(password, iteration_count=iterations, salt=salt)
    except ScramException:
        is_empty, made = True, None
    if made is None or is_empty:
        raise ConfigError("the password is empty, or has characters that no password may have (control characters)")
    _, stored_key, server_key, _ = made
    return ScramKeys(_encoded(salt), iterations, _encoded(stored_key), _encoded(server_key))


def _encoded(content: bytes) -> str:
    return b64encode(content).decode()


def _decoded_size(text: object) -> int:
    """-1 if it is no base64, or could be written otherwise."""
    if not isinstance(text, str):
        return -1
    try:
        content = b64decode(text, validate=True)
    except ValueError:
        return -1
    return len(content) if _encoded(content) == text else -1
