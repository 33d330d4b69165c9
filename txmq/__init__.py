"""txmq: transactional messaging. Write the row and publish the event in one provable act.

The public names. Every error is in ``txmq.errors``; those that programs catch most are here as well. A module that
defines a name is loaded when the name is first used: ``import txmq`` alone loads ``txmq.errors`` and nothing else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from txmq import errors
from txmq.errors import (
    BrokerAwayError,
    BrokerError,
    DeliveryUnknownError,
    HeuristicError,
    OutcomeUnknownError,
    RolledBackError,
    TxmqError,
    UnknownTopicError,
)

if TYPE_CHECKING:
    from txmq.client import *
    from txmq.model import *
    from txmq.outbox import Outbox
    from txmq.xa import LastResource, MySQLResource
    from txmq.xid import *

    __version__: str

__all__ = [
    "BrokerAwayError",
    "BrokerError",
    "CheckRequest",
    "Client",
    "Consumer",
    "ConsumerOptions",
    "DatabaseOffsetStore",
    "DeliveryUnknownError",
    "FileOffsetStore",
    "FixedSelector",
    "HalfMessage",
    "HeuristicError",
    "KafkaPartitionSelector",
    "KeyHashSelector",
    "LastResource",
    "Message",
    "MySQLResource",
    "OffsetPosition",
    "OffsetStore",
    "OffsetStoreWithTransactions",
    "OrderedMessageProducer",
    "OrderedOptions",
    "Outbox",
    "Outcome",
    "OutcomeUnknownError",
    "PartitionRange",
    "PartitionSelector",
    "Producer",
    "Resolution",
    "RetentionPolicy",
    "RolledBackError",
    "RoundRobinSelector",
    "SendResult",
    "SendStatus",
    "Storage",
    "StoredOffset",
    "TopicConfig",
    "Transaction",
    "TransactionKind",
    "TxId",
    "TxmqError",
    "UnknownTopicError",
    "Xid",
    "ZooKeeperOffsetStore",
    "connect",
    "errors",
]

if not TYPE_CHECKING:  # a type checker would take any name for one that __getattr__ knows

    def __getattr__(name: str) -> object:
        if name == "__version__":
            return import_module("txmq.runtime.build").VERSION
        if name in __all__:
            for home in ("txmq.model", "txmq.xid", "txmq.xa", "txmq.outbox", "txmq.client"):
                module = import_module(home)
                if hasattr(module, name):
                    globals()[name] = getattr(module, name)
                    return globals()[name]
        hint = f": it is txmq.errors.{name}" if hasattr(errors, name) else ""
        raise AttributeError(f"module 'txmq' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return __all__
