"""The verb ``auth``: every message altered in every position, replayed, the binding stripped; nobody is told why."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from tools.images.node import Answer, Client, Node
from tools.images.requests import batch
from tools.simulated.clock import SimClock
from txmq.broker.state.refusals import FREE_MAX, PAUSE_MS
from txmq.broker.verbs.access.auth import PLAIN_ITERATIONS_MAX
from txmq.errors import UnauthenticatedError
from txmq.protocol import scram
from txmq.protocol.grammar import VERBS
from txmq.protocol.scram import ITERATIONS_MAX, ScramAttempt, peer_name

from ...support import put, values
from .access_support import add, keys, node, operator

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


def test_a_login_proves_both_sides() -> None:
    client, attempt = guarded().connect(), ScramAttempt("ops", "pencil", "abc")
    final = _logged_in(client, attempt)
    assert final.code == 200
    attempt.verify(final.body.removesuffix(b"\n"))
    assert client.client.user == "ops"
    assert ask(client, ScramAttempt("ops", "pencil", "abc").first()).error == "bad-request"


def test_login_over_tls_is_bound_to_the_certificate() -> None:
    made = guarded()
    client = made.connect()
    client.client.binding = BINDING
    assert _logged_in(client, ScramAttempt("ops", "pencil", "abc", BINDING)).code == 200
    client = made.connect()
    client.client.binding = BINDING[::-1]  # somebody between the two
    assert _logged_in(client, ScramAttempt("ops", "pencil", "abc", BINDING)).error == "unauthenticated"


def test_a_stripped_binding_is_found() -> None:
    made = guarded()
    for header in (b"n,,", b"y,,"):
        client, attempt = made.connect(), ScramAttempt("ops", "pencil", "abc", BINDING)
        client.client.binding = BINDING
        assert ask(client, header + attempt.first().split(b",,", 1)[1]).error == "unauthenticated"
        assert client.client.user == ""
    client = made.connect()  # that of one that does not bind, and could be relayed
    client.client.binding = BINDING
    assert ask(client, ScramAttempt("ops", "pencil", "abc").first()).error == "unauthenticated"
    client = made.connect()  # without TLS there is nothing to bind to
    assert ask(client, ScramAttempt("ops", "pencil", "abc", BINDING).first()).error == "unauthenticated"


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


def test_plain_is_for_tls_only() -> None:
    made = guarded()
    client = made.connect()
    assert ask(client, b"\0ops\0pencil", "plain").error == "bad-request"
    client.client.binding = BINDING
    for wrong in (b"\0ops\0pencils", b"\0nobody\0pencil", b"\0ops\0", b"\0ops\0\x07"):
        assert ask(client, wrong, "plain").error == "unauthenticated"
    assert ask(client, b"ops\0pencil", "plain").error == "bad-request"
    assert ask(client, b"\0ops\0pencil", "plain").code == 200
    assert client.client.user == "ops"


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


def test_guesses_by_plain_wait_as_others_do() -> None:
    made = node()
    add(made.connect(), "ops")
    for number in range(FREE_MAX + 1):
        client = made.connect()
        client.client.binding = BINDING
        guess = client.send("auth", "plain", body=b"\0ops\0guess %d" % number)
        made.pump()
        assert (guess in client.received) is (number < FREE_MAX)
    _later(made, PAUSE_MS.first)
    assert client.received[guess].error == "unauthenticated"


def test_external_is_the_user_of_the_certificate() -> None:
    made = guarded()
    add(operator(made), "card", keys=None, certificate="DNS:card.example.org")
    client = made.connect()
    assert ask(client, b"", "external").error == "unauthenticated"
    shown = frozenset({"CN=somebody", "DNS:card.example.org"})
    client.client.certificates = shown
    assert ask(client, b"ops", "external").error == "unauthenticated"
    assert ask(client, b"", "external").code == 200
    assert client.client.user == "card"
    client = made.connect()
    client.client.certificates = shown
    assert ask(client, b"card", "external").code == 200


def test_certificate_that_is_two_users_is_nobody_s() -> None:
    made = guarded()
    for name, rule in (("card", "CN=card"), ("shop", "DNS:card.example.org")):
        add(operator(made), name, keys=None, certificate=rule)
    client = made.connect()
    client.client.certificates = frozenset({"CN=card", "DNS:card.example.org"})
    for wished in (b"", b"card", b"shop"):
        assert ask(client, wished, "external").error == "unauthenticated"


def _fail(made: Node, *, times: int) -> None:
    """Logins fail that are answered at once."""
    for number in range(times):
        answer = _logged_in(made.connect(), ScramAttempt("ops", "wrong", f"{number}"))
        assert answer.error == "unauthenticated"


def test_answers_to_failed_logins_wait_for_longer_each_time() -> None:
    made = node()
    add(made.connect(), "ops")
    _fail(made, times=FREE_MAX)
    client = made.connect()
    for pause_ms in (PAUSE_MS.first, 2 * PAUSE_MS.first):
        refused = client.send("auth", "external", body=b"")
        behind = client.send("ping")  # such as the next guess: it is not looked at before
        _later(made, pause_ms - 1)
        assert client.received == {}
        _later(made, 1)
        assert client.received.pop(refused).error == "unauthenticated"
        assert client.received.pop(behind).code == 200
    assert json.loads(operator(made).ask("stats", "json").body)["broker"]["logins_failed"] == FREE_MAX + 2


def _later(made: Node, time_ms: int) -> None:
    assert isinstance(made.clock, SimClock)
    made.clock.advance(time_ms / 1000)
    made.core.tick(made.clock.now_ms())
    made.pump()


def test_who_is_right_is_let_in_whatever_failed_before() -> None:
    """A removed user's service, or anybody at the same address, tries for ever."""
    made = node()
    add(made.connect(), "ops")
    add(operator(made), "card", keys=None, certificate="CN=card")
    _fail(made, times=FREE_MAX)
    stale = made.connect()
    stale.client.certificates = frozenset({"CN=gone"})
    for mechanism in ("external", "plain"):
        made.connect().send("auth", mechanism, body=b"\0ops\0wrong")
    stale.send("auth", "external", body=b"")
    client = made.connect()
    client.client.certificates = frozenset({"CN=card"})
    assert ask(client, b"", "external").code == 200
    assert _logged_in(made.connect(), ScramAttempt("ops", "pencil", "abc")).code == 200


