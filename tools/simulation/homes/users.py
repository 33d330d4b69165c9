"""Users of several homes: a guest is added, may write, may no more, is removed and made anew, at any home.

Theory of operation. The founder ends anonymity; everybody logs in from then on, the real clients by SCRAM, and homes
at each other by their secret. A warden changes what the guest is: its grant, its certificate, whether there is one; now
and then a home ends, or stands still, while it does. Guests, who know all certificates that there ever were, put to all
homes. Some of them knock at a home that begins, or goes on: theirs are the first requests. Some log in, and sleep until
there is another guest of that name. A stranger does not log in.

A home *hears* of the registry while its process runs, its session is connected and ZooKeeper answers. It may be cut off
and go on with what it knows (``docs/how-to/secure.md``): what must hold begins ``REACHES_S`` after it hears again. The
home that answered the change must know at once, and so must homes that were away: one that began after it, and one that
stood still for ``STILL_S`` and went on after it.

    U1  after a removal, or a revocation, that was answered, the guest is served nothing; nor is a connection of a user
        who was removed when there is another one of the name
    U2  nobody is served without a login
    U3  after a change of the certificate the former one logs in nowhere
    U4  no message of a request that was refused is there (checked as P6)
"""

from __future__ import annotations

from collections.abc import Sequence

from tools.simulation.broker import Broker
from tools.simulation.client import Process, Steps, encoded_batch
from tools.simulation.history import Put, Shared
from tools.simulation.users import stated
from tools.simulation.world import Violation
from txmq.broker.verbs.access.authorizer import STILL_MS_MAX

from .ensemble import SESSION_TIMEOUT_S
from .home import Home

REACHES_S = 1.0  # docs/how-to/secure.md: "reaches connections at the other homes within a second"
STILL_S = STILL_MS_MAX / 1000 + 0.1  # a home that stood still for so long has noticed: it ticks every 0.05 s
_LOOK_S = 0.01
_KNOWN_LOOKS_MAX = 60
_AWAY_S_MAX = 1.5
_KNOCK_S = 0.002
_KNOCKED_S = 0.05  # in which a home has taken in the first requests
_PAUSES_S_MAX = (0.3, 0.3, 1.6)  # of the warden; the last is longer than a change takes to reach a home
_GUEST = "guest"
_SERVED = (200, 404, 409)  # it was let through, whatever came of it
_REFUSED = (401, 403)


class Standing:
    """What is known of the guest; told by the warden.

    Attributes:
        refused_since: when it was answered that the guest may nothing; None: it may be that it may.
        is_granted: it was answered that it may write, and nothing was asked that ends it.
        certificate: the number of its newest one.
        changed_at: when it was answered that this one counts; None: it may be that the former does.
        removed_at: when it was last answered that there is none.
        told_by: by moments, the home that answered then.
        is_over: nothing changes any more.
    """

    def __init__(self) -> None:
        self.refused_since: float | None = None
        self.changed_at: float | None = None
        self.removed_at: float | None = None
        self.told_by: dict[float, str] = {}
        self.certificate = 0
        self.is_granted = False
        self.is_over = False


class Hearing:
    """Since when each home hears of the registry; looked at again and again."""

    def __init__(self, shared: Shared, homes: Sequence[Home], standing: Standing) -> None:
        self._world, self.homes, self._standing = shared.world, homes, standing
        self._since = {home.name: self._world.now for home in homes}
        self._look()

    def _look(self) -> None:
        for home in self.homes:
            if not home.hears:
                self._since[home.name] = self._world.now
        self._world.after(_LOOK_S, self._look)

    def knows(self, home: Home, changed_at: float, at: float) -> str:
        """Why a home must know what was answered when it takes in a request of a later moment; empty: it need not."""
        if home.opened_at > changed_at:
            return "began since"
        if self._standing.told_by.get(changed_at) == home.name:
            return "was asked"
        stood, went_on = home.stood_still
        if at >= stood and went_on > changed_at and went_on - stood >= STILL_S:
            return "stood still until then"
        return "hears" if at > max(changed_at, self._since[home.name]) + REACHES_S else ""


def population(shared: Shared, homes: Sequence[Home]) -> list[Process]:
    """The processes that are there because there are users, and that end."""
    if not shared.user:
        return []
    standing = Standing()
    hearing = Hearing(shared, homes, standing)
    _Stranger(shared, "x0", hearing)
    for number, home in enumerate(homes):
        _Knocker(shared, f"x{10 + number}", standing, hearing, home)
        _Sleeper(shared, f"x{20 + number}", standing, hearing, home)
    return [_Warden(shared, "x1", standing, homes), *(_Guest(shared, f"x{n}", standing, hearing) for n in (2, 3))]


