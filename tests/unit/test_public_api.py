"""The public API, held word by word: names, parameters, defaults, what is keyword only."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from enum import IntFlag
from typing import Any

import pytest

import txmq
from txmq import LastResource, MySQLResource, errors
from txmq.binlog import errors as errors_of_binlog
from txmq.client.admin.transactions import Transactions
from txmq.client.relay.relay import Relay
from txmq.client.topics import Topics
from txmq.client.transaction.block import Transaction
from txmq.client.transaction.xa_resource import BrokerXAResource
from txmq.django import offset_store, relay, send
from txmq.django.testing import sent
from txmq.model import LargeMessage
from txmq.sqlalchemy import DatabaseOffsetStore as OffsetsOfSessions
from txmq.sqlalchemy import Outbox as OutboxOfSessions

# Of each the parameters after self, as Python would print them without types. A change breaks programs of users
# and is told in CHANGES.md.
SIGNATURES: dict[Callable[..., Any], str] = {
    txmq.connect: "bootstrap, *, timeout=5.0, name='python', lazy=False, ca='', cert='', key='', password=''",
    Topics.create: "name, partitions=1, **settings",
    Topics.list: "",
    Topics.describe: "name",
    Topics.alter: "name, **settings",
    Topics.delete: "name",
    txmq.Client.producer: "*, partition_selector=None, linger_ms=0, batch_size_bytes=262144, "
    "buffer_size_bytes=67108864, max_in_flight=8, compression=None, timeout=5.0, group=None, checker=None, "
    "retry_store=None",
    txmq.Producer.send: "topic, value, key=None, *, headers=None, tag=None, partition=None, timeout=None",
    txmq.Producer.send_async: "topic, value, key=None, *, headers=None, tag=None, partition=None, timeout=None",
    txmq.Producer.send_many: "topic, messages, *, timeout=None",
    txmq.Producer.transaction: "*resources, timeout=30.0",
    txmq.Producer.half: "topic, value, key=None, *, headers=None, tag=None, partition=None, timeout=30.0",
    Transaction.send: "topic, value, key=None, headers=None, tag=None, partition=None",
    Transaction.connection: "resource",
    Transaction.ack: "message",
    LastResource: "name, connect, *, dialect=None, table='txmq_marker', allow_weak_durability=False, ignore_tables=(), "
    "clock=None, random=None",
    LastResource.install: "client=None, *, adopt=False",
    LastResource.using: "connection",
    MySQLResource: "name, connect, *, table='txmq_marker', marker=True, allow_weak_durability=False, ignore_tables=(), "
    "clock=None, random=None",
    MySQLResource.install: "client=None, *, adopt=False",
    MySQLResource.using: "connection",
    txmq.Outbox: (
        "name='default', *, table='txmq_outbox', dialect=None, rows_max=1000000, unit_bytes_max=62914560, clock=None"
    ),
    txmq.Outbox.install: "connection",
    txmq.Outbox.send: "connection, topic, value, key=None, *, headers=None, unit=None",
    txmq.Outbox.send_many: "connection, messages, *, unit=None",
    txmq.Outbox.transaction: "connection",
    txmq.Client.relay: "outbox, *, connect, durability='forced'",
    Relay.drain: "timeout",
    txmq.Client.ordered_producer: "partition_selector, spool, *, options",
    txmq.OrderedMessageProducer.send: "topic, value, key=None, *, headers=None, tag=None, timeout=None",
    txmq.OrderedMessageProducer.send_async: "topic, value, key=None, *, headers=None, tag=None, timeout=None",
    txmq.Client.consumer: "group, topics, *, start=None, max_retries=5, retry_store=None, broadcast=False, "
    "offset_store=None, options",
    txmq.Message.ack: "connection=None, *, sync=False",
    txmq.Message.reject: "reason='rejected'",
    txmq.Consumer.run: "handle, *, threads=1",
    txmq.Consumer.poll: "max_records=500, timeout=1.0",
    txmq.Client.fetch: "topic, partition, offset, max_bytes=1048576, timeout=1.0",
    txmq.Client.browse: "topic",
    txmq.Client.outcome: "txid",
    Transactions.list: "state='in-doubt'",
    Transactions.show: "txid",
    Transactions.commit: "txid, reason",
    Transactions.rollback: "txid, reason",
    Transactions.forget: "txid",
    txmq.Client.xa_resource: "*, timeout=30.0",
    BrokerXAResource.start: "xid, flags=0",
    BrokerXAResource.end: "xid, flags=67108864",
    BrokerXAResource.prepare: "xid",
    BrokerXAResource.commit: "xid, flags=0",
    BrokerXAResource.rollback: "xid",
    BrokerXAResource.recover: "flags=25165824",
    BrokerXAResource.forget: "xid",
    txmq.PartitionSelector.select: "topic, partitions, message",
    txmq.FixedSelector: "partition",
    send: "topic, value, key=None, headers=None, using='default'",
    relay: "client, using='default'",
    offset_store: "using='default'",
    txmq.DatabaseOffsetStore: "connect, *, table='txmq_offset', dialect=None",
    OffsetsOfSessions: "metadata, connect, *, table='txmq_offset', bind=None",
    sent: "topic=None, using='default'",
    OutboxOfSessions: (
        "metadata, name='default', *, table='txmq_outbox', codec=None, rows_max=1000000, unit_bytes_max=62914560"
    ),
    OutboxOfSessions.install: "connection",
    OutboxOfSessions.send: "session, topic, value, key=None, *, headers=None, bind=None",
    OutboxOfSessions.send_many: "session, messages, *, bind=None",
}


def _bare(function: Callable[..., Any]) -> str:
    """The signature without self and types, a default that is an object of ours left out."""
    parameters = []
    for parameter in inspect.signature(function).parameters.values():
        default = parameter.default
        if dataclasses.is_dataclass(default):
            default = inspect.Parameter.empty
        elif isinstance(default, IntFlag):
            default = int(default)
        if parameter.name != "self":
            parameters.append(parameter.replace(annotation=inspect.Parameter.empty, default=default))
    return str(inspect.Signature(parameters))[1:-1]


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__qualname__)
def test_a_public_call_keeps_its_parameters(function: Callable[..., Any]) -> None:
    assert _bare(function) == SIGNATURES[function]


@pytest.mark.parametrize(
    "cls", [txmq.Client, txmq.Producer, txmq.OrderedMessageProducer, txmq.Consumer, Relay, Transaction]
)
def test_what_is_opened_is_a_block(cls: type) -> None:
    assert hasattr(cls, "__enter__")
    assert hasattr(cls, "__exit__")


def test_the_values_have_the_fields_that_are_promised() -> None:
    message = "topic partition offset key value headers tag timestamp_ms txid"
    assert list(inspect.signature(txmq.Message).parameters) == message.split()
    assert [field.name for field in dataclasses.fields(txmq.SendResult)] == ["topic", "partition", "offset", "status"]
    assert isinstance(inspect.getattr_static(txmq.SendResult, "is_success"), property)
    members = {cls: {member.name for member in cls} for cls in (txmq.SendStatus, txmq.Resolution, txmq.Outcome)}
    assert members == {
        txmq.SendStatus: {"ACKNOWLEDGED", "SPOOLED", "PENDING"},
        txmq.Resolution: {"COMMIT", "ROLLBACK", "UNKNOWN"},
        txmq.Outcome: {"COMMITTED", "ROLLED_BACK", "UNKNOWN"},
    }
    assert {"txid", "results", "pending"} <= set(dir(Transaction))


def test_the_shipped_selectors_are_public() -> None:
    for selector in (txmq.RoundRobinSelector(), txmq.KeyHashSelector(), txmq.KafkaPartitionSelector()):
        chosen: txmq.PartitionSelector = selector
        assert callable(chosen.select)


ERRORS = [cls for cls in vars(errors).values() if inspect.isclass(cls) and issubclass(cls, errors.TxmqError)]
RETRIABLE = {
    errors.ConnectionLostError, errors.RequestTimeoutError, errors.SpoolFullError, errors.NotOwnerError,
    errors.OverloadedError, errors.UnavailableError, errors.DiskFullError, errors.RolledBackError,
    errors.TransactionTimeoutError, errors.SessionFullError, errors.BrokerAwayError, errors.TransactionAwayError,
    errors.RegistryAwayError, errors.HomeInUseError, errors.PartialResultError,
    errors.DeletionPendingError, errors.OutboxFullError, errors.OffsetStoreAwayError, errors.BrokenAnswerError,
}  # fmt: skip


@pytest.mark.parametrize("cls", ERRORS, ids=lambda cls: cls.__name__)
def test_an_error_says_what_happened_and_whether_to_repeat(cls: type[errors.TxmqError]) -> None:
    assert "__doc__" in vars(cls)
    assert cls.__doc__
    assert cls.retriable is (cls in RETRIABLE)


def test_an_error_of_a_transaction_names_it() -> None:
    of_transactions = [cls for cls in ERRORS if issubclass(cls, errors.TransactionError)]
    assert {errors.OutcomeUnknownError, errors.RolledBackError, errors.HeuristicError} < set(of_transactions)
    for cls in of_transactions:
        assert cls("what", "a-b-1-1").txid == "a-b-1-1"


GIVEN = {
    "text": "what", "txid": "a-b-1-1", "retriable": False, "found": ["a"], "away": ["b"], "xa_code": -7,
    "path": "log/1", "position": 8, "reason": "torn", "table": "shop.orders", "column": "id", "event": "{}",
}  # fmt: skip
OF_BINLOG = [cls for cls in vars(errors_of_binlog).values() if inspect.isclass(cls) and cls not in ERRORS]


@pytest.mark.parametrize("cls", [*ERRORS, *OF_BINLOG], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("through", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
def test_an_error_reaches_another_process_as_it_was(
    through: Callable[[errors.TxmqError], errors.TxmqError], cls: type[errors.TxmqError]
) -> None:
    named = GIVEN.keys() & inspect.signature(cls.__init__).parameters.keys()
    error = cls(**{name: GIVEN[name] for name in named}) if named else cls("what")
    error.add_note("done before")
    other = through(error)
    assert (type(other), str(other), other.args) == (cls, str(error), error.args)
    assert vars(other) == vars(error)
    assert other.retriable is error.retriable


@pytest.mark.parametrize("cls", [txmq.Message, LargeMessage])
def test_a_consumers_message_is_pickled_without_the_consumer(cls: type[txmq.Message]) -> None:
    message = cls("orders", 1, 2, b"key", b"value", {"h": b"1"}, "tag", 3, "a-b-1-1")
    message.consumer = threading.Lock()
    other = pickle.loads(pickle.dumps(message))
    assert other == message
    assert not hasattr(other, "consumer")
    assert copy.copy(message).consumer is message.consumer


CAUGHT = {
    "BrokerAwayError", "BrokerError", "DeliveryUnknownError", "HeuristicError", "OutcomeUnknownError",
    "RolledBackError", "TxmqError", "UnknownTopicError",
}  # fmt: skip


def test_the_top_has_the_eight_errors_that_programs_catch() -> None:
    assert {name for name in txmq.__all__ if name.endswith("Error")} == CAUGHT
    assert all(getattr(txmq, name) is getattr(errors, name) for name in CAUGHT)


def test_the_version_is_that_of_the_package() -> None:
    run = [sys.executable, "-m", "txmq", "version", "--json"]
    said = json.loads(subprocess.run(run, capture_output=True, check=True).stdout)
    assert said["version"] == txmq.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", txmq.__version__)


def test_error_outside_the_top_level_is_named_with_its_module() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'SpoolFullError': it is txmq\.errors\.SpoolFullError$"):
        txmq.SpoolFullError  # type: ignore[attr-defined]  # noqa: B018


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    for name in ("nonsense", "XACode", "TYPE_CHECKING_"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'$"):
            getattr(txmq, name)


@pytest.mark.parametrize("name", txmq.__all__)
def test_a_public_name_is_that_of_its_object(name: str) -> None:
    assert getattr(txmq, name).__name__ in (name, f"txmq.{name}")


def test_the_list_of_public_names_is_sorted_and_whole() -> None:
    assert txmq.__all__ == sorted(txmq.__all__)
    assert dir(txmq) == txmq.__all__


def _loaded(program: str) -> set[str]:
    code = f"import sys, txmq; {program}; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_importing_txmq_loads_its_errors_and_no_third_party() -> None:
    loaded = _loaded("txmq.RolledBackError")
    assert {name for name in loaded if name.startswith("txmq.")} == {"txmq.errors"}
    assert not loaded & {"aiokafka", "cramjam", "structlog"}


def test_naming_mysql_resource_needs_no_driver() -> None:
    assert "MySQLdb" not in _loaded("txmq.MySQLResource, txmq.connect")


def test_a_broker_that_is_alone_does_not_load_kazoo() -> None:
    assert "kazoo" not in _loaded("import txmq.broker.shell.process, txmq.cli.broker")
