"""Users of several homes, and TLS: each safeguard that is taken away is caught by a few seeds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import pytest

from tests.simulation.caught import seed_that_catches
from tools.simulated.zookeeper import SimSession
from tools.simulation.__main__ import World, digest_elsewhere
from tools.simulation.homes.run import HOMES, simulate_homes
from tools.simulation.run import simulate
from txmq.broker import core
from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.broker.shell.cluster_membership import RegistrySessionLoop, _Read
from txmq.broker.state import principals
from txmq.broker.state.principals import Permissions, User
from txmq.broker.verbs import registry_events
from txmq.broker.verbs.access import access_changes, auth, authorizer
from txmq.errors import OverloadedError
from txmq.registry.cluster_metadata import Access
from txmq.runtime.tls import TlsStream

SEEDS = (7, 8, 2, 4, 6, *range(9, 20))  # those that find most of it come first
REMOVED_ONES = (14, *range(21, 101))  # rare: a removed guest keeps a connection until there is another one
BUSY = range(1, 4)
BY_TLS = 1  # the seed of a world that has it, of either kind


def _caught(finding: str, *, first: int, then: Iterable[int] = SEEDS) -> None:
    seed_that_catches(partial(simulate_homes, users=True), finding, first=[first], then=then)


def test_home_that_was_down_and_compares_no_users_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """What came with the registry's word that it leads is left out; it is told of changes from then on."""
    access_changed = registry_events.access_changed

    def only_later(context: Context, access: Access | None, *, is_anew: bool = False) -> None:
        if not is_anew:
            access_changed(context, access)

    monkeypatch.setattr(registry_events, "access_changed", only_later)
    _caught("which began since", first=6)


def test_home_that_stood_still_and_asks_nobody_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authorizer, "doubt_users", lambda _context: False)
    _caught("which stood still until then", first=8)


def test_new_user_on_the_removed_ones_connection_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    user = principals._user

    def nameless(name: str, record: Mapping[str, Any]) -> User:
        return user(name, {**record, "made": 0})

    monkeypatch.setattr(principals, "_user", nameless)
    _caught("U1", first=24, then=REMOVED_ONES)


def test_permissions_that_outlive_a_revocation_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(context: Context, client: ClientConnection) -> Permissions | None:
        known, principals = client.permissions, context.state.principals
        if known is not None and known.user != client.user:
            known = client.permissions = Permissions(principals.speaker(client.user), principals.version)
        return known

    monkeypatch.setattr(authorizer, "permissions_of", kept)
    _caught("U1", first=2)


def test_connections_that_a_removed_user_keeps_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is another user of that name later, and the connection speaks for him."""
    monkeypatch.setattr(access_changes, "log_out", lambda _context, _user: None)
    _caught("U1", first=8)


def test_home_without_a_watch_on_users_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = RegistrySessionLoop._listener

    def deaf(worker: RegistrySessionLoop, what: _Read) -> Callable[[], None] | None:
        return None if what is _Read.ACCESS else listener(worker, what)

    monkeypatch.setattr(RegistrySessionLoop, "_listener", deaf)
    _caught("which hears", first=8)


def test_registry_that_is_read_without_a_sync_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a server shows that lags behind may be topics, or users."""
    monkeypatch.setattr(SimSession, "sync", lambda _session, _path: None)
    _caught("R1|U1", first=2)


def test_certificate_that_goes_on_behind_its_change_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    external = auth._external

    def any_of_the_guests(context: Context, client: ClientConnection, wished: str) -> None:
        newest = {user.certificate for user in context.state.principals.users.values() if user.name == "guest"}
        if any(name.startswith("CN=guest.") for name in client.certificates):
            client.certificates |= {name for name in newest if name}
        external(context, client, wished)

    monkeypatch.setattr(auth, "_external", any_of_the_guests)
    _caught("U3", first=7)


def test_stranger_who_is_asked_for_nothing_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "of_nobody", lambda: None)
    monkeypatch.setattr(access_changes, "strangers_from_now_on", lambda _context: None)
    _caught("U2", first=7)


def test_scripted_clients_whose_logins_are_refused_connect_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """They did not, once, and their world ended in doubt; guests go on asking, as nobody."""
    external, logins = auth._external, itertools.count()

    def busy(context: Context, client: ClientConnection, wished: str) -> None:
        if next(logins) % 3:
            raise OverloadedError("auth: try again in 1 ms")
        external(context, client, wished)

    monkeypatch.setattr(auth, "_external", busy)
    assert [simulate(seed, users=True).error for seed in BUSY] == [None] * len(BUSY)


def test_stream_that_drops_the_rest_of_a_record_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(stream: TlsStream) -> bool:
        stream._tcp.send((stream._unsent,))
        stream._unsent = memoryview(b"")
        return True

    monkeypatch.setattr(TlsStream, "_is_sent", forgetful)
    seed_that_catches(partial(simulate, users=True), "TLS", first=[1], then=range(1, 21))


@pytest.mark.parametrize("world", [World(has_users=True), World(HOMES, has_users=True)])
def test_random_bytes_of_records_are_not_in_the_trace(world: World) -> None:
    play: Callable[[int], Any] = world.play
    here = play(BY_TLS)
    assert "a handshake was completed" in here.met
    assert digest_elsewhere(BY_TLS, "1", world) == here.digest
