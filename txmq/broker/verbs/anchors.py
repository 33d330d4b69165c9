"""Anchors: the one home that decides for a group or a query, where several homes have a part of it.

Theory of operation. The registry fixes the home that asks for the anchor of a name first. From then on every home is
told that one. When the group or query is deleted there, the anchor is released after that, as soon as it is durable:
no home is the next anchor of a name of which the former one still knows something.

A broker that is alone is the anchor of everything, and asks nobody.

Invariant: the registry is asked for an anchor after its release, if both are wanted: it tells of no former one.
"""

from __future__ import annotations

from collections.abc import Callable

from txmq.broker.cluster.registry_asks import FindAnchor, ReleaseAnchor, Result, as_answer
from txmq.broker.context import Context
from txmq.errors import BrokerError, TxmqError

Then = Callable[[int | BrokerError], None]


def find_anchor(context: Context, kind: str, name: str, then: Then) -> None:
    """Find the anchor of a group or query: this home, if there is none yet."""
    view = context.cluster
    if view is None:
        then(context.state.home)
        return

    def found(result: Result) -> None:
        if isinstance(result, TxmqError):
            then(as_answer(result))
        elif (kind, name) in view.releasing:
            find_anchor(context, kind, name, then)  # it was made and deleted meanwhile
        else:
            then(result.value)

    view.ask(lambda number: FindAnchor(number, kind, name), found, view.releasing.get((kind, name)))


def release_anchor(context: Context, kind: str, name: str) -> None:
    """The group or query is deleted here: its name is free for all homes when that is durable."""
    view, group = context.cluster, context.group
    if view is None or view.is_full:
        return  # the anchor stays: the next one of that name has the same home

    def released(_result: Result) -> None:
        if view.releasing.get((kind, name)) is group:
            del view.releasing[kind, name]

    view.releasing[kind, name] = group
    view.ask(lambda number: ReleaseAnchor(number, kind, name), released, group)
