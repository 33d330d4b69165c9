"""The surface of ``txmq.aio`` compared with that of ``txmq``, name by name: parameters, and what is not there yet."""

from __future__ import annotations

import inspect
import re
import sys
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
    "Outbox": set[str](),
    "Producer": set[str](),
    "Relay": set[str](),
    "Topics": set[str](),
    "Groups": set[str](),
    "Transaction": set[str](),
    "Transactions": set[str](),
}
# What waits for nothing is no coroutine.
MADE_AT_ONCE = {
    ("Client", "producer"), ("Producer", "transaction"), ("Transaction", "connection"), ("Transaction", "savepoint"),
    ("Consumer", "log_of"), ("Consumer", "pause"), ("Consumer", "resume"), ("Client", "relay"),
    ("Outbox", "transaction"), ("Outbox", "wake"), ("Relay", "wake"),
}  # fmt: skip
# Of the synchronous objects what other rooms of the client use.
INTERNAL = {
    "Client": {
        "begin_check_backs", "browse_pages", "control", "exiting", "forked", "leave_session", "link_type",
        "new_connection", "senders", "session",
    },
    "Consumer": {"deliver_for", "is_called_by_listener", "take", "take_next"},
    "HalfMessage": {"ask_checker", "home", "prepare", "reach", "report"},
    "OrderedMessageProducer": {"forked", "send_to", "send_to_async", "topic_ref"},
    "Outbox": {"add_relay", "forked", "remove_relay", "tables"},
    "Producer": {"route", "send_outside", "send_pairs_outside"},
    "Relay": {"ask_to_end", "forked", "has_ended", "require_begun"},
    "Topics": {"all_known", "forget", "held", "known", "owned", "refresh"},
    "Groups": {"change_deferred"},
    "Transaction": {"add", "attach", "begin", "enter_context", "leave_contexts", "require_use", "txid_or_none"},
    "Transactions": set[str](),
}  # fmt: skip
# Of the classes here what others of them use; and what is an attribute there.
OF_AIO = {name: set[str]() for name in ABSENT} | {
    "Consumer": {"pending_acks"}, "HalfMessage": {"outcome", "pending"}, "Outbox": {"name"},
    "Relay": {"sent", "stopped"},
    "Transaction": {"append", "outcome", "require_task"},
}  # fmt: skip
NAMES = sorted(ABSENT)


def _sync(name: str) -> Any:
    return getattr(sync, name, None) or getattr(txmq, name)


def _public(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


def _bare(function: Any) -> list[inspect.Parameter]:
    parameters = inspect.signature(function).parameters.values()
    return [
        parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters if parameter.name != "self"
    ]


@pytest.mark.parametrize("name", NAMES)
def test_class_has_the_same_public_names(name: str) -> None:
    theirs, ours = _sync(name), getattr(txmq.aio, name)
    assert ABSENT[name] | INTERNAL[name] <= _public(theirs)
    assert _public(ours) - {"inner", "host"} - OF_AIO[name] == _public(theirs) - INTERNAL[name] - ABSENT[name]


@pytest.mark.parametrize("name", NAMES)
def test_method_has_the_same_parameters_and_waits_by_await(name: str) -> None:
    theirs, ours = _sync(name), getattr(txmq.aio, name)
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


# What is awaited, iterated over or entered otherwise there; every other annotation is the same, by its last name.
RETURNS = {
    ("Client", "browse"): ("AsyncIterator[Message]", "Iterator[Message]"),
    ("Outbox", "transaction"): ("AsyncIterator[OutboxTransaction]", "Iterator[OutboxTransaction]"),
    ("HalfMessage", "result"): ("Coroutine[Any, Any, SendResult]", "SendResult"),
    ("Transaction", "connection"): ("Connection", "Any"),
    ("Transaction", "pending"): ("Coroutine[Any, Any, tuple[str, ...]]", "tuple[str, ...]"),
    ("Transaction", "results"): ("Coroutine[Any, Any, list[SendResult]]", "list[SendResult]"),
    ("Transaction", "savepoint"): ("AsyncIterator[None]", "Iterator[None]"),
}
# Connections of its own drivers, which have no type in common, and an outbox of either kind.
PARAMETERS = {("Outbox", "connection"): ("Any", "Connection"), ("Client", "outbox"): ("Outbox | Outbox", "Outbox")}
BLOCKS = {"__enter__": "__aenter__", "__exit__": "__aexit__", "__iter__": "__aiter__"}


def _annotations(function: Any) -> dict[str, str]:
    """Without modules: ``producer.Pair`` and ``Pair`` are one."""
    called: Any = function.fget if isinstance(function, property) else function
    signature = inspect.signature(called)
    found = {name: str(parameter.annotation) for name, parameter in signature.parameters.items() if name != "self"}
    found["return"] = str(signature.return_annotation)
    return {name: re.sub(r"\b(\w+\.)+(?=\w)", "", annotation) for name, annotation in found.items()}


@pytest.mark.parametrize("name", NAMES)
def test_method_has_the_same_annotations(name: str) -> None:
    theirs, ours = _sync(name), getattr(txmq.aio, name)
    for method in _public(ours) - {"inner", "host"} - OF_AIO[name]:
        mine, original = _annotations(getattr(ours, method)), _annotations(getattr(theirs, method))
        if (name, method) in RETURNS:
            assert (mine.pop("return"), original.pop("return")) == RETURNS[name, method]
        for parameter in mine.keys() & {parameter for cls, parameter in PARAMETERS if cls == name}:
            assert (mine.pop(parameter), original.pop(parameter)) == PARAMETERS[name, parameter]
        assert mine == original, method


@pytest.mark.parametrize("name", NAMES)
def test_what_is_a_block_or_iterated_over_is_so_there(name: str) -> None:
    theirs, ours = _sync(name), getattr(txmq.aio, name)
    for synchronous, awaited in BLOCKS.items():
        assert hasattr(theirs, synchronous) == hasattr(ours, awaited), synchronous
        assert not hasattr(ours, synchronous)


def test_module_has_a_counterpart_for_each_class() -> None:
    assert set(txmq.aio.__all__) == {*NAMES, "Message", "connect"}
    assert set(txmq.aio.__all__) <= {*txmq.__all__, *sync.__all__}
    assert txmq.aio.Message is txmq.Message  # at run time
    modules = [module for name, module in sys.modules.items() if name.startswith("txmq.aio")]
    defined = [
        found
        for module in modules
        for found in vars(module).values()
        if isinstance(found, type) and issubclass(found, BaseException) and found.__module__.startswith("txmq.aio")
    ]
    assert defined == []
