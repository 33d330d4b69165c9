"""Commit order: against a naive model, and with ten thousand transactions in doubt."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tools.images.requests import batch
from txmq.broker.state.commit_order import CommitOrder
from txmq.broker.state.transaction import ANY_KEY, PreparedPart, Transaction

Keys = list[int] | str
PLACES = ((1, 0), (1, 1), (2, 0))
CONTENT = bytearray(batch())


def _transaction(number: int, uuid: str, parts: list[tuple[tuple[int, int], Keys]]) -> Transaction:
    made = Transaction(1, number, 0)
    for (topic_id, partition), _ in parts:
        made.add(PreparedPart(topic_id, partition, CONTENT, 1, 0))
    kind = "last-resource" if uuid else "branch"
    made.prepare({"kind": kind, "uuid": uuid, "keys": [keys for _, keys in parts], "prepared_ms": 0}, number)
    return made


def _claims(transaction: Transaction) -> list[tuple[int, int, int | str]]:
    claims = zip(transaction.parts, transaction.meta["keys"], strict=True)
    return [(part.topic_id, part.partition, key) for part, keys in claims for key in keys]


def _collide(one: Transaction, other: Transaction) -> bool:
    return one.meta["uuid"] == other.meta["uuid"] and any(
        mine[:2] == its[:2] and (ANY_KEY in (mine[2], its[2]) or mine[2] == its[2])
        for mine in _claims(one)
        for its in _claims(other)
    )


class Naive:
    """Every pair compared."""

    def __init__(self) -> None:
        self.unsettled: list[Transaction] = []

    def must_wait(self, transaction: Transaction) -> bool:
        """Whether an earlier one collides."""
        earlier = self.unsettled[: self.unsettled.index(transaction)]
        return any(_collide(transaction, other) for other in earlier)

    def blockers(self, transaction: Transaction) -> set[Transaction]:
        """The open branches among those."""
        earlier = self.unsettled[: self.unsettled.index(transaction)]
        open_branches = [other for other in earlier if other.is_branch and not other.is_committing]
        return {other for other in open_branches if _collide(transaction, other)}


_keys = st.one_of(st.just(ANY_KEY), st.lists(st.integers(0, 3), max_size=3, unique=True))
_transactions = st.lists(
    st.tuples(st.sampled_from(["x", "y", ""]), st.lists(st.tuples(st.sampled_from(PLACES), _keys), max_size=3)),
    min_size=1, max_size=12,
)  # fmt: skip


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a loaded machine is slow
@given(_transactions, st.data())
def test_who_must_wait_is_whom_an_earlier_one_collides_with(made: list, data: st.DataObject) -> None:  # type: ignore[type-arg]
    order, naive = CommitOrder(), Naive()
    for number, (uuid, parts) in enumerate(made):
        transaction = _transaction(number, uuid, parts)
        order.add(transaction)
        naive.unsettled.append(transaction)
        transaction.waiting = [object()] if data.draw(st.booleans()) else []
    while naive.unsettled:
        assert [order.must_wait(t) for t in naive.unsettled] == [naive.must_wait(t) for t in naive.unsettled]
        assert [{*order.blockers(t)} for t in naive.unsettled] == [naive.blockers(t) for t in naive.unsettled]
        leaving = data.draw(st.sampled_from(naive.unsettled))
        held = [t for t in naive.unsettled if t.waiting and naive.must_wait(t)]
        order.remove(leaving)
        naive.unsettled.remove(leaving)
        released = {t for t in held if t is not leaving and not naive.must_wait(t)}
        behind = order.behind(leaving)
        assert len(behind) == len(set(behind))
        # Those it held up are all found; whoever else is found may go on too.
        assert released <= set(behind)
        assert not any(naive.must_wait(t) or not t.waiting for t in behind)


def _settle_in_order(made: list[Transaction]) -> int:
    """Settle all, oldest first, every one asking what a broker asks; the calls of ``must_wait``."""
    order, asked = CommitOrder(), 0
    for transaction in made:
        transaction.waiting = [object()]
        order.add(transaction)
    counted = order.must_wait

    def must_wait(transaction: Transaction) -> bool:
        nonlocal asked
        asked += 1
        return counted(transaction)

    order.must_wait = must_wait  # type: ignore[method-assign]
    for number, transaction in enumerate(made):
        assert not order.must_wait(transaction)
        order.remove(transaction)
        following = made[number + 1 : number + 2]
        assert order.behind(transaction) == following
    return asked


def test_ten_thousand_in_doubt_on_one_key_cost_two_looks() -> None:
    made = [_transaction(number, "x", [((1, 0), [7])]) for number in range(10_000)]
    assert _settle_in_order(made) <= 2 * len(made)


def test_ten_thousand_in_doubt_on_any_key_cost_two_looks() -> None:
    made = [_transaction(number, "x", [((1, 0), ANY_KEY)]) for number in range(10_000)]
    assert _settle_in_order(made) <= 2 * len(made)


def test_other_resources_other_partitions_and_other_keys_do_not_wait() -> None:
    order = CommitOrder()
    first = _transaction(1, "x", [((1, 0), [7])])
    others = [
        _transaction(2, "y", [((1, 0), [7])]),
        _transaction(3, "x", [((1, 1), [7])]),
        _transaction(4, "x", [((2, 0), [7])]),
        _transaction(5, "x", [((1, 0), [8])]),
        _transaction(6, "x", [((1, 0), [])]),
    ]
    for transaction in (first, *others):
        order.add(transaction)
    assert not any(order.must_wait(t) for t in others)
    last = _transaction(7, "x", [((1, 0), [7])])
    order.add(last)
    assert order.must_wait(last)
