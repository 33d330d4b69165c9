"""Which connection is given a long answer, which waits, and which is cut off so that others can go on."""

from __future__ import annotations

from tools.simulated.stand_in import AnyClass
from txmq.broker.shell.answer_budget import OWN_BYTES, STALLED_MS, AnswerBudget

LIMIT = 100_000


class Peer(AnyClass):
    """A connection that takes what the test says."""

    def __init__(self, budget: AnswerBudget, told: list[Peer]) -> None:
        self.budget, self.told = budget, told
        self.unsent = self.given = self.now_ms = 0
        self.user = ""

    def give(self, size: int) -> None:
        """It is given an answer."""
        self.unsent += size
        self.given += size
        self.look()

    def look(self) -> None:
        self.budget.holds(self, self.unsent, self.given - self.unsent, self.now_ms)

    def has_room(self) -> None:
        self.told.append(self)

    def cut_off(self) -> None:
        self.budget.forget(self)


def made(count: int) -> tuple[AnswerBudget, list[Peer], list[Peer]]:
    budget, told = AnswerBudget(LIMIT), list[Peer]()
    return budget, [Peer(budget, told) for _ in range(count)], told


def test_holder_gets_more_below_half_and_a_newcomer_below_all() -> None:
    budget, (one, two, three), _ = made(3)
    one.give(LIMIT // 2 - 1)
    assert all(budget.admits(client) for client in (one, two))
    one.give(1)
    assert not budget.admits(one)
    assert budget.admits(two)
    two.give(LIMIT // 2)
    assert not budget.admits(three)
    assert (budget.used, budget.used_max) == (LIMIT, LIMIT)


def test_what_is_small_is_the_connections_own() -> None:
    budget, clients, _ = made(1000)
    for client in clients:
        client.give(OWN_BYTES)
    assert budget.used == 0


def test_before_anybody_waits_all_are_looked_at_anew() -> None:
    budget, (one, two), _ = made(2)
    one.give(LIMIT)
    one.unsent = 0
    assert budget.admits(two)
    assert budget.used == 0


def test_waiting_connections_are_asked_in_order_one_at_a_time() -> None:
    budget, (full, *waiting), told = made(4)
    full.give(LIMIT)
    for client in waiting:
        assert not budget.admits(client)
        budget.wait(client)
    assert not budget.turned()
    assert told == []
    full.unsent = 0
    for number, client in enumerate(waiting, 1):
        assert budget.turned()
        assert told == waiting[:number]
        client.give(10_000)
    assert not budget.turned()


def test_between_half_and_all_those_who_took_theirs_come_first() -> None:
    budget, (full, slow, quick), told = made(3)
    full.give(LIMIT // 2)
    slow.give(10_000)
    budget.wait(slow)
    budget.wait(quick)
    assert budget.turned()
    assert told == [quick]
    assert not budget.turned()


def test_longest_standstill_is_cut_off_for_a_reading_waiter() -> None:
    budget, (old, young, moving, other), _ = made(4)
    for client, size in ((old, 40_000), (young, 30_000), (moving, 30_000)):
        client.give(size)
    young.now_ms = 1
    young.unsent -= 1
    young.look()
    assert budget.stalled(STALLED_MS) == []  # nobody waits
    budget.wait(other)
    assert budget.stalled(STALLED_MS - 1) == []
    moving.now_ms = STALLED_MS
    moving.unsent -= 1
    assert budget.stalled(STALLED_MS) == [old]
    assert budget.stalled(STALLED_MS + 1) == [old, young]
    old.cut_off()
    young.cut_off()
    assert budget.stalled(STALLED_MS + 1) == []
    assert budget.admits(other)


def test_waiters_that_take_nothing_cut_nobody_off_below_the_limit() -> None:
    budget, (one, two), _ = made(2)
    one.give(LIMIT // 2 + 10)
    two.give(LIMIT // 2 - 10)
    budget.wait(one)
    assert budget.stalled(10 * STALLED_MS) == []
    two.give(1)
    assert budget.stalled(20 * STALLED_MS) == [one]


def test_connection_that_is_gone_holds_nothing_and_is_not_asked() -> None:
    budget, (one, two), told = made(2)
    one.give(LIMIT)
    budget.wait(two)
    budget.forget(two)
    budget.forget(one)
    assert (budget.used, budget.turned(), told) == (0, False, [])


# --- users -----------------------------------------------------------------------------------------------------------


def of_users(*names: str) -> tuple[AnswerBudget, list[Peer], list[Peer]]:
    budget, peers, told = made(len(names))
    for peer, name in zip(peers, names, strict=True):
        peer.user = name
    return budget, peers, told


def test_user_is_given_nothing_more_beyond_half() -> None:
    budget, (one, two, another, other), _ = of_users("shop", "shop", "shop", "billing")
    one.give(LIMIT // 4)
    two.give(LIMIT // 4 - 1)
    assert budget.admits(another)
    two.give(1)
    assert not budget.admits(another)
    assert budget.admits(other)
    other.give(LIMIT // 2)
    assert budget.used == LIMIT


def test_waiters_of_a_full_share_hold_nobody_else_up() -> None:
    budget, (full, waiting, other), told = of_users("shop", "shop", "billing")
    full.give(LIMIT // 2)
    budget.wait(waiting)
    budget.wait(other)
    assert budget.turned()
    assert told == [other]
    assert not budget.turned()
    full.unsent = 0
    assert budget.turned()
    assert told == [other, waiting]


def test_for_a_share_nobody_elses_connection_is_cut_off() -> None:
    budget, (oldest, old, young, waiting), _ = of_users("billing", "shop", "shop", "shop")
    oldest.give(LIMIT // 4 - 10)
    for peer, now_ms in ((old, 1), (young, 2)):
        peer.now_ms = now_ms
        peer.give(LIMIT // 4 + 1)
    budget.wait(waiting)
    assert budget.stalled(STALLED_MS + 2) == [old, young]
    old.cut_off()
    assert budget.stalled(STALLED_MS + 2) == []
    assert budget.admits(waiting)


def test_for_the_whole_the_longest_standstill_is_cut_off_whosever() -> None:
    budget, (shop, billing, waiting), _ = of_users("shop", "billing", "audit")
    billing.give(LIMIT // 2)
    shop.now_ms = 1
    shop.give(LIMIT // 2)
    budget.wait(waiting)
    assert budget.stalled(STALLED_MS + 1) == [billing, shop]


def test_share_follows_a_connection_that_logs_in_or_out() -> None:
    budget, (full, another), _ = of_users("", "shop")
    full.give(LIMIT // 2)
    assert budget.admits(another)
    full.user = "shop"
    full.look()
    assert not budget.admits(another)
    full.user = ""
    full.look()
    assert budget.admits(another)
    budget.forget(full)
    assert budget.used == 0


def test_without_users_nobody_has_a_share() -> None:
    budget, (one, two, three), _ = made(3)
    one.give(LIMIT // 2)
    two.give(LIMIT // 4)
    assert budget.admits(three)
