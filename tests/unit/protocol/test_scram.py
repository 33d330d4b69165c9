"""Keys of a password: those of RFC 7677's example, and nothing else is taken for keys."""

from __future__ import annotations

import hashlib
import hmac
from base64 import b64decode, b64encode

import pytest

from txmq.errors import BadRequestError, ConfigError, UnauthenticatedError
from txmq.protocol.scram import ITERATIONS, ScramAttempt, ScramKeys, ScramLogin, keys_of

SALT = b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
# RFC 7677, section 3: "user", "pencil".
AUTH_MESSAGE = (
    b"n=user,r=rOprNGfwEbeRWgbNEkqO,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,"
    b"i=4096,c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
)


def _signature(key: str) -> bytes:
    return hmac.new(b64decode(key), AUTH_MESSAGE, hashlib.sha256).digest()


def test_keys_are_those_of_the_example_of_the_rfc() -> None:
    keys = keys_of("pencil", SALT)
    assert b64encode(_signature(keys.server_key)) == b"6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="
    proof = b64decode("dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=")
    client_key = bytes(a ^ b for a, b in zip(proof, _signature(keys.stored_key), strict=True))
    assert hashlib.sha256(client_key).digest() == b64decode(keys.stored_key)


def test_passwords_that_look_the_same_have_the_same_keys() -> None:
    assert keys_of("I\u00adX", SALT) == keys_of("\u2168", SALT) == keys_of("IX", SALT)  # RFC 4013, section 3


@pytest.mark.parametrize("password", ["", "a\x07b", "\u00ad"])
def test_what_is_no_password_is_refused_and_not_told(password: str) -> None:
    with pytest.raises(ConfigError) as caught:
        keys_of(password, SALT)
    assert "\x07" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_keys_come_back_from_json() -> None:
    keys = keys_of("pencil", SALT)
    assert ScramKeys.from_json(keys.to_json()) == keys


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("salt", "c2hvcnQ="), ("salt", b64encode(bytes(65)).decode()), ("salt", None), ("salt", "*" * 24),
        ("iterations", ITERATIONS - 1), ("iterations", 1_000_001), ("iterations", True), ("iterations", "4096"),
        ("stored_key", ""), ("stored_key", b64encode(bytes(31)).decode()), ("server_key", 7),
        ("server_key", b64encode(bytes(32)).decode()[:-2] + "B="), ("more", "x"),
    ],
)  # fmt: skip
def test_what_is_no_key_is_refused(field: str, value: object) -> None:
    with pytest.raises(BadRequestError):
        ScramKeys.from_json({**keys_of("pencil", SALT).to_json(), field: value})


def _begun() -> tuple[ScramAttempt, ScramLogin, bytes]:
    """Both sides of a login, and the client's final message."""
    attempt, login = (
        ScramAttempt("ops", "pencil", "a" * 16),
        ScramLogin(lambda _: keys_of("pencil", SALT), "b" * 16, None),
    )
    return attempt, login, attempt.final(login.first(attempt.first()))


def _written_otherwise(message: bytes) -> bytes:
    """The same 32 bytes at the end, with a bit set that base64 does not need."""
    digits = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    last = digits[digits.index(message[-2:-1]) | 1 : (digits.index(message[-2:-1]) | 1) + 1]
    changed = message[:-2] + last + b"="
    assert b64decode(changed[-44:]) == b64decode(message[-44:])
    return changed


def test_proofs_count_only_byte_for_byte() -> None:
    _, login, final = _begun()
    with pytest.raises(UnauthenticatedError):
        login.final(_written_otherwise(final))
    attempt, login, final = _begun()
    told = login.final(final)
    with pytest.raises(UnauthenticatedError):
        attempt.verify(_written_otherwise(told))
    attempt.verify(told)


@pytest.mark.parametrize("iterations", ["1", "4095", "1000001", "10000000", "9" * 5000, "-4096", "x", ""])
def test_client_makes_no_more_iterations_than_a_broker_asks_for(
    monkeypatch: pytest.MonkeyPatch, iterations: str
) -> None:
    """Nor fewer: the holder of a proof of one iteration finds the password 4096 times as fast."""
    attempt = ScramAttempt("ops", "pencil", "nonce")
    attempt.first()
    monkeypatch.setattr(attempt._client, "get_client_final", lambda: pytest.fail("they are made"))
    with pytest.raises(UnauthenticatedError):
        attempt.final(f"r=nonceserver,s=W22ZaJ0SNY7soEsUEjb6gQ==,i={iterations}".encode())


def test_broker_makes_no_more_iterations_than_its_peers_have() -> None:
    attempt = ScramAttempt("ops", "pencil", "nonce", iterations_max=ITERATIONS)
    attempt.first()
    with pytest.raises(UnauthenticatedError, match="asks for 4097 iterations"):
        attempt.final(b"r=nonceserver,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4097")
