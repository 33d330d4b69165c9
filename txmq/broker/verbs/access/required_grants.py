"""What each verb asks of whom: one table, verb x thing x grant. What is not in it is served to administrators alone.

A verb asks either before it is called, of the things that its line names (``argument``, ``word``), or by itself, of
what its body, its partition or its transaction names (``where``): ``authorizer.require`` answers both. Lists ask
nothing and leave out what one may not see. docs/protocol.md, "What users may", is this table for people; a test walks
every row of it with every grant.

*Acting for users between homes* has a table of its own (``ACTS``): what a broker asks of another home x whose grants
are checked for it. A broker asks other homes about transactions because a user here prepared or decided one. It has no
grants of its own for that: each ask names that user (``for=``), under a name that no later user has
(``Principals.life_of``), and the other home serves it as it would serve that user. So to name somebody else's
transaction in ``of=`` or ``homes=`` gives nobody a say in it.

Where the transaction that is asked about names the one that is asked for, its own user has put it into that home's
hands, and no grant is asked: a decision that lists a branch (``homes=``) is told to the branch, whatever became of its
user, and so is a branch that names the decision (``of=``) to that.

An ask that is refused settles nothing: the branch stays in doubt (``branch_resolving``). A decision may still come that
lists it, and a guess would tear that apart.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Final, NamedTuple

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.broker.state.decisions import Name
from txmq.broker.state.principals import Permissions
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
    permissions_of,
    refuse_nobody,
    require,
    require_administrator,
)
from txmq.broker.verbs.access.transaction_owners import refuse_others, settles
from txmq.errors import ForbiddenError
from txmq.protocol.requests import Request, RequestFields
from txmq.protocol.scram import home_of
from txmq.xid import TxId


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
    b"follow": _FOR_ADMINISTRATORS,  # and replicas of this home
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
        if verb != b"follow" or home_of(client.user) != context.state.home:
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


FOR: Final = b"for"
Given = dict[bytes, bytes]


class Act(NamedTuple):
    """One row.

    Attributes:
        what: the asking broker does.
        whose: for whom.
        own: the word that names the asking home's transaction.
        is_named: whether the transaction that is asked about names that one; then nobody's grants are asked.
        asks: else the user is the transaction's, or may settle it. False: nothing is asked, because nothing is told or
            done of what is not listed.
    """

    what: str
    whose: str
    own: bytes
    is_named: Callable[[Context, Name, str], bool]
    asks: bool = True


def _lists(context: Context, name: Name, branch: str) -> bool:
    """Whether a transaction is prepared or decided with the branch."""
    decided, transaction = context.state.decisions.incomplete.get(name), context.state.transactions.get(name)
    if decided is not None and branch in decided.homes:
        return True
    return transaction is not None and bool(transaction.meta) and branch in transaction.meta.get("homes", ())


def _is_of(context: Context, name: Name, deciding: str) -> bool:
    """Whether a transaction, prepared or placed, is a branch of that one."""
    transaction, part = context.state.transactions.get(name), context.state.branch_parts.unreported.get(name)
    if transaction is not None and transaction.meta:
        return bool(transaction.meta.get("of") == deciding)
    return part is not None and part.of == deciding


_BRANCHS: Final = "the user who prepared the branch"

ACTS: Final[dict[tuple[bytes, frozenset[bytes]], Act]] = {
    (b"outcome", frozenset({b"branch", b"owner"})): Act("asks what became of it", _BRANCHS, b"branch", _lists),
    (b"outcome", frozenset({b"branch", b"owner", b"fence"})): Act("has it end", _BRANCHS, b"branch", _lists),
    (b"complete", frozenset({b"branch"})): Act("reports its part", _BRANCHS, b"branch", _lists, asks=False),
    (b"outcome", frozenset({b"of"})): Act("reminds of it", "the user whose decision it is", b"of", _is_of),
}
_TALK: Final = frozenset({b"ping", b"quit", b"version", b"help"})


def admit_peer(client: ClientConnection, verb: bytes, extensions: RequestFields) -> None:
    """Refuse what no broker asks of another one; which transactions are meant is asked by the verb (``refuse_acts``).

    Raises:
        ForbiddenError: there is no such act, it names nobody, or another home's transaction.
    """
    given = extensions or {}
    if verb in _TALK or (verb == b"hello" and b"session" not in given):
        return
    act = ACTS.get((verb, frozenset(given) - {FOR}))
    text = verb.decode("ascii", "replace")
    if act is None or FOR not in given:
        raise ForbiddenError(f"{text}: brokers ask each other about branches only, and say for whom")
    if _home(given[act.own]) != home_of(client.user):
        raise ForbiddenError(f"{text}: {client.user} is not the home of {given[act.own][:80].decode()}")


def refuse_acts(context: Context, client: ClientConnection, name: Name, given: Given, verb: bytes) -> None:
    """Refuse users that may not know or settle a transaction, and brokers that act for such a user.

    Raises:
        UnauthenticatedError, ForbiddenError: as ``transaction_owners.refuse_others``.
    """
    known = permissions_of(context, client)
    if known is None:
        return
    if not known.is_peer:
        if FOR in given:
            raise ForbiddenError("for= is the word of brokers: they say for whom they ask")
        refuse_others(context, client, name)
        return
    act = ACTS[verb, frozenset(given) - {FOR}]
    if not act.asks or act.is_named(context, name, given[act.own].decode()):
        return
    life = given[FOR].decode()
    if not _is_served(context, life, name):
        raise ForbiddenError(
            f"transaction {context.txid_of(name)} is another user's than {life[:220]}, for whom a broker {act.what}"
        )


def owner_of(context: Context, name: Name) -> str:
    """Whose a transaction is, as other homes are told: for that user this broker asks them."""
    session = context.state.sessions.get(name[0])
    return context.state.principals.life_of("" if session is None else session.user)


def acting_for(given: Given) -> dict[str, str]:
    """For whom a broker asks, for the audit's line; nothing if it is no broker."""
    return {"acting_for": given[FOR].decode()} if FOR in given else {}


def _is_served(context: Context, life: str, name: Name) -> bool:
    principals = context.state.principals
    if life == owner_of(context, name):
        return True
    user = principals.living(life)
    return user is not None and settles(context, Permissions(user, principals.version), name)


def _home(txid: bytes) -> int | None:
    try:
        return TxId.parse(txid.decode("ascii", "replace")).home
    except ValueError:
        return None
