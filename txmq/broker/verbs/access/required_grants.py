"""What each verb asks of whom: one table, verb x thing x grant. What is not in it is served to administrators alone.

A verb asks either before it is called, of the things that its line names (``argument``, ``word``), or by itself, of
what its body, its partition or its transaction names (``where``): ``authorizer.require`` answers both. Lists ask
nothing and leave out what one may not see. docs/protocol.md, "What users may", is this table for people; a test walks
every row of it with every grant. What brokers ask of each other for users has a table of its own
(``acting_for_users``).
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.broker.verbs.access.acting_for_users import admit_peer
from txmq.broker.verbs.access.authorizer import (
    ALTER,
    DELETE,
    DESCRIBE,
    GROUP,
    INSTALL,
    READ,
    RESOURCE,
    SETTLE,
    TOPIC,
    WRITE,
    certain_permissions,
    refuse_nobody,
    require,
    require_administrator,
)
from txmq.protocol.requests import Request


class Who(enum.Enum):
    """Who is served at all."""

    ANYBODY = "anybody"  # without a login, too
    USERS = "users"
    ADMINISTRATORS = "administrators"


class Ask(NamedTuple):
    """One question of a verb.

    Attributes:
        argument: index of the request's argument that names the thing.
        word: the extension that names it; asked if it is stated.
        where: else the verb asks: of what.
    """

    operation: str
    kind: str
    argument: int | None = None
    word: bytes = b""
    where: str = ""


class Rule(NamedTuple):
    """The row of a verb, or of an action of it; all of ``asks`` must be granted."""

    asks: tuple[Ask, ...] = ()
    who: Who = Who.USERS


_PARTS: Final = Ask(WRITE, TOPIC, where="each part, streamed ones too")
_OFFSETS: Final = Ask(READ, GROUP, where="offsets=")
_OTHERS: Final = Ask(SETTLE, RESOURCE, where="a transaction of another user")
_UUID: Final = Ask(INSTALL, RESOURCE, word=b"uuid")
_GROUP: Final = Ask(READ, GROUP, argument=1)
_ALTER: Final = Ask(ALTER, GROUP, argument=1)
_DELETE: Final = Rule((Ask(DELETE, GROUP, argument=1),))
_DECIDE: Final = Rule((Ask(SETTLE, GROUP, argument=1),))
_SHOWN: Final = Ask(DESCRIBE, TOPIC, where="what is shown; any other grant on it does, too")
_OF_GROUP: Final = Rule((_GROUP,))
_FOR_ANYBODY: Final = Rule(who=Who.ANYBODY)
_FOR_ADMINISTRATORS: Final = Rule(who=Who.ADMINISTRATORS)
_LISTED: Final = Rule()  # rows that one may not see are left out

RULES: Final[dict[bytes, Rule | dict[bytes, Rule]]] = {
    b"hello": _FOR_ANYBODY,  # without a session
    b"end": Rule(),
    b"auth": _FOR_ANYBODY,
    b"version": _FOR_ANYBODY,
    b"help": _FOR_ANYBODY,
    b"quit": _FOR_ANYBODY,
    b"ping": _FOR_ANYBODY,
    b"put": Rule((Ask(WRITE, TOPIC, where="its partition"),)),
    b"get": Rule((Ask(READ, TOPIC, where="its partition, and again when it is answered"),)),
    b"offset": Rule((_SHOWN,)),
    b"meta": Rule((_SHOWN,)),
    b"prepare": Rule(
        (_PARTS, _OFFSETS, _UUID, Ask(READ, GROUP, word=b"group"), Ask(READ, GROUP, word=b"query")),
    ),
    b"commit": Rule((_PARTS, _OFFSETS, _OTHERS)),
    b"rollback": Rule((_UUID, _OTHERS)),
    b"outcome": Rule((_OTHERS,)),
    b"decide": Rule((_PARTS, _OFFSETS, Ask(INSTALL, RESOURCE, where="each branch"))),
    b"complete": Rule((_OTHERS,)),
    b"forget": Rule((_OTHERS,)),
    b"token": Rule((Ask(INSTALL, RESOURCE, where="its uuid, or settle; of adopted only the former"),)),
    b"outbox": Rule((Ask(INSTALL, RESOURCE, where="its uuid; forget is an administrator's"),)),
    b"recover": _LISTED,
    b"parts": Rule((_OTHERS, Ask(READ, TOPIC, where="each part of a transaction of another user"))),
    b"checks": Rule((Ask(READ, GROUP, argument=0),)),
    b"group": {
        b"join": Rule((_GROUP, Ask(READ, TOPIC, where="topics="))),
        b"heartbeat": _OF_GROUP,
        b"elsewhere": _OF_GROUP,
        b"leave": _OF_GROUP,
        b"save": _OF_GROUP,
        b"describe": Rule((Ask(DESCRIBE, GROUP, where="what is shown; any grant on it will do"),)),
        b"list": _LISTED,
        b"reset": Rule((_ALTER, Ask(READ, TOPIC, where="each row"))),
        b"deferred": Rule((_ALTER, Ask(READ, TOPIC, where="each row"))),
        b"delete": _DELETE,
    },
    b"query": {
        b"epoch": Rule((Ask(SETTLE, GROUP, where="any"),)),
        b"open": _DECIDE,
        b"commit": _DECIDE,
        b"abort": _DECIDE,
        b"list": _LISTED,
        b"delete": _DELETE,
    },
    b"resource": {
        b"report": Rule((Ask(SETTLE, RESOURCE, where="uuid in the body, or any if that is null"),)),
        b"list": _LISTED,
    },
    b"topic": {
        b"create": Rule((Ask("create", TOPIC, argument=1),)),
        b"alter": Rule((Ask(ALTER, TOPIC, argument=1),)),
        b"delete": Rule((Ask(DELETE, TOPIC, argument=1),)),
        b"describe": Rule((_SHOWN,)),
        b"list": _LISTED,
    },
    b"cluster": {b"homes": _LISTED, b"describe": _LISTED, b"retire": _FOR_ADMINISTRATORS},
    b"stats": _LISTED,  # items that name what others have: ``describe`` on the broker
    b"user": _FOR_ADMINISTRATORS,
    b"acl": _FOR_ADMINISTRATORS,
    b"quota": _FOR_ADMINISTRATORS,
}


def rule_of(verb: bytes, arguments: list[bytes]) -> Rule:
    """The row of a request; a verb or an action that has none is the administrators'."""
    rule = RULES.get(verb, _FOR_ADMINISTRATORS)
    if isinstance(rule, dict):
        return rule.get(arguments[0], _FOR_ADMINISTRATORS)
    return rule


def admit(context: Context, client: ClientConnection, request: Request) -> None:
    """Refuse a request whose line names what its user may not; asked of each request while there are users.

    Raises:
        UnauthenticatedError: it has not logged in, or its user is no more.
        ForbiddenError: the text says which grant is missing.
    """
    verb, arguments, extensions, _body, _opaque = request
    rule, known = rule_of(verb, arguments), certain_permissions(context, client)
    if known is not None and known.is_peer:
        admit_peer(client, verb, extensions)
        return
    if rule.who is Who.ANYBODY or known is None:
        return
    refuse_nobody(known)
    if known.is_administrator:
        return
    if rule.who is Who.ADMINISTRATORS:
        require_administrator(context, client, verb.decode())
    for ask in rule.asks:
        if ask.argument is not None:
            require(context, client, ask.operation, ask.kind, arguments[ask.argument])
        elif ask.word and extensions is not None and ask.word in extensions:
            require(context, client, ask.operation, ask.kind, extensions[ask.word])
