"""Random histories of transactions over three homes: clients fall silent, homes die and are away, keys are fought for.

A key is locked, as rows are, from before the first prepare until the decision is known: so at each home the messages of
a key stand in the order in which the locks were taken.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tools.images.homes import Cluster, HomeNode
from tools.images.node import Client
from tools.images.requests import UUID, batch, part
from tools.simulated.clock import SimClock
from tools.simulated.disk import SimDisk
from txmq.protocol.transaction_bodies import encode_branch

from ..support import values

DETAILS = {"bqual": "b", "connection": 7, "wrote": True, "marker": True, "table": "t"}
HOMES, KEYS, STEPS = 3, 4, 60


class Transaction:
    """One, as far as its client got."""

    def __init__(self, number: int, keys: list[int], homes: list[int], *, is_xa: bool) -> None:
        self.number, self.keys, self.homes, self.is_xa = number, keys, homes, is_xa
        self.txids: dict[int, str] = {}
        self.is_decided = False

    @property
    def value(self) -> bytes:
        return b"%d:%s" % (self.number, ",".join(map(str, self.keys)).encode())

    def parts(self) -> bytes:
        """One message a key, in a partition that goes by the key."""
        return b"".join(part("a", key % 2, batch(self.value), str(key)) for key in self.keys)


class History:
    """One random history."""

    def __init__(self, seed: int) -> None:
        self.random, self.clock = random.Random(seed), SimClock()
        made = [HomeNode(number, SimDisk(), self.clock) for number in range(1, HOMES + 1)]
        self.cluster, self.numbers = Cluster(*made), [home.identity.node for home in made]
        self.sessions: dict[int, tuple[Client, int]] = {}
        self.locked: set[int] = set()
        self.all: list[Transaction] = []
        self.counters = dict.fromkeys(self.numbers, 0)

    def home(self, number: int) -> HomeNode:
        return self.cluster.homes[number]

    def session(self, number: int) -> tuple[Client, int]:
        """The clients' one session at a home."""
        if number not in self.sessions:
            home = self.home(number)
            client, known = home.connect(), next(iter(home.state.sessions), 0)
            assert client.hello(f"{known:x}.0" if known else "new").code == 200
            self.sessions[number] = client, next(iter(home.state.sessions))
        return self.sessions[number]

    def txid(self, number: int) -> str:
        self.counters[number] += 1
        return self.home(number).txid(self.session(number)[1], self.counters[number])

    # --- what happens ------------------------------------------------------------------------------------------------

    def transact(self) -> None:
        """A client goes as far as it comes."""
        free = [key for key in range(KEYS) if key not in self.locked]
        if not free:
            return
        keys = sorted(self.random.sample(free, self.random.randint(1, min(2, len(free)))))
        homes = self.random.sample(self.numbers, self.random.choice((1, 2, 2, 3)))
        made = Transaction(len(self.all), keys, homes, is_xa=self.random.random() < 0.3)
        self.all.append(made)
        self.locked.update(keys)
        silent_at = self.random.choice((None, None, None, *range(len(homes) + 1)))
        made.txids = {number: self.txid(number) for number in homes}
        for step, number in enumerate(homes[1:]):
            if step == silent_at or not self.prepare(made, number):
                return
        if silent_at == len(homes) - 1:
            return
        if self.decide(made):
            made.is_decided = True
            self.locked.difference_update(keys)
            if silent_at is None:
                for number in homes[1:]:
                    self.session(number)[0].send("commit", made.txids[number], body=b"")

    def prepare(self, made: Transaction, number: int) -> bool:
        words: dict[str, str | int | None] = {"of": made.txids[made.homes[0]]}
        words |= {"deadline": self.clock.now_ms() + 5000} | ({"held": None} if made.is_xa else {})
        client = self.session(number)[0]
        return client.ask("prepare", made.txids[number], "branch", extensions=words, body=made.parts()).code == 200

    def decide(self, made: Transaction) -> bool:
        decider, *others = made.homes
        words: dict[str, str | int | None] = {"homes": ",".join(made.txids[n] for n in others)} if others else {}
        client, body = self.session(decider)[0], made.parts()
        if not made.is_xa:
            return client.ask("commit", made.txids[decider], extensions=words, body=body).code == 200
        body = encode_branch("db", UUID, DETAILS) + body
        return client.ask("decide", made.txids[decider], extensions={**words, "branches": 1}, body=body).code == 200

    def complete(self) -> None:
        """The database of an XA transaction has committed."""
        for made in self.all:
            if made.is_xa and made.is_decided and self.random.random() < 0.5:
                txid = made.txids[made.homes[0]]
                self.home(made.homes[0]).connect().ask("complete", txid, extensions={"uuid": UUID})

    def die(self) -> None:
        """A home dies in the middle of what it does, and comes back."""
        number = self.random.choice(self.numbers)
        home = self.home(number)
        home.run_steps(self.random.randint(0, 4))
        self.sessions.pop(number, None)
        self.cluster.restart(home, checkpoint=self.random.random() < 0.3)

    def part_ways(self) -> None:
        """A home cannot be reached by the others; or all can be again."""
        self.cluster.away ^= {self.random.choice(self.numbers)}

    def fall_silent(self) -> None:
        """The clients' connections to a home are lost."""
        number = self.random.choice(self.numbers)
        if number in self.sessions:
            self.sessions.pop(number)[0].disconnect()

    def later(self) -> None:
        self.cluster.later(self.random.choice((0.25, 1, 3)))

    def run(self) -> None:
        choices: list[Callable[[], None]] = [self.transact] * 8 + [self.later] * 3 + [self.complete, self.die]
        choices += [self.part_ways, self.fall_silent, self.cluster.pump]
        for _ in range(STEPS):
            self.random.choice(choices)()
        self.cluster.away.clear()
        self.sessions.clear()
        for number in self.numbers:
            self.cluster.restart(self.home(number))
        for _ in range(4):
            self.cluster.later(20)
            self.complete()

    # --- what must hold ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        for home in self.cluster.homes.values():
            undone = {name: d.homes for name, d in home.state.decisions.incomplete.items() if not d.has_rows_to_come}
            assert (undone, len(home.state.prepared), home.state.branch_parts.unreported) == ({}, 0, {})
        seen = {n: [value for p in (0, 1) for value in values(self.home(n), "a", p)] for n in self.numbers}
        for made in self.all:
            counts = {seen[number].count(made.value) for number in made.homes}
            assert counts in ({0}, {len(made.keys)}), f"P2: {made.value!r} at {made.homes}: {counts}"
            assert counts != {0} or not made.is_decided, f"P1: {made.value!r} is lost"
            assert not any(seen[number].count(made.value) for number in set(self.numbers) - set(made.homes))
        for number in self.numbers:
            for key in range(KEYS):
                mine = [v for v in values(self.home(number), "a", key % 2) if str(key).encode() in keys_of(v)]
                order = [int(value.partition(b":")[0]) for value in mine]
                assert order == sorted(order), f"order of key {key} at {number}: {order}"


def keys_of(value: bytes) -> list[bytes]:
    """The keys of a message, as its value states them."""
    return value.partition(b":")[2].split(b",")


@pytest.mark.parametrize("seed", range(25))
def test_transactions_over_homes_are_whole_and_in_order(seed: int) -> None:
    history = History(seed)
    history.run()
    history.check()
