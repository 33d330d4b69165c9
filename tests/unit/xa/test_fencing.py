"""Drawings on a model: resolvers stop anywhere, answers are lost, the database is copied, the broker restored."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from txmq.xa.database.marker_table import TokenRow
from txmq.xa.fencing import TRANSITIONS, Drawing, Step

SEEDS, STEPS = range(120), 120
_EMPTY = TokenRow()


class Database:
    """A database, or a copy of one: its row, and the history of what was written."""

    def __init__(self, row: TokenRow = _EMPTY, history: tuple[str, ...] = ()) -> None:
        self.row, self.history = row, history

    def copy(self) -> Database:
        """As it is now."""
        return Database(self.row, self.history)


class Resolver:
    """A process that rolls one transaction back, again and again."""

    def __init__(self, world: World, database: Database, number: int) -> None:
        self.world, self.database, self.number, self.rolled_back = world, database, number, 0
        self.begin()

    def begin(self) -> None:
        """Anew, as after a death: a marker, then a drawing."""
        self.rolled_back += 1
        self.marker, self.drawing = f"rolled back {self.number}.{self.rolled_back}", Drawing()
        self.database.history += (self.marker,)

    def step(self) -> None:
        """One step, whose answer may be lost."""
        world, drawing, database = self.world, self.drawing, self.database
        match drawing.step:
            case Step.READ:
                drawing.read(database.row)
            case Step.SETTLE | Step.TELL:
                is_accepted = world.told(drawing.row)
                if is_accepted and drawing.step is Step.TELL:
                    world.held(self)
                if world.chance.random() < 0.1:
                    world.late.append(drawing.row)  # sent once more, and on its way for long
                    self.begin()
                else:
                    drawing.answered(is_accepted=is_accepted)
            case Step.DRAW:
                is_in, row = database.row == drawing.row, drawing.next_row(world.token())
                if is_in:
                    database.row = row
                    database.history += (row.drawn,)
                drawing.drawn(row, is_in=is_in)
            case Step.HELD | Step.STRANGE:
                if drawing.step is Step.STRANGE:
                    world.strange.append(database)
                self.begin()
        if world.chance.random() < 0.03:
            self.begin()


class World:
    """A broker, databases, resolvers.

    Attributes:
        proved: the markers that were taken for a proof.
        going_on: the database of each proof; not those whose token the copy has, too.
    """

    def __init__(self, seed: int) -> None:
        self.chance, self.newest, self._tokens = random.Random(seed), "", 0
        self.database, self.late, self.strange = Database(), list[TokenRow](), list[Database]()
        self.proved, self.going_on, self.shared = set[str](), list[Database](), set[str]()
        self.resolvers = [Resolver(self, self.database, number) for number in range(3)]

    def token(self) -> str:
        """One that nobody has drawn."""
        self._tokens += 1
        return f"token {self._tokens}"

    def told(self, row: TokenRow) -> bool:
        """The broker's part."""
        if self.newest not in (row.drawn, row.accepted):
            return False
        self.newest = row.drawn
        return True

    def held(self, resolver: Resolver) -> None:
        """A proof: whatever was proved before stands in this database, too."""
        missing = self.proved - set(resolver.database.history)
        assert not missing, f"{sorted(missing)} were proved, and may be committed in the database that goes on"
        self.proved.add(resolver.marker)
        if resolver.drawing.row.drawn not in self.shared:
            self.going_on.append(resolver.database)

    def run(self, steps: int = STEPS) -> None:
        """Some steps of somebody, now and then a request that was on its way for long."""
        for _ in range(steps):
            self.chance.choice(self.resolvers).step()
            if self.late and self.chance.random() < 0.1:
                self.told(self.late.pop(self.chance.randrange(len(self.late))))

    def lead_to(self, copy: Database) -> None:
        """Another resolver works in a copy."""
        self.resolvers.append(Resolver(self, copy, len(self.resolvers)))


