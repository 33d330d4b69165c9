"""The surface of ``txmq.aio`` beside that of ``txmq``, name by name: parameters, and what is not there yet."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import txmq
import txmq.aio
from txmq import client as sync

# What txmq.aio does not have. Nothing else is missing, and what is listed here is. ``xa_resource`` stays away: it is
# driven by a transaction manager, which calls it as X/Open says, synchronously and by thread.
ABSENT = {
    "Client": {"xa_resource"},
    "OrderedMessageProducer": set[str](),
    "Consumer": set[str](),
    "HalfMessage": set[str](),
    "Producer": set[str](),
    "Topics": set[str](),
    "Groups": set[str](),
    "Transaction": set[str](),
    "Transactions": set[str](),
}
# What waits for nothing is no coroutine.
MADE_AT_ONCE = {
    ("Client", "producer"), ("Producer", "transaction"), ("Transaction", "connection"), ("Transaction", "savepoint"),
    ("Consumer", "pause"), ("Consumer", "resume"),
}  # fmt: skip
# Of the synchronous objects what other rooms of the client use.
INTERNAL = {
    "Client": {
        "begin_check_backs", "browse_pages", "control", "exiting", "forked", "leave_session", "link_type",
        "new_connection", "senders", "session",
    },
    "Consumer": {"deliver_for", "is_called_by_listener", "take", "take_next"},
    "HalfMessage": {"ask_checker", "home", "prepare", "reach", "report"},
    "OrderedMessageProducer": {"forked", "meant", "send_to", "send_to_async"},
    "Producer": {"route", "send_outside", "send_pairs_outside"},
    "Topics": {"assume", "forget", "held", "known", "owned", "refresh", "seen", "sizes", "wants_to_assume"},
    "Groups": {"change_deferred"},
    "Transaction": {"add", "attach", "begin", "enter_context", "leave_contexts", "require_use", "txid_or_none"},
    "Transactions": set[str](),
}  # fmt: skip
# Of the classes here what others of them use; and the outcome, which is an attribute there.
OF_AIO = {name: set[str]() for name in ABSENT} | {
    "Consumer": {"pending_acks"}, "HalfMessage": {"outcome", "pending"},
    "Transaction": {"append", "outcome", "require_task"},
}  # fmt: skip
NAMES = sorted(ABSENT)


def _public(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


def _bare(function: Any) -> list[inspect.Parameter]:
    parameters = inspect.signature(function).parameters.values()
    return [
        parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters if parameter.name != "self"
    ]


@pytest.mark.parametrize("name", NAMES)
def test_class_has_the_same_public_names(name: str) -> None:
    theirs, ours = getattr(sync, name), getattr(txmq.aio, name)
    assert ABSENT[name] | INTERNAL[name] <= _public(theirs)
    assert _public(ours) - {"inner", "host"} - OF_AIO[name] == _public(theirs) - INTERNAL[name] - ABSENT[name]


@pytest.mark.parametrize("name", NAMES)
def test_method_has_the_same_parameters_and_waits_by_await(name: str) -> None:
    theirs, ours = getattr(sync, name), getattr(txmq.aio, name)
    for method in _public(ours) - {"inner", "host"} - OF_AIO[name]:
        mine = getattr(ours, method)
        if isinstance(mine, property):
            assert mine.__doc__
            continue
        assert _bare(mine) == _bare(getattr(theirs, method)), method
        assert (
            (name, method) in MADE_AT_ONCE or inspect.iscoroutinefunction(mine) or inspect.isasyncgenfunction(mine)
        ), method
        assert mine.__doc__


def test_connect_has_the_same_parameters() -> None:
    assert _bare(txmq.aio.connect) == _bare(txmq.connect)
    assert inspect.iscoroutinefunction(txmq.aio.connect)


@pytest.mark.parametrize("cls", [txmq.aio.Client, txmq.aio.Producer, txmq.aio.Transaction])
def test_what_is_opened_is_a_block(cls: type) -> None:
    assert {"__aenter__", "__aexit__"} <= set(dir(cls))
