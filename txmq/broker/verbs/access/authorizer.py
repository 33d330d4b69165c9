"""The authorizer: the one place where a connection's permissions are asked.

Theory of operation. ``ClientConnection.permissions`` is None while the broker has no users: then nothing is asked, and
nothing is looked up. From the first user on every connection has permissions, made anew where they are stale, so a
change of users or grants counts from the next question on. What waits (a poll, a heartbeat) is asked once more when it
is answered.

Invariants:
    * what a verb names and may not be touched is refused before anything is told of it, its existence included;
    * what is prepared was asked before: its commit, its place and what waits for it ask nothing, so that a grant that
      is revoked meanwhile breaks no promise.
"""

from __future__ import annotations

from typing import Final

from txmq.broker.client_connection import ClientConnection
from txmq.broker.cluster.cluster_view import DoubtfulUsersError
from txmq.broker.context import Context
from txmq.broker.state.principals import Permissions, of_nobody
from txmq.errors import ForbiddenError, UnauthenticatedError
from txmq.protocol.grants import BROKER, WHOLE

STILL_MS_MAX: Final = 700  # between two ticks; a change of users reaches a home that runs within a second
TOPIC: Final = "topic"
GROUP: Final = "group"
RESOURCE: Final = "resource"
READ: Final = "read"
WRITE: Final = "write"
DESCRIBE: Final = "describe"
SETTLE: Final = "settle"
INSTALL: Final = "install"
ALTER: Final = "alter"
DELETE: Final = "delete"


def permissions_of(context: Context, client: ClientConnection) -> Permissions | None:
    """What a connection may do now; None while there are no users, and nothing is asked."""
    known, principals = client.permissions, context.state.principals
    if known is not None and (known.version != principals.version or known.user != client.user):
        known = client.permissions = Permissions(principals.speaker(client.user), principals.version)
    return known


def certain_permissions(context: Context, client: ClientConnection) -> Permissions | None:
    """The same, unless this process stood still, and its user may be removed by now.

    Raises:
        DoubtfulUsersError: the registry must be asked first.
    """
    if client.permissions is not None and doubt_users(context):
        raise DoubtfulUsersError("whether users were removed while this broker stood still is being asked; try again")
    return permissions_of(context, client)


def doubt_users(context: Context) -> bool:
    """Whether to ask the registry first if users were removed while the process stood still."""
    view = context.cluster
    if view is None:
        return False
    if context.now_ms - context.ticked_ms > STILL_MS_MAX:
        context.ticked_ms = context.now_ms  # it is known now that it stood still
        view.stood_still(is_serving=context.is_serving)
    return context.is_serving and view.refreshes_done < view.doubt


def require(context: Context, client: ClientConnection, operation: str, kind: str, name: str | bytes) -> None:
    """Refuse what the connection's user may not.

    Raises:
        UnauthenticatedError: it has not logged in, or its user is no more.
        ForbiddenError: the text says which grant is missing.
    """
    known = certain_permissions(context, client)
    if known is None or known.may(operation, kind, name):
        return
    refuse_nobody(known)
    text = name if isinstance(name, str) else name.decode("ascii", "replace")
    raise ForbiddenError(
        f"{known.user} may not {operation} {kind} {text[:200]}: an administrator grants it, "
        f"txmq acl add {known.user} --may {operation} --{kind} {text[:200]}"
    )


def require_any(context: Context, client: ClientConnection, operation: str, kind: str) -> None:
    """Refuse users without the grant for any thing of the kind.

    Raises:
        UnauthenticatedError, ForbiddenError: as ``require``.
    """
    known = certain_permissions(context, client)
    if known is not None and not known.has(operation, kind):
        refuse_nobody(known)
        raise ForbiddenError(
            f"{known.user} may not {operation} any {kind}: an administrator grants it, "
            f"txmq acl add {known.user} --may {operation} --{kind} <name>"
        )


def require_administrator(context: Context, client: ClientConnection, what: str) -> None:
    """Refuse everybody else.

    Raises:
        UnauthenticatedError, ForbiddenError: as ``require``.
    """
    known = permissions_of(context, client)
    if known is not None and not known.is_administrator:
        refuse_nobody(known)
        raise ForbiddenError(
            f"{what}: {known.user} is no administrator; one makes others by txmq acl add {known.user} --administrator"
        )


def refuse_nobody(known: Permissions) -> None:
    """Refuse a connection that speaks for no user.

    Raises:
        UnauthenticatedError: log in first.
    """
    if not known.user:
        raise UnauthenticatedError(
            "this broker has users: log in as one of them, txmq://USER@HOST (on the wire, the verb auth)"
        )


def is_administrator(context: Context, client: ClientConnection) -> bool:
    """Whether it may do everything: as an administrator, or because there are no users."""
    known = permissions_of(context, client)
    return known.is_administrator if known is not None else context.knows_users


def sees(context: Context, client: ClientConnection, kind: str, name: str | bytes) -> bool:
    """Whether a list shows a thing: any grant on it is enough, and so is the one to watch the broker.

    While a home waits for its registry it shows none: there may be users of whom it has not heard.
    """
    known = permissions_of(context, client)
    if known is None:
        return context.knows_users
    return known.may(DESCRIBE, BROKER, WHOLE) or known.may_any(kind, name)


def require_seen(context: Context, client: ClientConnection, kind: str, name: str | bytes) -> None:
    """Refuse to describe a thing that the connection's user may not see (``sees``).

    Raises:
        UnauthenticatedError, ForbiddenError: as ``require``.
    """
    known = permissions_of(context, client)
    if known is not None and not sees(context, client, kind, name):
        refuse_nobody(known)
        text = name if isinstance(name, str) else name.decode("ascii", "replace")
        raise ForbiddenError(
            f"{known.user} may do nothing with {kind} {text[:200]}: an administrator grants what is to be done with "
            f"it, txmq acl add {known.user} --may <operation> --{kind} {text[:200]}"
        )


def watches(context: Context, client: ClientConnection) -> bool:
    """Whether it is told figures of the broker that name what others have."""
    known = permissions_of(context, client)
    return known.may(DESCRIBE, BROKER, WHOLE) if known is not None else context.knows_users


def strangers_from_now_on(context: Context) -> None:
    """The first user was made: nobody is served without a login any more."""
    for client in context.clients.values():
        client.permissions = of_nobody()


def log_out(context: Context, user: str) -> None:
    """A user is no more: connections in that name are nobody's, also if another user is given the name later."""
    for client in context.clients.values():
        if client.user == user:
            client.user, client.permissions = "", of_nobody()