def test_every_step_of_a_drawing_can_be_reached() -> None:
    assert {Step.READ, *TRANSITIONS.values()} == set(Step)


def test_nobody_is_refused_in_a_database_without_copies() -> None:
    for seed in SEEDS:
        world = World(seed)
        world.run()
        assert (world.strange, len(world.proved) > 3) == ([], True), seed


def _histories() -> Iterator[tuple[World, Database]]:
    for seed in SEEDS:
        world = World(seed)
        world.run(world.chance.randrange(STEPS))
        copy = world.database.copy()
        world.going_on, world.shared = [], set(copy.history)
        world.run(world.chance.randrange(10))
        world.lead_to(copy)
        yield world, copy


def test_of_a_database_and_its_copy_one_goes_on() -> None:
    went_on = set[bool]()
    for world, copy in _histories():
        world.run(4 * STEPS)
        assert len({id(one) for one in world.going_on}) == 1, "one goes on, and nobody else"
        loser = world.database if copy in world.going_on else copy
        assert loser in world.strange, "who is told"
        went_on.add(loser is copy)
    assert went_on == {True, False}, "whichever resolves first"


def test_copy_is_refused_once_the_original_has_drawn() -> None:
    for seed in SEEDS:
        world = World(seed)
        world.run()
        copy, before = world.database.copy(), len(world.going_on)
        while len(world.going_on) < before + len(world.resolvers):  # each has begun a drawing after the copy
            world.run(1)
        world.lead_to(copy)
        world.run(4 * STEPS)
        assert copy not in world.going_on, seed
        assert set(world.strange) == {copy}, seed


def test_clean_fail_over_goes_on_without_a_word() -> None:
    for seed in SEEDS:
        world = World(seed)
        world.run()
        replica = world.database.copy()
        for resolver in world.resolvers:
            resolver.database = replica
        world.run()
        assert world.strange == [], seed
        assert replica in world.going_on, seed


def test_older_broker_proves_nothing_until_it_is_told() -> None:
    for seed in SEEDS:
        world = World(seed)
        world.run()
        restored, before = world.newest, len(world.going_on)
        while len(world.going_on) < before + 2 * len(world.resolvers):
            world.run(1)
        world.newest, before = restored, len(world.going_on)
        world.late.clear()
        world.run(4 * STEPS)
        assert (len(world.going_on), set(world.strange)) == (before, {world.database}), seed
        world.newest = world.database.row.drawn  # adopted
        world.run()
        assert len(world.going_on) > before, seed


def _overwriting(drawing: Drawing, row: TokenRow) -> None:
    """What is drawn is not settled first."""
    drawing.row, drawing.reads = row, drawing.reads + 1
    drawing.step = Step.DRAW


def _keeping(drawing: Drawing, token: str) -> TokenRow:
    """The former token is not kept next to the drawn one."""
    return TokenRow(token, token)


def _never_strange(drawing: Drawing, row: TokenRow) -> None:
    drawing.row, drawing._refused = row, None
    drawing.step = Step.SETTLE if row.drawn else Step.DRAW


@pytest.mark.parametrize(
    ("name", "mutation", "test"),
    [
        ("read", _overwriting, test_nobody_is_refused_in_a_database_without_copies),
        ("next_row", _keeping, test_nobody_is_refused_in_a_database_without_copies),
        ("read", _never_strange, test_of_a_database_and_its_copy_one_goes_on),
    ],
)
def test_each_rule_of_a_drawing_is_needed(
    name: str, mutation: Callable[..., object], test: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Drawing, name, mutation)
    with pytest.raises(AssertionError):
        test()


def test_broker_that_takes_any_token_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(world: World, row: TokenRow) -> bool:
        world.newest = row.drawn
        return True

    monkeypatch.setattr(World, "told", told)
    with pytest.raises(AssertionError, match="may be committed"):
        test_of_a_database_and_its_copy_one_goes_on()