def test_name_of_a_broker_spares_nobody_the_pause() -> None:
    made = node()
    add(made.connect(), "ops")
    for _ in range(FREE_MAX):
        _logged_in(made.connect(), ScramAttempt(peer_name(7), "guessed", "abc"))
    client, attempt = made.connect(), ScramAttempt(peer_name(7), "guessed", "abc")
    client.send("auth", "scram-sha-256", body=attempt.final(ask(client, attempt.first()).body.removesuffix(b"\n")))
    _later(made, PAUSE_MS.first - 1)
    assert client.received == {}
    _later(made, 1)
    assert [answer.error for answer in client.received.values()] == ["unauthenticated"]


def test_answer_waits_no_longer_than_the_connection_may_live() -> None:
    made = node(login_timeout_ms=200)
    add(made.connect(), "ops")
    _fail(made, times=FREE_MAX)
    client = made.connect()
    client.send("auth", "external", body=b"")
    _later(made, 99)
    assert client.received == {}
    _later(made, 1)
    assert [answer.error for answer in client.received.values()] == ["unauthenticated"]


def test_connection_that_is_lost_meanwhile_is_answered_nothing() -> None:
    made = node()
    add(made.connect(), "ops")
    _fail(made, times=FREE_MAX)
    client = made.connect()
    client.send("auth", "external", body=b"")
    client.disconnect()
    _later(made, PAUSE_MS.first)
    assert client.client.out == []


def test_without_users_there_is_nothing_to_log_in_to() -> None:
    client = node().connect()
    assert ask(client, b"", "external").error == "bad-request"
    assert ask(client, b"", "digest").error == "bad-request"


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


def test_many_puts_in_one_read_ask_for_a_user_each() -> None:
    made = guarded()
    client, content = made.connect(), batch(b"v")
    client.send_bytes(b"".join(b"put a 0 %d p%d\r\n%b" % (len(content), n, content) for n in range(5)))
    made.pump()
    assert [answer.error for answer in client.received.values()] == ["unauthenticated"] * 5
    assert values(made) == []


def test_a_removed_user_is_a_stranger_at_once() -> None:
    made = guarded()
    admin = operator(made)
    add(admin, "shop")
    client, attempt = made.connect(), ScramAttempt("shop", "pencil", "abc")
    assert _logged_in(client, attempt).code == 200
    assert admin.ask("acl", "grant", "shop", extensions={"may": "write", "topic": "a"}).code == 200
    assert put(client, b"v").code == 200
    assert client.ask("user", "list", "*", body=b"").error == "forbidden"
    assert admin.ask("user", "remove", "shop", body=b"").code == 200
    assert put(client, b"v").error == "unauthenticated"
