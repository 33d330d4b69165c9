"""The verb ``auth``: every message altered in every position, replayed; nobody is told why."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from tools.images.node import Answer, Client, Node
from txmq.broker.verbs.access.auth import PLAIN_ITERATIONS_MAX
from txmq.errors import UnauthenticatedError
from txmq.protocol import scram
from txmq.protocol.grammar import VERBS
from txmq.protocol.scram import ITERATIONS_MAX, ScramAttempt

from ...support import node, put
from .access_support import add, keys, operator

VECTORS = Path(__file__).resolve().parents[4] / "vectors"
BINDING = bytes(range(32))


def ask(client: Client, message: bytes, mechanism: str = "scram-sha-256") -> Answer:
    """One message."""
    return client.ask("auth", mechanism, body=message)


def guarded() -> Node:
    """A broker with one user, of the password ``pencil``; failed logins are forgotten."""
    made = node()
    add(made.connect(), "ops")
    made.context.failed_logins.failed = lambda address, now_ms: 0  # type: ignore[method-assign]
    return made


def _logged_in(client: Client, attempt: ScramAttempt) -> Answer:
    first = ask(client, attempt.first())
    assert first.code == 200, first
    return ask(client, attempt.final(first.body.removesuffix(b"\n")))


def test_client_messages_altered_in_every_position_log_nobody_in() -> None:
    made = guarded()
    size = len(ScramAttempt("ops", "pencil", "abc").first())
    for position in range(size):
        client, attempt = made.connect(), ScramAttempt("ops", "pencil", "abc")
        altered = bytearray(attempt.first())
        altered[position] ^= 1
        first = ask(client, bytes(altered))
        if first.code == 200 and first.body.startswith(b"r=abc"):
            ask(client, attempt.final(first.body.removesuffix(b"\n")))
        assert client.client.user == "", altered
    client, attempt = made.connect(), ScramAttempt("ops", "pencil", "abc")
    size = len(attempt.final(ask(client, attempt.first()).body.removesuffix(b"\n")))
    for position in range(size):
        for bit in (1, 32):
            client, attempt = made.connect(), ScramAttempt("ops", "pencil", "abc")
            final = bytearray(attempt.final(ask(client, attempt.first()).body.removesuffix(b"\n")))
            final[position] ^= bit
            assert ask(client, bytes(final)).error == "unauthenticated", (position, final)
            assert client.client.user == ""


def test_server_messages_altered_in_every_position_are_refused() -> None:
    made = guarded()
    client, attempt = made.connect(), ScramAttempt("ops", "pencil", "abc")
    first = ask(client, attempt.first()).body.removesuffix(b"\n")
    for position in range(len(first)):
        client, attempt = made.connect(), ScramAttempt("ops", "pencil", "abc")
        altered = bytearray(ask(client, attempt.first()).body.removesuffix(b"\n"))
        altered[position] ^= 1
        try:
            final = attempt.final(bytes(altered))
        except UnauthenticatedError:
            continue
        assert ask(client, final).error == "unauthenticated", altered
    client, attempt = made.connect(), ScramAttempt("ops", "pencil", "abc")
    told = _logged_in(client, attempt).body.removesuffix(b"\n")
    for position in range(len(told)):
        other = ScramAttempt("ops", "pencil", "abc")
        again = made.connect()
        altered = bytearray(_logged_in(again, other).body.removesuffix(b"\n"))
        altered[position] ^= 1
        with pytest.raises(UnauthenticatedError, match="wrong"):
            other.verify(bytes(altered))


def test_replayed_messages_log_nobody_in() -> None:
    made = guarded()
    client, attempt = made.connect(), ScramAttempt("ops", "pencil", "abc")
    first = attempt.first()
    final = attempt.final(ask(client, first).body.removesuffix(b"\n"))
    assert ask(client, final).code == 200
    eavesdropper = made.connect()
    assert ask(eavesdropper, first).code == 200
    assert ask(eavesdropper, final).error == "unauthenticated"
    assert ask(eavesdropper, final).error == "unauthenticated"  # the login is over
    assert eavesdropper.client.user == ""


def test_unknown_users_look_like_those_with_another_password() -> None:
    made = guarded()
    add(operator(made), "card", keys=None, certificate="CN=card")
    firsts: dict[str, list[str]] = {}
    finals: dict[str, Answer] = {}
    for name in ("ops", "nobody", "card"):
        for _ in range(2):
            client, attempt = made.connect(), ScramAttempt(name, "guess", "abc")
            told = ask(client, attempt.first())
            salt = [word for word in told.body.decode().split(",") if word[:2] in ("s=", "i=")]
            assert firsts.setdefault(name, salt) == salt
            finals[name] = ask(client, attempt.final(told.body.removesuffix(b"\n")))
    assert len(set(finals.values())) == 1
    assert len({tuple(map(len, salt)) for salt in firsts.values()}) == 1
    assert len({salt[0] for salt in firsts.values()}) == 3


def test_user_removed_during_login_is_not_let_in() -> None:
    made = guarded()
    admin = operator(made)
    for change in (
        partial(add, admin, "shop", action="passwd", keys=keys("other")),
        partial(admin.ask, "user", "remove", "shop", body=b""),
    ):
        if "shop" not in made.state.principals.users:
            add(admin, "shop")
        client, attempt = made.connect(), ScramAttempt("shop", "pencil", "abc")
        final = attempt.final(ask(client, attempt.first()).body.removesuffix(b"\n"))
        assert change().code == 200
        assert ask(client, final).error == "unauthenticated"


@pytest.mark.parametrize("iterations", [PLAIN_ITERATIONS_MAX, PLAIN_ITERATIONS_MAX + 1, ITERATIONS_MAX])
def test_plain_makes_no_more_iterations_than_the_loop_can_bear(
    iterations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guess at a user with a million of them held the loop for half a second."""
    made = guarded()
    assert add(operator(made), "slow", keys={**keys(), "iterations": iterations}).code == 200
    tried, keys_of = list[int](), scram.keys_of

    def watched(password: str, salt: bytes, iterations: int) -> scram.ScramKeys:
        tried.append(iterations)
        return keys_of(password, salt, iterations)

    monkeypatch.setattr(scram, "keys_of", watched)
    client = made.connect()
    client.client.binding = BINDING
    assert ask(client, b"\0slow\0guess", "plain").error == "unauthenticated"
    assert tried == [iterations if iterations <= PLAIN_ITERATIONS_MAX else scram.ITERATIONS]
    told = made.context.audited[-1]
    assert (told["event"], told.get("iterations")) == (
        "login failed", iterations if iterations > PLAIN_ITERATIONS_MAX else None,
    )  # fmt: skip


