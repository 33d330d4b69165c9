"""The words of transactions over homes in a request: ``of=``, ``held`` and ``homes=``.

A *branch* is the part of a transaction at a home that does not decide it. It is prepared under a txid of that home, and
names the deciding transaction with ``of=``. The decision lists its branches with ``homes=``: the txid of each.
"""

from __future__ import annotations

from typing import Any

from txmq.broker.context import Context
from txmq.errors import BadRequestError
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