class _Warden(Process):
    """Changes what the guest is; in the end there is none."""

    def __init__(self, shared: Shared, name: str, standing: Standing, homes: Sequence[Home]) -> None:
        self._standing, self._homes, self._asked = standing, homes, homes[0]
        super().__init__(shared, name)

    def main(self) -> Steps:
        """Rounds, until the world stops; the last one when nothing else happens: no other news has a home look."""
        rng, standing = self.world.rng, self._standing
        is_last = False
        while not is_last:
            is_last = self.shared.stopping
            standing.refused_since = standing.changed_at = None
            standing.certificate += 1
            yield from self._until("user", "add", body=_stated(standing.certificate), done=409)
            yield from self._until("acl", "grant", words={"may": "write", "topic": "*"})
            standing.is_granted = True
            yield rng.uniform(0.05, 0.3)
            if rng.random() < 0.4:
                standing.certificate += 1
                yield from self._until("user", "passwd", body=_stated(standing.certificate))
                standing.changed_at = self._told()
                yield self._pause_s()
            comes_back = rng.random() < 0.7  # before there is another guest
            away = rng.choice(self._homes)
            if not self.shared.stopping:
                yield from self._known_everywhere()
                self._send_away(away)
            standing.is_granted = False
            if rng.random() < 0.3:
                yield from self._until("acl", "revoke", words={"may": "write", "topic": "*"})
                yield from self._refused("a grant was revoked")
            yield from self._until("user", "remove", body=b"", done=404)
            standing.removed_at = self._told()
            yield from self._refused("a user was removed")
            while away.is_away and comes_back:
                yield _KNOCK_S
            yield _KNOCKED_S
        standing.is_over = True

    def _send_away(self, home: Home) -> None:
        """It is down, or stands still, or hears nothing, while the guest loses what it may."""
        draw = self.world.rng.random()
        if draw < 0.4:
            home.end(self.world.rng.uniform(0.1, _AWAY_S_MAX))
        elif draw < 0.8:
            home.pause(self.world.rng.uniform(STILL_S, _AWAY_S_MAX))
        else:
            home.cut_off(self.world.rng.uniform(0.1, SESSION_TIMEOUT_S))

    def _known_everywhere(self) -> Steps:
        """Wait a while, until no home knows more than another one: what it does not know it need not forget."""
        for _ in range(_KNOWN_LOOKS_MAX):
            nodes = [home.node for home in self._homes]
            if len({None if node is None else node.state.principals.registry_version for node in nodes}) == 1:
                return
            yield _LOOK_S

    def _pause_s(self) -> float:
        return self.world.rng.uniform(0.05, self.world.rng.choice(_PAUSES_S_MAX))

    def _told(self) -> float:
        """Now: when a home has answered."""
        self._standing.told_by[self.world.now] = self._asked.name
        return self.world.now

    def _refused(self, situation: str) -> Steps:
        if self._standing.refused_since is None:
            self._standing.refused_since = self._told()
        self.world.meet(situation)
        yield self._pause_s()

    def _until(
        self, verb: str, action: str, *, body: bytes | None = None, words: dict[str, str | int | None] | None = None,
        done: int = 200,
    ) -> Steps:  # fmt: skip
        """Ask any home until one has answered that it is so."""
        while True:
            if self.link is None or self.link.is_lost:
                self.link = None
                self._asked = self.world.rng.choice([one for one in self._homes if not one.is_away] or self._homes)
                self.open_link(self._asked)
            if self.link is not None:
                reply = yield from self.ask(verb, action, _GUEST, body=body, extensions=words)
                if reply is not None and reply[0] in (200, done):
                    return
                if self.link is not None:
                    self.link.cut()
            yield 0.02


