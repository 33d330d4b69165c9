"""txmq: transactional messaging. Write the row and publish the event in one provable act.

The public names. They are loaded when they are first used: ``import txmq`` alone costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from txmq.client import (
        CheckRequest,
        Client,
        Consumer,
        ConsumerOptions,
        FileOffsetStore,
        FixedSelector,
        HalfMessage,
        KafkaPartitionSelector,
        KeyHashSelector,
        MySQLOffsetStore,
        OffsetPosition,
        OffsetStore,
        OffsetStoreWithTransactions,
        OrderedMessageProducer,
        OrderedOptions,
        PartitionSelector,
        Producer,
        RoundRobinSelector,
        StoredOffset,
        connect,
    )
    from txmq.errors import (
        BadRequestError,
        BrokerAwayError,
        BrokerError,
        ClosedError,
        ConfigError,
        ConnectionLostError,
        CorruptRecordError,
        DataLossError,
        DeliveryUnknownError,
        DirectoryInUseError,
        DiskFullError,
        FencedError,
        ForbiddenError,
        GroupActiveError,
        HeuristicCommitError,
        HeuristicError,
        HeuristicHazardError,
        HeuristicMixedError,
        HeuristicRollbackError,
        InvalidBatchError,
        InvalidNameError,
        InvariantError,
        JournalFailedError,
        JournalFullError,
        LocalProtocolError,
        NotOwnerError,
        OffsetOutOfRangeError,
        OutcomeUnknownError,
        OverloadedError,
        ProtocolError,
        RemoteProtocolError,
        RequestTimeoutError,
        RolledBackError,
        SequenceError,
        SessionFullError,
        SpoolFullError,
        StorageError,
        TooLargeError,
        TopicClosedError,
        TopicExistsError,
        TransactionAwayError,
        TransactionConflictError,
        TransactionError,
        TransactionStateError,
        TransactionTimeoutError,
        TxmqError,
        UnavailableError,
        UnknownGroupError,
        UnknownMemberError,
        UnknownQueryError,
        UnknownTopicError,
        UnknownTransactionError,
        XAError,
    )
    from txmq.model import (
        Message,
        Outcome,
        PartitionRange,
        Resolution,
        RetentionPolicy,
        SendResult,
        SendStatus,
        Storage,
        TopicConfig,
        TransactionKind,
    )
    from txmq.xid import TxId, Xid

__all__ = [
    "BadRequestError",
    "BrokerAwayError",
    "BrokerError",
    "CheckRequest",
    "Client",
    "ClosedError",
    "ConfigError",
    "ConnectionLostError",
    "Consumer",
    "ConsumerOptions",
    "CorruptRecordError",
    "DataLossError",
    "DeliveryUnknownError",
    "DirectoryInUseError",
    "DiskFullError",
    "FencedError",
    "FileOffsetStore",
    "FixedSelector",
    "ForbiddenError",
    "GroupActiveError",
    "HalfMessage",
    "HeuristicCommitError",
    "HeuristicError",
    "HeuristicHazardError",
    "HeuristicMixedError",
    "HeuristicRollbackError",
    "InvalidBatchError",
    "InvalidNameError",
    "InvariantError",
    "JournalFailedError",
    "JournalFullError",
    "KafkaPartitionSelector",
    "KeyHashSelector",
    "LocalProtocolError",
    "Message",
    "MySQLOffsetStore",
    "NotOwnerError",
    "OffsetOutOfRangeError",
    "OffsetPosition",
    "OffsetStore",
    "OffsetStoreWithTransactions",
    "OrderedMessageProducer",
    "OrderedOptions",
    "Outcome",
    "OutcomeUnknownError",
    "OverloadedError",
    "PartitionRange",
    "PartitionSelector",
    "Producer",
    "ProtocolError",
    "RemoteProtocolError",
    "RequestTimeoutError",
    "Resolution",
    "RetentionPolicy",
    "RolledBackError",
    "RoundRobinSelector",
    "SendResult",
    "SendStatus",
    "SequenceError",
    "SessionFullError",
    "SpoolFullError",
    "Storage",
    "StorageError",
    "StoredOffset",
    "TooLargeError",
    "TopicClosedError",
    "TopicConfig",
    "TopicExistsError",
    "TransactionAwayError",
    "TransactionConflictError",
    "TransactionError",
    "TransactionKind",
    "TransactionStateError",
    "TransactionTimeoutError",
    "TxId",
    "TxmqError",
    "UnavailableError",
    "UnknownGroupError",
    "UnknownMemberError",
    "UnknownQueryError",
    "UnknownTopicError",
    "UnknownTransactionError",
    "XAError",
    "Xid",
    "connect",
]

_CLIENT = frozenset(
    {
        "Client",
        "Consumer",
        "ConsumerOptions",
        "FileOffsetStore",
        "FixedSelector",
        "HalfMessage",
        "CheckRequest",
        "KafkaPartitionSelector",
        "KeyHashSelector",
        "MySQLOffsetStore",
        "OffsetPosition",
        "OffsetStore",
        "OffsetStoreWithTransactions",
        "OrderedMessageProducer",
        "OrderedOptions",
        "PartitionSelector",
        "Producer",
        "RoundRobinSelector",
        "StoredOffset",
        "connect",
    }
)
_MODEL = frozenset(
    {
        "Message",
        "Outcome",
        "PartitionRange",
        "Resolution",
        "RetentionPolicy",
        "SendResult",
        "SendStatus",
        "Storage",
        "TopicConfig",
        "TransactionKind",
    }
)


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module 'txmq' has no attribute {name!r}")
    home = (
        "txmq.client"
        if name in _CLIENT
        else "txmq.model"
        if name in _MODEL
        else "txmq.xid"
        if name in ("TxId", "Xid")
        else "txmq.errors"
    )
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
