"""Acting for users between homes: one table, what a broker asks of another home x whose grants are checked for it.

Theory of operation. A broker asks other homes about transactions because a user here prepared or decided one. It has no
grants of its own for that: each ask names that user (``for=``), under a name that no later user has
(``Principals.life_of``), and the other home serves it as it would serve that user. So to name somebody else's
transaction in ``of=`` or ``homes=`` gives nobody a say in it.

Where the transaction that is asked about names the one that is asked for, its own user has put it into that home's
hands, and no grant is asked: a decision that lists a branch (``homes=``) is told to the branch, whatever became of its
user, and so is a branch that names the decision (``of=``) to that.

An ask that is refused settles nothing: the branch stays in doubt (``resolving``). A decision may still come that lists
it, and a guess would tear that apart.

``required_grants`` has what users ask for themselves. A test walks both tables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.broker.state.decisions import Name
from txmq.broker.state.principals import Permissions
from txmq.broker.verbs.access.authorizer import permissions_of
from txmq.broker.verbs.access.transaction_owners import refuse_others, settles
from txmq.broker.verbs.transaction_checks import txid_of
from txmq.errors import ForbiddenError
from txmq.protocol.interbroker_login import home_of
from txmq.protocol.requests import RequestFields
from txmq.xid import TxId

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
            f"transaction {txid_of(context, name)} is another user's than {life[:220]}, for whom a broker {act.what}"
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
