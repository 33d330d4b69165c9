"""What callers may not give: refused with the argument's name and what is expected, before anything happens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

import txmq
from txmq.client.client import Client
from txmq.client.producer.producer import Producer, ProducerSettings
from txmq.errors import ConfigError
from txmq.spark.sink.queries import Queries

NEVER_NUMBERS: tuple[Any, ...] = (math.nan, math.inf, -math.inf, -1.0, "1", None, True, [])


WAITS: dict[str, Callable[[Client, Any], object]] = {
    "send": lambda client, wait: client.producer().send("t", b"v", timeout=wait),
    "send_async": lambda client, wait: client.producer().send_async("t", b"v", timeout=wait).result(),
    "send_many": lambda client, wait: client.producer().send_many("t", [], timeout=wait),
    "flush": lambda client, wait: client.producer().flush(wait),
    "close": lambda client, wait: client.producer().close(wait),
    "fetch": lambda client, wait: client.fetch("t", 0, 0, timeout=wait),
    "fetch_raw": lambda client, wait: client.fetch_raw("t", 0, 0, timeout=wait),
    "queries.open": lambda client, wait: Queries(client).open("q", 1, timeout=wait),
}
DURATIONS: dict[str, Callable[[Client, Any], object]] = {
    "connect": lambda _client, timeout: txmq.connect("txmq://host", timeout=timeout, lazy=True),
    "producer": lambda client, timeout: client.producer(timeout=timeout),
    "transaction": lambda client, timeout: client.producer().transaction(timeout=timeout),
    "xa_resource": lambda client, timeout: client.xa_resource(timeout=timeout),
    "half": lambda client, timeout: _producer_of_halves(client).half("t", b"v", timeout=timeout),
}


def _producer_of_halves(client: Client) -> txmq.Producer:
    desk: Any = object()  # which nobody asks anything
    return Producer(client, None, ProducerSettings(), desk)


@pytest.mark.parametrize("timeout", [wait for wait in NEVER_NUMBERS if wait is not None], ids=repr)
@pytest.mark.parametrize("call", WAITS)
def test_invalid_wait_is_refused_and_nothing_is_sent(client: Client, call: str, timeout: object) -> None:
    with pytest.raises(ConfigError, match=r"^timeout = .*: expected a number from 0.0 to 86400.0$"):
        WAITS[call](client, timeout)
    assert list(client.browse("t")) == []


@pytest.mark.parametrize("timeout", [0, *NEVER_NUMBERS], ids=repr)
@pytest.mark.parametrize("call", DURATIONS)
def test_a_duration_that_is_none_is_refused(client: Client, call: str, timeout: object) -> None:
    with pytest.raises(ConfigError, match=r"^timeout = .*: expected"):
        DURATIONS[call](client, timeout)


PRODUCER_OPTIONS: list[dict[str, Any]] = [
    {"linger_ms": math.nan}, {"linger_ms": "1"}, {"batch_size_bytes": 1024.5}, {"buffer_size_bytes": None},
    {"max_in_flight": True}, {"max_in_flight": 65}, {"compression": []}, {"compression": "lzma"},
    {"partition_selector": "round-robin"}, {"retry_store": 5},
]  # fmt: skip


@pytest.mark.parametrize("given", PRODUCER_OPTIONS, ids=repr)
def test_a_producers_options_are_refused_by_name(client: Client, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(given))} = .*: expected"):
        client.producer(**given)


ORDERED_OPTIONS: list[dict[str, Any]] = [
    {"timeout": math.nan}, {"spool_size_bytes_max": 1e6}, {"attempts_max": "5"}, {"visibility_wait_s": math.inf},
    {"compression": {}}, {"partitions": ["t"]}, {"partitions": {"t": True}}, {"partitions": {5: 1}},
]  # fmt: skip


@pytest.mark.parametrize("given", ORDERED_OPTIONS, ids=repr)
def test_an_ordered_producers_options_are_refused_by_name(client: Client, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(given))}( =|:) .*expected"):
        client.ordered_producer(txmq.RoundRobinSelector(), "nowhere", options=txmq.OrderedOptions(**given))


@pytest.mark.parametrize(("name", "selector", "spool", "options"), [
    ("partition_selector", None, "nowhere", txmq.OrderedOptions()),
    ("spool", txmq.RoundRobinSelector(), 5, txmq.OrderedOptions()),
    ("options", txmq.RoundRobinSelector(), "nowhere", {}),
])  # fmt: skip
def test_what_makes_an_ordered_producer_is_refused_by_name(
    client: Client, name: str, selector: Any, spool: Any, options: Any
) -> None:
    with pytest.raises(ConfigError, match=f"^{name} = .*: expected"):
        client.ordered_producer(selector, spool, options=options)


CONSUMER_OPTIONS: list[dict[str, Any]] = [
    {"name": 5}, {"name": "a b"}, {"accept": "all"}, {"strategy": []}, {"strategy": "greedy"}, {"retry_delay": None},
    {"retry_delay": math.nan}, {"buffer_size_bytes": 64e6}, {"session_timeout": "6"}, {"session_timeout": 0.1},
    {"heartbeat_interval": 0}, {"heartbeat_interval": math.inf}, {"offset_save_interval": -1},
    {"deferred_retries": 2.5}, {"deferred_delay": "soon"}, {"keep_key_order": "no"}, {"pass_unreadable": 1},
]  # fmt: skip


@pytest.mark.parametrize("given", CONSUMER_OPTIONS, ids=repr)
def test_a_consumers_options_are_refused_by_name(client: Client, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(given))} = .*: expected"):
        client.consumer("g", ["t"], options=txmq.ConsumerOptions(**given))


def test_option_that_is_an_argument_of_the_consumer_says_so() -> None:
    wrong: Any = txmq.ConsumerOptions
    with pytest.raises(
        ConfigError, match=r"no 'max_retries'; it is an argument .* client\.consumer\(.*max_retries=\.\.\."
    ):
        wrong(max_retries=3)
    with pytest.raises(ConfigError, match=r"no 'retry_delays'; did you mean 'retry_delay'\?"):
        wrong(retry_delays=3)
    with pytest.raises(ConfigError, match="no 'x'; known: name, accept, strategy"):
        wrong(x=3)


CONSUMER_ARGUMENTS: list[dict[str, Any]] = [
    {"topics": 5}, {"topics": b"t"}, {"topics": []}, {"topics": ["a b"]}, {"group": None}, {"group": "a/b"},
    {"start": True}, {"start": 1.5}, {"start": "now"}, {"max_retries": -1}, {"max_retries": "5"}, {"retry_store": 5},
    {"options": {}},
]  # fmt: skip


@pytest.mark.parametrize("given", CONSUMER_ARGUMENTS, ids=repr)
def test_what_makes_a_consumer_is_refused_by_name(client: Client, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(given))} = .*: expected"):
        client.consumer(**{"group": "g", "topics": ["t"], **given})


@pytest.mark.parametrize("given", [5, None, b"txmq://host", "http://host"], ids=repr)
def test_an_address_that_is_none_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"^bootstrap = .*: expected txmq://HOST"):
        txmq.connect(given)


def test_offset_stores_name_what_they_refuse() -> None:
    with pytest.raises(ConfigError, match=r"^path = 5: expected"):
        txmq.FileOffsetStore(5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^table = 5: expected"):
        txmq.DatabaseOffsetStore(lambda: None, table=5)  # type: ignore[arg-type]
