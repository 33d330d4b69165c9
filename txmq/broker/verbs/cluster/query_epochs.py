"""Queries over several homes: the registry draws the epochs of their drivers, and fixes the home of each, its anchor.

Theory of operation. A query is in the state of its anchor alone, which decides its batches. The first ``query open`` of
a name asks the registry, which fixes the home that was asked. From then on every other home refuses, and names the
anchor. The opening of a query that is known here asks nothing. ``query delete`` releases the anchor (``anchors``), so
that no home opens a query whose batches another one still knows.

A broker that is alone asks nobody.

Invariant: only ``query open`` makes an anchor.
"""

from __future__ import annotations

from txmq.broker.cluster.registry_asks import DrawQueryEpoch, Result
from txmq.broker.context import Context
from txmq.broker.verbs.cluster.anchors import Then
from txmq.broker.verbs.cluster.registry_events import as_answer, view_of
from txmq.errors import NotOwnerError, TxmqError


def draw_epoch(context: Context, then: Then) -> None:
    """Draw an epoch from the registry."""
    above = context.state.queries.last_epoch

    def answered(result: Result) -> None:
        then(as_answer(result) if isinstance(result, TxmqError) else result.value)

    view_of(context).ask(lambda number: DrawQueryEpoch(number, above), answered)


def refuse_elsewhere(context: Context, name: str, anchor: int) -> None:
    """Refuse to open a query here whose home is another one.

    Raises:
        NotOwnerError: names the home, and its leader.
    """
    if anchor != context.state.home:
        leader = view_of(context).leader(anchor) or "-"
        raise NotOwnerError(f"leader={leader} home={anchor:016x} is the anchor of query {name}")
