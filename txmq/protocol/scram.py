"""SCRAM-SHA-256 (RFC 5802, RFC 7677): what is kept of a password, and both sides of a login. The only home of
``scramp``.

A password never leaves the process that was given it: the broker is told keys, which let it recognise the password
and not say it. ``scramp`` prepares passwords by SASLprep (RFC 4013).

A login is four messages: client first, server first, client final, server final. A name that is nobody's is answered
with keys made of it and of a secret of the broker (``mock_keys``): so its salt stays the same, the work is the same,
and only the end of the login fails, as with a wrong password.

*Brokers of one cluster* know each other by such a login, whose password they derive and nobody types: an HMAC of the
cluster's secret and both homes (``peer_password``). So the asking broker proves that it is of the cluster, and the
asked one that it is, too, and the home that was meant: an address in the registry proves nothing. Relaying the
conversation to another home gives no login there, nor, over TLS, with another certificate. A broker's name begins with
a dot: no user has such a name.

Invariants:
    * a login fails with one error, whatever was wrong: ``UnauthenticatedError``, without a word of the messages;
    * no error that leaves here has one of ``scramp`` as its cause or context: those hold frames with the password.
"""

from __future__ import annotations

import hmac
from base64 import b64decode, b64encode
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeVar

from txmq.errors import BadRequestError, ConfigError, UnauthenticatedError

ITERATIONS: Final = 4096  # RFC 7677's least, and PostgreSQL's; some 2 ms of the client at each login
ITERATIONS_MAX: Final = 1_000_000  # a client would be busy for half a second
SALT_SIZE: Final = 16
_SALT_SIZE_MAX: Final = 64
_KEY_SIZE: Final = 32
_MECHANISM: Final = "SCRAM-SHA-256"
_BINDING: Final = "tls-server-end-point"
_T = TypeVar("_T")
REFUSED: Final = "user or password is wrong"
_PREFIX: Final = ".home-"
_HOMES_KEPT: Final = 1000


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
        made = ScramMechanism(_MECHANISM).make_auth_info(password, iteration_count=iterations, salt=salt)
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


def mock_keys(secret: str, name: str) -> ScramKeys:
    """Keys of a name that is nobody's: the same at each login, and no password has them."""

    def drawn(purpose: str) -> bytes:
        return hmac.digest(secret.encode(), f"{purpose}:{name}".encode(), "sha256")

    return ScramKeys(
        _encoded(drawn("salt")[:SALT_SIZE]), ITERATIONS, _encoded(drawn("stored")), _encoded(drawn("server"))
    )


class ScramLogin:
    """The broker's side of one login.

    Args:
        keys_of_user: the keys of a name, or mock ones; called once.
        nonce: printable, drawn for this login.
        binding: the hash of the broker's certificate (RFC 5929); None without TLS. A login that is not bound to it is
            refused.

    Attributes:
        user: the name in the client's first message.
        keys: those that the login is held against.
    """

    def __init__(self, keys_of_user: Callable[[str], ScramKeys], nonce: str, binding: bytes | None) -> None:
        from scramp import ScramMechanism

        self.user, self.keys = "", mock_keys(nonce, "")
        self._keys_of_user = keys_of_user
        self._server = ScramMechanism(_name(binding)).make_server(self._look_up, _channel(binding), nonce)

    def _look_up(self, name: str) -> tuple[bytes, bytes, bytes, int]:
        self.user, self.keys = name, self._keys_of_user(name)
        salt, iterations, stored_key, server_key = self.keys
        return b64decode(salt), b64decode(stored_key), b64decode(server_key), iterations

    def first(self, message: bytes) -> bytes:
        """Take the client's first message; the server's first one."""

        def step() -> bytes:
            self._server.set_client_first(message.decode())
            return bytes(self._server.get_server_first().encode())

        return _carried_out(step)

    def final(self, message: bytes) -> bytes:
        """Take the client's final message; the server's final one. It has the password, if this does not raise.

        Raises:
            UnauthenticatedError: it has not, or the messages are not those of one login.
        """

        def step() -> bytes:
            self._server.set_client_final(_exact(message, "c", "p"))
            return bytes(self._server.get_server_final().encode())

        return _carried_out(step)


