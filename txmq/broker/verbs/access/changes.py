"""What the verbs about users have in common: one change is one journal entry, folded as recovery folds it."""

from __future__ import annotations

import json
from typing import Any

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.errors import BadRequestError, InvalidNameError
from txmq.model import is_valid_name
from txmq.protocol.grants import ALL
from txmq.redo import entries


def journal(context: Context, kind: int, fields: dict[str, Any]) -> None:
    """Make a change."""
    if context.cluster is not None:
        raise BadRequestError("users, grants and quotas are kept by a broker without a registry only, so far")
    context.group.add_entry(entries.json_entry(kind, fields))
    context.state.principals.fold(kind, fields)


def tell(context: Context, client: ClientConnection, opaque: bytes, answer: dict[str, Any], *, is_new: bool) -> None:
    """Answer, behind what was journaled now or before."""
    text = json.dumps(answer).encode()
    if is_new:
        context.answer_when_durable(client, opaque, text)
    else:
        context.answer_from_state(client, opaque, text)


def check_name(noun: str, name: str) -> None:
    """Refuse what is no name; ``*`` is none either."""
    if not is_valid_name(name):
        raise InvalidNameError(f"{noun} {name[:80]!r}: 1 to 200 of A-Z a-z 0-9 . _ -, not beginning with . or -")


def chosen(context: Context, name: str) -> list[str]:
    """The names of all users, or of one that is known."""
    principals = context.state.principals
    return list(principals.users) if name == ALL else [principals.known(name).name]
