"""The order in which prepared transactions of one resource, and parts of transactions over homes, get their place.

*Log order = database order.* Two transactions of one database that touched the same row were prepared in the order in
which the database committed them: the second got its row lock only after the first one's commit, which came after the
first one's prepare. So a commit waits until every earlier-prepared, unsettled transaction of the same resource (by
uuid) that shares a partition and a key with it is settled. A key of ``*`` collides with every key of its partition.

*In a cluster* a caller is told of a commit before each home has placed its part, and what begins afterwards may be of
any kind. So all prepared transactions of a partition and key share one queue (``queue_together``): parts that other
homes decide about (kind ``branch``), and those of every resource. A decision made here that collides with one of them
queues there as well (``PLACING``). A decision itself never waits, only its place does, so no two transactions wait for
each other. A broker that is alone places before it answers, and needs no more than the queues of its resources.

Queues per (uuid, partition, key) and per partition make both questions a look at the head of a few queues, however many
transactions are in doubt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, TypeVar

from txmq.broker.state.transaction import ANY_KEY, Collision, Transaction

_Name = TypeVar("_Name")
_Queue = dict[Transaction, None]
_ResourcePartition = tuple[str, int, int]  # uuid, topic id, partition
_Pair = tuple[_ResourcePartition, int | str]  # and a key
_COMMON = ""  # stands for a uuid: the queues that all resources share
LOOKED_AT_MAX: Final = 100  # transactions before one: a broker may have tens of thousands that wait for one branch


class CommitOrder:
    """All prepared transactions, by what they may collide on.

    Attributes:
        in_common: how many of them are in the queues that all share.
    """

    def __init__(self) -> None:
        self.in_common = 0
        self._is_together = False
        self._by_key: dict[_Pair, _Queue] = {}  # the key ANY_KEY holds those that collide with all
        self._by_place: dict[_ResourcePartition, _Queue] = {}  # all in a partition
        self._pairs: dict[Transaction, list[_Pair]] = {}  # of each: asked for again and again
        self._removed: tuple[Transaction | None, list[_Pair]] = (None, [])  # the latest, and its pairs

    def queue_together(self) -> None:
        """From now on resources share their queues: the broker is one of several."""
        unsettled, self._is_together = list(self._pairs), True
        for transaction in unsettled:
            self.remove(transaction)
        for transaction in unsettled:
            self.add(transaction)

    def add(self, transaction: Transaction) -> None:
        """Append; call in order of preparation."""
        pairs = self._pairs[transaction] = self._pairs_of(transaction)
        for pair in pairs:
            _append(self._by_key, pair, transaction)
            _append(self._by_place, pair[0], transaction)
        self.in_common += _is_common(pairs)

    def remove(self, transaction: Transaction) -> None:
        """A transaction is settled."""
        pairs = self._pairs.pop(transaction, [])
        self._removed = transaction, pairs
        self.in_common -= _is_common(pairs)
        for pair in pairs:
            _drop(self._by_key, pair, transaction)
            _drop(self._by_place, pair[0], transaction)

    def must_wait(self, transaction: Transaction) -> bool:
        """Whether an earlier unsettled transaction collides with this one."""
        for pair in self._pairs[transaction]:
            place, key = pair
            if key == ANY_KEY:
                if next(iter(self._by_place[place])) is not transaction:
                    return True
                continue
            if next(iter(self._by_key[pair])) is not transaction:
                return True
            any_key = self._by_key.get((place, ANY_KEY))
            if any_key and next(iter(any_key)).order < transaction.order:
                return True
        return False

    def must_queue(self, collisions: Iterable[Collision]) -> bool:
        """Whether messages that are decided now collide with a transaction in the common queues."""
        if not self.in_common:
            return False
        for topic_id, partition, key in collisions:
            place = _COMMON, topic_id, partition
            if key == ANY_KEY:
                if place in self._by_place:
                    return True
            elif (place, key) in self._by_key or (place, ANY_KEY) in self._by_key:
                return True
        return False

    def blockers(self, transaction: Transaction) -> list[Transaction]:
        """Open parts that other homes decide about and this one waits for, of the first ``LOOKED_AT_MAX`` before it."""
        found: dict[Transaction, None] = {}
        looked_at = 0
        pairs = self._pairs[transaction]
        for place, key in pairs if _is_common(pairs) else ():
            for earlier in self._before(transaction, place, key):
                looked_at += 1
                if earlier.is_branch and not earlier.is_committing:
                    found[earlier] = None
                if looked_at == LOOKED_AT_MAX:
                    return list(found)
        return list(found)

    def _before(self, transaction: Transaction, place: _ResourcePartition, key: int | str) -> Iterator[Transaction]:
        own = self._by_place[place] if key == ANY_KEY else self._by_key[place, key]
        for queue in (own, self._by_key.get((place, ANY_KEY), {})):
            for earlier in queue:
                if earlier.order >= transaction.order:
                    break
                yield earlier

    def behind(self, transaction: Transaction) -> list[Transaction]:
        """Those that may go on now that ``transaction`` was removed: waiting, and nothing before them."""
        removed, pairs = self._removed
        found: dict[Transaction, None] = {}
        for pair in pairs if removed is transaction else self._pairs_of(transaction):
            place, key = pair
            if key == ANY_KEY:
                candidates: Iterable[Transaction] = self._held_by_all(place)
            else:
                queues = self._by_key.get(pair), self._by_key.get((place, ANY_KEY))
                candidates = [next(iter(queue)) for queue in queues if queue]
            for candidate in candidates:  # mostly there is none
                if candidate.is_committing and not self.must_wait(candidate):
                    found[candidate] = None
        return list(found)

    def _pairs_of(self, transaction: Transaction) -> list[_Pair]:
        uuid, pairs = _COMMON if self._is_together else transaction.meta["uuid"], list[_Pair]()
        for part, keys in zip(transaction.parts, transaction.meta["keys"], strict=True):
            place = uuid, part.topic_id, part.partition
            for key in (ANY_KEY,) if keys == ANY_KEY else keys:
                pairs.append((place, key))
        return pairs

    def _held_by_all(self, place: _ResourcePartition) -> Iterator[Transaction]:
        """Whom a transaction with ANY_KEY may have held up: those before the next such one, and that one."""
        same = self._by_key.get((place, ANY_KEY), ())
        for transaction in self._by_place.get(place, ()):
            yield transaction
            if transaction in same:
                return


def _is_common(pairs: list[_Pair]) -> bool:
    return bool(pairs) and pairs[0][0][0] == _COMMON


def _append(queues: dict[_Name, _Queue], name: _Name, transaction: Transaction) -> None:
    queue = queues.get(name)
    if queue is None:
        queues[name] = {transaction: None}
    else:
        queue[transaction] = None


def _drop(queues: dict[_Name, _Queue], name: _Name, transaction: Transaction) -> None:
    queue = queues.get(name)
    if queue is not None:
        queue.pop(transaction, None)
        if not queue:
            del queues[name]