class _Guest(Process):
    """Puts to all homes, by all certificates that it ever had."""

    leaves_when_refused = False

    def __init__(self, shared: Shared, name: str, standing: Standing, hearing: Hearing) -> None:
        self._standing, self._hearing = standing, hearing
        self._open: tuple[Home, int, float] | None = None  # which home, by which certificate, since when
        self._number = self._links = 0
        self._refused_by: set[str] = set()  # in the end
        super().__init__(shared, name)

    def main(self) -> Steps:
        """Until every home has refused the user who is no more."""
        rng = self.world.rng
        while len(self._refused_by) < len(self._hearing.homes):
            yield rng.uniform(0.005, 0.05)
            if self.link is None or self.link.is_lost or rng.random() < 0.1:
                number = max(self._standing.certificate - (rng.random() < 0.3), 1)
                self._connect(rng.choice(self._hearing.homes), number)
            if self.link is not None and self._open is not None:
                yield from self._put(*self._open)

    def _connect(self, home: Home, number: int) -> None:
        if self.link is not None:
            self.link.cut()
        self.link, self._open = None, (home, number, self.world.now)
        self._links += 1
        self.open_link_as(_certificate(number), home)
        if self.link is not None:  # its failed logins make nobody else wait, nor itself
            self.link.client.address = f"10.{self.name[1:]}.{self._links >> 8}.{self._links & 255}:1"

    def _put(self, home: Home, number: int, opened_at: float) -> Steps:
        standing, at, is_over = self._standing, self.world.now, self._standing.is_over
        refused_since, removed_at = standing.refused_since, standing.removed_at
        if removed_at is not None and opened_at < removed_at:  # it was the former guest's connection
            refused_since = removed_at if refused_since is None else min(refused_since, removed_at)
        is_former = number < standing.certificate
        changed_at = standing.changed_at if is_former and standing.changed_at is not None else None
        self._number += 1
        put = new_put(self, self._number)
        reply = yield from self.ask("put", *put.place, body=encoded_batch(put.values, self.world.clock.now_ms()))
        if reply is None:
            return
        if reply[0] in _SERVED:
            put.told = int(reply[1]) if reply[0] == 200 else "not stored"
            self._served(home, refused_since, at, "U1: a guest who may nothing")
            self._served(home, changed_at, opened_at, "U3: a former certificate")
        elif reply[0] in _REFUSED:
            put.told = "not stored"
            self._met(home, refused_since, changed_at, at)
            if is_over:
                self._refused_by.add(home.name)

    def _served(self, home: Home, since: float | None, at: float, who: str) -> None:
        reason = "" if since is None or since > at else self._hearing.knows(home, since, at)
        if reason:
            raise Violation(f"{who} was served by {home.name}, which {reason}: {at - (since or 0.0):.3f} s behind it")

    def _met(self, home: Home, refused_since: float | None, changed_at: float | None, at: float) -> None:
        if refused_since is None:
            if changed_at is not None:
                self.world.meet("a former certificate was refused")
            return
        self.world.meet("a removed user was refused")
        reason = self._hearing.knows(home, refused_since, at)
        if reason == "began since":
            self.world.meet("a home that began behind a removal refused")
        elif reason == "stood still until then":
            self.world.meet("a home that stood still during a removal refused")


class _AtOneHome(_Guest):
    def __init__(self, shared: Shared, name: str, standing: Standing, hearing: Hearing, home: Home) -> None:
        self._home = home
        super().__init__(shared, name, standing, hearing)


class _Knocker(_AtOneHome):
    """Waits at one home's door: the first request of a home that begins to serve, or goes on, is its own."""

    def main(self) -> Steps:
        """Until the end of the world."""
        home = self._home
        while not self.shared.stopping:
            yield _KNOCK_S
            was_away = home.is_away
            while was_away:
                yield _KNOCK_S
                while not home.is_serving:
                    yield _KNOCK_S
                was_away = home.is_away
                self._connect(home, self._standing.certificate)
                if self.link is not None and self._open is not None:
                    yield from self._put(*self._open)


class _Sleeper(_AtOneHome):
    """Logs in, and asks nothing more until there is another guest of that name."""

    def main(self) -> Steps:
        """Until the end of the world."""
        home, standing = self._home, self._standing
        while not self.shared.stopping:
            yield _LOOK_S
            if not standing.is_granted or home.is_away:
                continue
            self._connect(home, standing.certificate)
            if self.link is None or self._open is None:
                continue
            yield from self._put(*self._open)
            while not self._is_anothers(self._open[2]) and not self.shared.stopping:
                yield _LOOK_S
            while standing.is_granted and self.link is not None:
                yield _LOOK_S
                yield from self._put(*self._open)

    def _is_anothers(self, opened_at: float) -> bool:
        """Whether the name is another guest's by now; or the connection is lost."""
        removed_at = self._standing.removed_at
        is_another = removed_at is not None and removed_at > opened_at and self._standing.is_granted
        return is_another or self.link is None or self.link.is_lost


class _Stranger(Process):
    """Puts without a login."""

    def __init__(self, shared: Shared, name: str, hearing: Hearing) -> None:
        self._homes, self._number = hearing.homes, 0
        super().__init__(shared, name)

    def open_link(self, broker: Broker | None = None) -> bool:
        """Without a login."""
        return self.open_link_as("", broker)

    def main(self) -> Steps:
        """Until the end of the world."""
        while not self.shared.stopping:
            yield self.world.rng.uniform(0.01, 0.1)
            if self.link is None or self.link.is_lost or self.world.rng.random() < 0.2:
                self.open_link(self.world.rng.choice(self._homes))
            if self.link is None:
                continue
            self._number += 1
            put = new_put(self, self._number)
            reply = yield from self.ask("put", *put.place, body=encoded_batch(put.values, self.world.clock.now_ms()))
            if reply is not None:
                if reply[0] in _SERVED:
                    raise Violation(f"U2: a stranger was served: {reply}")
                put.told = "not stored"
                self.world.meet("a stranger was refused")


def new_put(process: Process, number: int) -> Put:
    """One that is tried next, of one message, to any partition of the programs' topics."""
    history = process.shared.history
    topic = process.world.rng.choice(sorted(history.topics))
    place = topic, process.world.rng.randrange(history.topics[topic])
    put = Put(place, (b"%b-%06d" % (process.name.encode(), number),))
    history.puts.append(put)
    return put


def _certificate(number: int) -> str:
    return f"{_GUEST}.{number}"


def _stated(number: int) -> bytes:
    return stated(_certificate(number), has_password=False)