def test_user_of_many_iterations_logs_in_by_scram_alone() -> None:
    made = guarded()
    slow = scram.keys_of("pencil", bytes(scram.SALT_SIZE), PLAIN_ITERATIONS_MAX + 1).to_json()
    assert add(operator(made), "slow", keys=slow).code == 200
    client = made.connect()
    client.client.binding = BINDING
    assert ask(client, b"\0slow\0pencil", "plain").error == "unauthenticated"
    assert _logged_in(made.connect(), ScramAttempt("slow", "pencil", "abc")).code == 200


def test_the_first_user_ends_anonymity_for_every_verb() -> None:
    made = node()
    client = made.session()
    assert put(client, b"v").code == 200
    add(client, "ops")
    lines = json.loads((VECTORS / "wire.json").read_text("utf-8"))["requests"]
    free = {"hello", "version", "help", "quit", "ping", "auth"}
    asked = {line["request"][0]: line["bytes"].encode("latin-1") for line in lines}
    assert set(asked) == {verb.decode() for verb in VERBS}
    for verb, line in asked.items():
        stranger = made.connect()
        stranger.send_bytes(line)
        made.pump()
        (answer,) = stranger.received.values()
        if verb not in free:
            assert answer.error == "unauthenticated", verb
    assert put(client, b"v").error == "unauthenticated"
    for wish in ("new", "1.0." + "0" * 32):
        assert made.connect().ask("hello", 1, "me", extensions={"session": wish}).error == "unauthenticated"
    assert made.connect().ask("hello", 1, "me").code == 200