class ScramAttempt:
    """The client's side of one login.

    Args:
        nonce: as of ``ScramLogin``.
        binding: as of ``ScramLogin``.
        iterations_max: how many iterations the broker may ask for: it has proved nothing yet when they are made.
    """

    def __init__(
        self,
        user: str,
        password: str,
        nonce: str,
        binding: bytes | None = None,
        iterations_max: int = ITERATIONS_MAX,
    ) -> None:
        from scramp import ScramClient

        self._iterations_max = iterations_max
        names = [_name(binding)]
        self._client = _carried_out(lambda: ScramClient(names, user, password, _channel(binding), nonce))

    def first(self) -> bytes:
        """The client's first message."""
        return bytes(self._client.get_client_first().encode())

    def final(self, server_first: bytes) -> bytes:
        """The client's final message, to the server's first one.

        Raises:
            UnauthenticatedError: that is none, or asks for more work than a broker of txmq does, or for so little that
                the proof would give the password away.
        """
        _carried_out(lambda: self._client.set_server_first(server_first.decode()))
        iterations = int(self._client.iterations)
        if not ITERATIONS <= iterations <= self._iterations_max:
            raise UnauthenticatedError(
                f"the other side asks for {str(iterations)[:20]} iterations of SCRAM, where {ITERATIONS} to "
                f"{self._iterations_max} are taken: it is not the broker that was meant"
            )
        return _carried_out(lambda: bytes(self._client.get_client_final().encode()))

    def verify(self, server_final: bytes) -> None:
        """The broker knows the password's keys, too.

        Raises:
            UnauthenticatedError: it has not shown that: it is not the broker that was meant.
        """
        _carried_out(lambda: self._client.set_server_final(_exact(server_final, "v")))


def has_password(keys: ScramKeys, password: str) -> bool:
    """Whether that is the password, in the same time whatever it is."""
    try:
        made = keys_of(password, b64decode(keys.salt), keys.iterations)
    except ConfigError:
        made = mock_keys("", "")
    return hmac.compare_digest(made.stored_key, keys.stored_key)


def _carried_out(step: Callable[[], _T]) -> _T:
    from scramp import ScramException

    try:
        return step()
    except (ScramException, ValueError):  # such as a number of over 4300 digits
        pass
    raise UnauthenticatedError(REFUSED)


def _exact(message: bytes, *names: str) -> str:
    """A final message as text. Bits of its base64 that say nothing must be 0, at which ``scramp`` does not look."""
    text = message.decode()
    for name, _, value in (field.partition("=") for field in text.split(",")):
        if name in names and _decoded_size(value) < 0:
            raise UnauthenticatedError(REFUSED)
    return text


def _name(binding: bytes | None) -> str:
    return _MECHANISM if binding is None else f"{_MECHANISM}-PLUS"


def _channel(binding: bytes | None) -> tuple[str, bytes] | None:
    return None if binding is None else (_BINDING, binding)


def peer_name(home: int) -> str:
    """The name under which the broker that leads a home logs in at other homes."""
    return f"{_PREFIX}{home:016x}"


def is_peer(name: str) -> bool:
    """Whether the name is a broker's."""
    return name.startswith(_PREFIX)


def home_of(name: str) -> int | None:
    """The home of such a name; None: it is a user's, or nobody's."""
    digits = name.removeprefix(_PREFIX)
    try:
        home = int(digits, 16)
    except ValueError:
        return None
    return home if peer_name(home) == name else None


def peer_password(secret: str, asking: int, asked: int) -> str:
    """What the broker of one home proves to that of another one."""
    return hmac.digest(secret.encode(), f"{asking:016x} asks {asked:016x}".encode(), "sha256").hex()


@lru_cache(maxsize=_HOMES_KEPT)
def peer_keys(secret: str, asking: int, asked: int) -> ScramKeys:
    """The keys of that password. Kept: they cost the loop two milliseconds."""
    salt = hmac.digest(secret.encode(), f"salt {asking:016x} {asked:016x}".encode(), "sha256")[:SALT_SIZE]
    return keys_of(peer_password(secret, asking, asked), salt)
