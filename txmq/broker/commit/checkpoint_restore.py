"""A checkpoint's content and its payloads become the state again; redo goes on from there."""

from __future__ import annotations

from typing import Any

from txmq.broker.commit.prepared_payloads import PayloadFiles
from txmq.broker.state.producer_sequences import Sequences
from txmq.broker.state.session import BrokerSession
from txmq.broker.state.spark_queries import Queries
from txmq.broker.state.state import State
from txmq.broker.state.transaction import PreparedPart, Transaction, TransactionState
from txmq.redo import entries


def restore(state: State, snapshot: dict[str, Any], payloads: PayloadFiles, lsn: int) -> None:
    """The reverse of ``State.snapshot``, into an empty state.

    Args:
        lsn: the checkpoint's.

    Raises:
        CorruptRecordError: the payload of a transaction is missing or damaged.
    """
    state.life = snapshot["life"]
    _restore_topics(state, snapshot)
    for fields in snapshot["sessions"]:
        state.put_session(BrokerSession.restore(*fields))
    state.issued_sessions.restore(snapshot["issued_sessions"])
    state.next_session, state.next_order = snapshot["next_session"], snapshot["next_order"]
    state.epoch = snapshot["epoch"]
    for fields in snapshot["transactions"]:
        transaction = Transaction.restore(lsn, *fields)
        state.transactions[transaction.name] = transaction
        if transaction.state is TransactionState.OPEN:
            state.streams[transaction.name] = transaction
    for transaction, payload in payloads.read(state.transactions.values()):
        _attach(state, transaction, payload)
    state.decisions.restore(snapshot["decisions"], state.partition)
    state.branch_parts.restore(snapshot.get("branch_parts", ()), state.decisions.barriers)
    state.saved.restore(snapshot["groups"])
    state.saved.generation_floor = snapshot.get("generation_floor", 0)
    state.queries.restore(snapshot.get("queries") or Queries().snapshot())
    state.registration.restore(snapshot.get("registration"))
    state.fencing_tokens.restore(snapshot.get("fencing_tokens", ()))
    state.outbox_chains.restore(snapshot.get("outbox_chains", ()))
    state.principals.restore(snapshot.get("principals"))
    _derive(state)


def _restore_topics(state: State, snapshot: dict[str, Any]) -> None:
    for fields in snapshot["topics"]:
        state.redo_topic(fields)
    state.topics.next_id = snapshot["next_topic_id"]
    for topic_id, number, frozen, producers in snapshot["partitions"]:
        partition = state.partitions_of[topic_id][number]
        partition.restore(frozen)
        for producer, *sequences in producers:
            state.sequences.keep(producer, partition, Sequences.restore(*sequences))


def _attach(state: State, transaction: Transaction, entry: entries.Payload) -> None:
    part = PreparedPart(entry.topic_id, entry.partition, bytearray(entry.batch), entry.count, entry.max_timestamp_ms)
    transaction.attach(part)
    state.payload_bytes += len(part.batch)


def _derive(state: State) -> None:
    """What follows from the rest, and is not in a checkpoint."""
    for session in state.sessions.values():
        state.sequences.take(session.number, session.user)
    for transaction in state.transactions.values():
        state.share(transaction.session, transaction.state is TransactionState.OPEN, transaction.size_bytes)
    in_doubt = [t for t in state.transactions.values() if t.state is not TransactionState.OPEN]
    for transaction in sorted(in_doubt, key=lambda t: t.order):
        state.list_in_doubt(transaction)
    for decided in state.decisions.incomplete.values():
        state.owe(decided.name[0], 1)
        decided.is_placed = decided.name not in state.transactions
        if decided.is_placed and not decided.barrier.is_ended:
            state.saved.hold(decided.name, decided.meta.get("offsets", ()), state.partition)
    for part in state.branch_parts.held.values():
        state.saved.hold(part.name, part.offsets, state.partition)
    state.decisions.barriers.restored()
