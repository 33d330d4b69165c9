"""The verb ``parts``: the messages of a prepared transaction, for the operator who has to resolve it."""

from __future__ import annotations

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.broker.state.transaction import TransactionState
from txmq.broker.verbs.access.authorizer import READ, TOPIC, require
from txmq.broker.verbs.access.transaction_owners import is_owner, refuse_others
from txmq.broker.verbs.transaction_checks import locate
from txmq.errors import UnknownTransactionError
from txmq.protocol.answers import Records
from txmq.protocol.requests import Request
from txmq.protocol.transaction_parts import encode_part

ANSWER_SIZE_BYTES = 1 << 20


def parts(context: Context, client: ClientConnection, request: Request) -> None:
    """Answer the parts after the first ``after`` ones, as they stand in a body: one at least, as many as fit 1 MiB."""
    _, arguments, extensions, _body, opaque = request
    txid, session = locate(context, arguments[0])
    refuse_others(context, client, (session.number, txid.counter))
    transaction = context.state.transactions.get((session.number, txid.counter))
    if transaction is None or transaction.state is not TransactionState.PREPARED:
        raise UnknownTransactionError(f"transaction {txid} is not prepared here")
    found, size = list[bytes](), 0
    for part in transaction.parts[int((extensions or {}).get(b"after", 0)) :]:
        topic = context.state.topics.with_id(part.topic_id)
        name = topic.config.name if topic else f"deleted-{part.topic_id}"
        if not is_owner(client, session):
            require(context, client, READ, TOPIC, name)
        piece = b"".join(encode_part(name, part.partition, part.batch))
        if found and size + len(piece) > ANSWER_SIZE_BYTES:
            break
        found.append(piece)
        size += len(piece)
    context.answer_from_state(client, opaque, Records(b"".join(found)))
