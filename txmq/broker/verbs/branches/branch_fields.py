"""The words of transactions over homes in a request: ``of=``, ``held`` and ``homes=``; and a decision's databases.

A *branch* is the part of a transaction at a home that does not decide it. It is prepared under a txid of that home, and
names the deciding transaction with ``of=``. The decision lists its branches with ``homes=``: the txid of each.
"""

from __future__ import annotations

from typing import Any

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.broker.verbs.access.authorizer import INSTALL, RESOURCE, require
from txmq.errors import BadRequestError
from txmq.protocol.branches import split_branches
from txmq.xid import TxId

HOMES_MAX = 32  # so that they fit a line
Given = dict[bytes, bytes]


def deciding(context: Context, given: Given) -> dict[str, Any]:
    """What ``of=`` and ``held`` say of a part, for its meta; nothing if the transaction is this home's alone.

    Raises:
        BadRequestError: it is not the id of another home's transaction.
    """
    text = given.get(b"of")
    if text is None:
        if b"held" in given:
            raise BadRequestError("held is said of a part of another home's transaction: of=<txid>")
        return {}
    _elsewhere(context, text, "of=")
    stated: dict[str, Any] = {"of": text.decode()}  # an id has one form
    if b"held" in given:
        stated["held"] = True
    return stated


def homes(context: Context, given: Given) -> dict[str, Any]:
    """What ``homes=`` says of a transaction, for its meta; nothing if it has no branch at another home.

    Raises:
        BadRequestError: they are not ids of other homes' transactions, one each.
    """
    text = given.get(b"homes")
    if text is None:
        return {}
    listed = text.split(b",")
    known = {_elsewhere(context, word, "homes=").home for word in listed}
    if len(listed) > HOMES_MAX:
        raise BadRequestError(f"homes= has {len(listed)} branches, at most {HOMES_MAX}")
    if len(known) != len(listed):
        raise BadRequestError("homes= has two branches of one home")
    return {"homes": text.decode().split(",")}


def databases(
    context: Context, client: ClientConnection, body: bytes | bytearray, given: Given
) -> tuple[list[dict[str, Any]], int]:
    """The branches in databases of a decision, and where its parts begin.

    Raises:
        BadRequestError: they are malformed.
        ForbiddenError: the connection's user may have no transactions with one of the databases.
    """
    branches, start = split_branches(body, int(given.get(b"branches", 0)))
    if client.permissions is not None:
        for branch in branches:
            require(context, client, INSTALL, RESOURCE, branch["uuid"])
    return branches, start


def _elsewhere(context: Context, text: bytes, word: str) -> TxId:
    if context.cluster is None:
        raise BadRequestError(f"{word} needs other homes: this broker is alone")
    try:
        txid = TxId.parse(text.decode("ascii", "replace"))
    except ValueError as error:
        raise BadRequestError(f"{word} {error}") from None
    if txid.cluster != context.identity.cluster or txid.home == context.identity.node or txid.counter < 1:
        raise BadRequestError(f"{word} {txid} is not a transaction of another home of this cluster")
    return txid
