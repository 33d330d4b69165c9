"""Random histories of transactions of every kind over two homes: what was acknowledged stands before what began later.

Clients hold no locks, and die at every step. Homes die between the word that a transaction is committed and the place
of its messages. Resolvers ask a database that has committed for its markers, later.
"""

from __future__ import annotations

import pytest

from tools.images.homes import Cluster, HomeNode
from tools.images.requests import UUID
from tools.simulated.disk import SimDisk
from txmq.broker.verbs import ordered_commits

from ..support import values
from .test_branch_resolving_random import KEYS, History, Transaction, keys_of

LOCAL, XA, HALF, FOREIGN = "local", "xa", "half", "foreign"
RESOURCES = {"last resource": UUID, "another last resource": "f" * 32}
KINDS = (LOCAL, XA, HALF, FOREIGN, *RESOURCES)


class Attempt(Transaction):
    """One of any kind; ``is_decided`` when its client was told so, or the database has committed."""

    def __init__(self, number: int, keys: list[int], homes: list[int], kind: str) -> None:
        super().__init__(number, keys, homes, is_xa=kind == XA)
        self.kind = kind
        self.is_open = kind in RESOURCES or kind in (HALF, FOREIGN)


class MixedHistory(History):
    """One random history."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        made = [HomeNode(number, SimDisk(), self.clock) for number in (1, 2)]
        self.cluster, self.numbers = Cluster(*made), [home.identity.node for home in made]
        self.counters = dict.fromkeys(self.numbers, 0)
        self.attempts: list[Attempt] = []
        self.waited = 0
        self.is_over = False

    def transact(self) -> None:
        """A client goes as far as it comes."""
        keys = sorted(self.random.sample(range(KEYS), self.random.randint(1, 2)))
        homes = self.random.sample(self.numbers, self.random.choice((1, 2, 2)))
        made = Attempt(len(self.attempts), keys, homes, self.random.choice(KINDS))
        self.attempts.append(made)
        self.all.append(made)
        made.txids = {number: self.txid(number) for number in homes}
        last_step = self.random.choice((9, 9, 9, 0, 1, 2, 3))
        for step, number in enumerate(homes[1:] if made.kind not in RESOURCES else homes):
            if step == last_step or not self.prepare(made, number):
                return
        if last_step == 2 or not self._ends_well(made) or last_step == 3:
            return
        for number in homes if made.kind in RESOURCES else homes[1:]:
            self.session(number)[0].send("commit", made.txids[number], body=b"")

    def prepare(self, made: Transaction, number: int) -> bool:
        assert isinstance(made, Attempt)
        if made.kind not in RESOURCES:
            return super().prepare(made, number)
        words: dict[str, str | int | None] = {
            "resource": "db",
            "uuid": RESOURCES[made.kind],
            "table": "t",
            "deadline": 0,
        }
        if number != made.homes[0]:
            words["of"] = made.txids[made.homes[0]]
        client = self.session(number)[0]
        answer = client.ask("prepare", made.txids[number], "last-resource", extensions=words, body=made.parts())
        return answer.code == 200

    def _ends_well(self, made: Attempt) -> bool:
        if made.kind in RESOURCES:
            made.is_decided = True
        elif made.kind in (HALF, FOREIGN):
            made.is_decided = self._decide_later(made)
        else:
            made.is_decided = self.decide(made)
        return made.is_decided

    def _decide_later(self, made: Attempt) -> bool:
        decider, *others = made.homes
        words: dict[str, str | int | None] = {"group": "g"} if made.kind == HALF else {"xid": f"1.{made.number:08x}.00"}
        words["deadline"] = 0
        if others:
            words["homes"] = ",".join(made.txids[n] for n in others)
        client, txid = self.session(decider)[0], made.txids[decider]
        if client.ask("prepare", txid, made.kind, extensions=words, body=made.parts()).code != 200:
            return False
        if self.random.random() < 0.2:
            return False  # the client dies; an operator rolls it back
        answer = client.ask("commit", txid, body=b"")
        self.waited += b" - " in answer.body
        return answer.code == 200

    def complete(self) -> None:
        """Resolvers see to what is open, some of it; at the end to all."""
        super().complete()
        for made in self.attempts:
            if made.is_open and (self.is_over or self.random.random() < 0.3):
                self._resolve(made)

    def _resolve(self, made: Attempt) -> None:
        made.is_open = made.is_decided
        verb = "commit" if made.is_decided else "rollback"
        for number in made.homes if made.kind in RESOURCES else made.homes[:1]:
            self.home(number).connect().send(verb, made.txids[number], body=b"" if made.is_decided else None)
            self.home(number).pump()

    def run(self) -> None:
        super().run()
        self.is_over = True
        for _ in range(4):
            self.complete()
            self.cluster.later(20)

    def check(self) -> None:
        for home in self.cluster.homes.values():
            assert (len(home.state.prepared), home.state.order.in_common, home.state.branch_parts.unreported) == (
                0,
                0,
                {},
            )
        for number in self.numbers:
            for made in self.attempts:
                found = sum(values(self.home(number), "a", p).count(made.value) for p in (0, 1))
                assert found in ({0, len(made.keys)} if number in made.homes else {0}), f"P2: {made.value!r}"
                assert found or number not in made.homes or not made.is_decided, (
                    f"P1: {made.kind} {made.value!r} is lost"
                )
            for key in range(KEYS):
                self._check_order(number, key)

    def _check_order(self, number: int, key: int) -> None:
        mine = [v for v in values(self.home(number), "a", key % 2) if str(key).encode() in keys_of(v)]
        highest = -1
        for made in (self.attempts[int(value.partition(b":")[0])] for value in mine):
            if made.is_decided:
                assert made.number >= highest, f"order of key {key} at {number}: {made.number} ({made.kind}) in {mine}"
            highest = max(highest, made.number)


@pytest.mark.parametrize("seed", range(40))
def test_what_was_acknowledged_stays_in_front(seed: int) -> None:
    history = MixedHistory(seed)
    history.run()
    history.check()


def test_decision_that_overtakes_an_open_part_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered_commits, "must_queue", lambda *_: False)
    with pytest.raises(AssertionError, match="order of key"):
        test_what_was_acknowledged_stays_in_front(29)


def test_histories_have_every_kind_behind_another_that_waits() -> None:
    histories = [MixedHistory(seed) for seed in range(12)]
    for history in histories:
        history.run()
    assert {made.kind for history in histories for made in history.attempts if made.is_decided} == set(KINDS)
    assert sum(history.waited for history in histories) > 3
