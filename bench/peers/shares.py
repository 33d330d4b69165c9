"""What txmq promises against its peers, from figures of the same rounds, as rows with bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from bench.model import Bound, Result, Row, Surroundings
from bench.peers.catalogue import KAFKA_FLUSH, OWN
from bench.peers.model import Peer
from bench.peers.queue import ALL, ONE
from bench.peers.queues import OWN_QUEUE, PEER_QUEUES
from bench.peers.run import LAST_RESOURCE, OUTBOX, OUTBOX_ALONE, relay_name, row_name
from bench.peers.works import BY_TASKS, CALLERS, TRANSACTIONS

_ONE, _ALL = "rate, 1 thr", f"rate, {CALLERS} thr"
_TOGETHER = f"rate, {CALLERS} callers"


@dataclass(frozen=True, slots=True)
class Share:
    """A figure of txmq in percent of the same figure of another row.

    Attributes:
        limit: the promise, in percent.
    """

    figure: str
    limit: float
    at_least: bool = True


@dataclass(frozen=True, slots=True)
class Beside:
    """Shares of one row of txmq against one other row, by their names."""

    title: str
    own: str
    other: str
    shares: Sequence[Share]


_ORDERS = (
    Beside(
        "last resource beside row + outbox row in one commit, no message moved", LAST_RESOURCE, OUTBOX_ALONE,
        (Share(_ONE, 60), Share(_ALL, 35), Share("CPU", 290, at_least=False)),
    ),
    Beside(
        "last resource beside outbox and relay, both running, into txmq", LAST_RESOURCE, relay_name(OWN),
        (Share(_ALL, 100), Share(f"p50, {CALLERS} thr", 10, at_least=False)),
    ),
    Beside(
        "outbox and its relay beside row + outbox row in one commit, no message moved", OUTBOX, OUTBOX_ALONE,
        (Share(_ONE, 75),),
    ),
    Beside("outbox and its relay beside an unordered relay into txmq", OUTBOX, relay_name(OWN), (Share(_ALL, 100),)),
    *(
        Beside(
            f"outbox and its relay (PostgreSQL) beside {queue.title}", OWN_QUEUE.name, queue.name,
            (Share(ONE, 120), Share(ALL, 200), Share("p50", 150, at_least=False)),
        )
        for queue in PEER_QUEUES
    ),
)  # fmt: skip


_TASKS = Beside(
    f"{BY_TASKS.title}, beside aiokafka on {KAFKA_FLUSH.title}", row_name(OWN, BY_TASKS.name),
    row_name(KAFKA_FLUSH, BY_TASKS.name), (Share("rate", 100),),
)  # fmt: skip


def shares(results: Mapping[str, Result], peers: Sequence[Peer]) -> list[Result]:
    """One row for each pair of which both sides were measured."""
    found = []
    for beside in (*_ORDERS, _TASKS, *_transactions(peers)):
        own, other = results.get(beside.own), results.get(beside.other)
        if own is not None and other is not None and own.samples and other.samples:
            found.append(_result(beside, own, other))
    return found


def _transactions(peers: Sequence[Peer]) -> Iterator[Beside]:
    own = row_name(OWN, TRANSACTIONS.name)
    for peer in peers:
        if peer.is_durable and peer.name != OWN.name:
            yield Beside(
                f"transactions beside {peer.title}", own, row_name(peer, TRANSACTIONS.name),
                (Share("rate", 100), Share(_TOGETHER, 100)),
            )  # fmt: skip


def _result(beside: Beside, own: Result, other: Result) -> Result:
    bounds = tuple(Bound(share.figure, share.limit, "%", share.at_least) for share in beside.shares)
    units = {share.figure: "%" for share in beside.shares}
    result = Result(Row(f"share-{beside.own}-{beside.other}", beside.title, _never_opened, units, bounds))
    for share in beside.shares:
        pairs = zip(own.samples[share.figure], other.samples[share.figure], strict=False)
        result.samples[share.figure] = [100 * ours / theirs for ours, theirs in pairs]
    return result


def _never_opened(_: Surroundings) -> nullcontext[Callable[[], Mapping[str, float]]]:
    return nullcontext(dict)
