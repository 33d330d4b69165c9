"""Users of a lone broker: everybody logs in, a guest is removed in the middle, and strangers try.

The operator ends anonymity before anything else happens. Scripted clients log in by certificate (``external``), in one
request before the others; the real client and those who guess passwords do it by SCRAM. Resolvers have a user of
their own, that may settle for every database, and resume, ask and settle nothing else.

What must hold: U1, a removed user is served nothing, through crashes; U2, nobody is served without a login.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import scramp.core

from txmq.client.bootstrap import Bootstrap
from txmq.client.transport.reconnecting import Login
from txmq.protocol.scram import SALT_SIZE, ScramAttempt, keys_of

from .broker import Broker
from .client import Process, Steps
from .history import Shared
from .world import Violation

NAME: Final = "app"
SETTLER: Final = "settler"
PASSWORD: Final = "correct horse"
_GUEST: Final = "guest"
_STRANGER: Final = "10.9.9.9:1"  # its failed logins make nobody else wait


@contextmanager
def quick_passwords() -> Iterator[None]:
    """A password's hash is made once, and not some milliseconds at each of a hundred logins."""
    slow, made = scramp.core.hi, dict[tuple[bytes, bytes, int], Any]()

    def hi(hash_function: Any, password: bytes, salt: bytes, iterations: Any) -> Any:
        key = password, salt, int(iterations)
        if key not in made:
            made[key] = slow(hash_function, password, salt, iterations)
        return made[key]

    scramp.core.hi = hi
    try:
        yield
    finally:
        scramp.core.hi = slow


def settler(shared: Shared) -> str:
    """The user that resolvers log in as."""
    return SETTLER if shared.user else ""


def bootstrap(shared: Shared, user: str) -> Bootstrap:
    """How real clients find the broker, and log in."""
    login = Login(user, lambda: PASSWORD) if user else None
    return Bootstrap(lambda _timeout: list(shared.addresses), tls=shared.tls, login=login)


def stated(user: str, *, has_password: bool = True) -> bytes:
    """The body of a request that makes a user: a certificate, and the password of all."""
    keys = keys_of(PASSWORD, bytes(SALT_SIZE)).to_json() if has_password else None
    return json.dumps({"keys": keys, "certificate": f"CN={user}"}).encode()


def end_anonymity(process: Process, choose: Callable[[], Broker | None] = lambda: None) -> Steps:
    """Add the user that all log in as, and that of the resolvers; ``choose`` names the broker that is asked."""
    shared = process.shared
    while True:
        if process.link is not None or process.open_link(choose()):
            reply = yield from process.ask("user", "add", NAME, body=stated(NAME))
            if reply is not None and reply[0] in (200, 401):  # the latter: it was added, and the answer lost
                break
        yield 0.02
    yield from _known_everywhere(shared)
    shared.user = NAME
    if process.link is not None:
        process.link.cut()
    until = partial(_until, process, choose)
    yield from until("user", "add", SETTLER, {}, stated(SETTLER))
    yield from until("acl", "grant", SETTLER, {"may": "settle", "resource": "*"})
    yield from _known_everywhere(shared)


def _known_everywhere(shared: Shared) -> Steps:
    """Until no home knows more than another one. Nobody else changes users meanwhile."""
    while len(
        {None if broker.node is None else broker.node.state.principals.registry_version for broker in shared.brokers}
    ) > 1:  # fmt: skip
        yield 0.02


def _until(
    process: Process, choose: Callable[[], Broker | None], verb: str, action: str, user: str,
    words: dict[str, str | int | None], body: bytes | None = None,
) -> Steps:  # fmt: skip
    while True:
        if process.link is not None or process.open_link(choose()):
            reply = yield from process.ask(verb, action, user, extensions=words, body=body)
            if reply is not None and reply[0] in (200, 409):
                return
            if reply is not None and process.link is not None:  # such as that this home is not led yet
                process.link.cut()
        yield 0.02


def population(shared: Shared) -> None:
    """The processes that are there because there are users."""
    if shared.user:
        removed: list[bool] = []
        _Warden(shared, "u0", removed)
        _Guest(shared, "u1", removed)
        _Stranger(shared, "u2")


class _Warden(Process):
    """Adds the guest, and removes it."""

    def __init__(self, shared: Shared, name: str, removed: list[bool]) -> None:
        self._removed = removed
        super().__init__(shared, name)

    def main(self) -> Steps:
        """Until the guest is gone."""
        yield from self._until("add", stated(_GUEST, has_password=False), 409)
        yield self.world.rng.uniform(0.1, 0.8)
        yield from self._until("remove", b"", 404)
        self._removed.append(True)
        self.world.meet("a user was removed")

    def _until(self, action: str, body: bytes, done: int) -> Steps:
        while True:
            if self.link is not None or self.open_link():
                reply = yield from self.ask("user", action, _GUEST, body=body)
                if reply is not None and reply[0] in (200, done):
                    return
            yield 0.02


class _Guest(Process):
    """Asks and asks."""

    leaves_when_refused = False

    def __init__(self, shared: Shared, name: str, removed: list[bool]) -> None:
        self._removed = removed
        super().__init__(shared, name)

    def open_link(self, broker: Broker | None = None) -> bool:
        """As the guest."""
        return self.open_link_as(_GUEST, broker)

    def main(self) -> Steps:
        """Until the end of the world."""
        while not self.shared.stopping:
            yield self.world.rng.uniform(0.005, 0.05)
            if self.link is None and not self.open_link():
                continue
            is_removed = bool(self._removed)
            reply = yield from self.ask("stats", "*")
            if is_removed and reply is not None:
                if reply[0] == 200:
                    raise Violation("U1: a removed user was served")
                self.world.meet("a removed user was refused")


class _Stranger(Process):
    """Guesses passwords, and asks without."""

    def open_link(self, broker: Broker | None = None) -> bool:
        """Without a login."""
        is_open = self.open_link_as("", broker)
        if self.link is not None:
            self.link.client.address = _STRANGER
        return is_open

    def main(self) -> Steps:
        """Until the end of the world."""
        while not self.shared.stopping:
            yield self.world.rng.uniform(0.01, 0.1)
            if self.link is None and not self.open_link():
                continue
            attempt = ScramAttempt(NAME, "wrong", f"{self.world.rng.getrandbits(128):032x}")
            reply = yield from self.ask("auth", "scram-sha-256", body=attempt.first())
            if reply is not None and reply[0] == 200:
                yield from self.ask("auth", "scram-sha-256", body=attempt.final(reply[1].removesuffix(b"\n")))
            reply = yield from self.ask("stats", "*")
            if reply is not None:
                if reply[0] == 200:
                    raise Violation("U2: a stranger was served")
                self.world.meet("a stranger was refused")
