"""Queries over several homes: the registry draws the epochs of their drivers, and fixes the home of each, its anchor.

Theory of operation. A query is in the state of its anchor alone, which decides its batches. The first ``query open`` of
a name asks the registry, which fixes the home that was asked. From then on every other home refuses, and names the
anchor. The opening of a query that is known here asks nothing. ``query delete`` releases the anchor when the deletion
is durable, so that no home opens a query whose batches another one still knows.

A broker that is alone asks nobody.

Invariants:
    * only ``query open`` makes an anchor;
    * the registry is asked for an anchor behind its release, if both are wanted: it tells of no former query.
"""

from __future__ import annotations

from collections.abc import Callable

from txmq.broker.cluster.asks import Ask, DrawQueryEpoch, FindAnchor, ReleaseAnchor, Result
from txmq.broker.context import Context
from txmq.broker.verbs.cluster.events import as_answer, view_of
from txmq.errors import BrokerError, NotOwnerError, TxmqError

Then = Callable[[int | BrokerError], None]


def draw_epoch(context: Context, then: Then) -> None:
    """Draw an epoch from the registry."""
    above = context.state.queries.last_epoch
    _ask(context, lambda number: DrawQueryEpoch(number, above), then)


def find_anchor(context: Context, name: str, then: Then) -> None:
    """Find the home of a query: this one, if there is none yet."""
    view = view_of(context)

    def found(value: int | BrokerError) -> None:
        if isinstance(value, int) and name in view.releasing:
            find_anchor(context, name, then)  # it was opened and deleted meanwhile
        else:
            then(value)

    _ask(context, lambda number: FindAnchor(number, "query", name), found, view.releasing.get(name))


def _ask(context: Context, make: Callable[[int], Ask], then: Then, behind: object = None) -> None:
    def told(result: Result) -> None:
        then(as_answer(result) if isinstance(result, TxmqError) else result.value)

    view_of(context).ask(make, told, behind)


def release_anchor(context: Context, name: str) -> None:
    """The query is deleted: its name is free for all homes when that is durable."""
    view, group = context.cluster, context.group
    if view is None or view.is_full:
        return  # the anchor stays: the next query of that name has the same home

    def released(_result: Result) -> None:
        if view.releasing.get(name) is group:
            del view.releasing[name]

    view.releasing[name] = group
    view.ask(lambda number: ReleaseAnchor(number, "query", name), released, group)


def refuse_elsewhere(context: Context, name: str, anchor: int) -> None:
    """Refuse to open a query here whose home is another one.

    Raises:
        NotOwnerError: names the home, and its leader.
    """
    if anchor != context.state.home:
        leader = view_of(context).leader(anchor) or "-"
        raise NotOwnerError(f"leader={leader} home={anchor:016x} is the anchor of query {name}")
