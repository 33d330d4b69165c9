"""A fair share: one user makes half at most of the groups, partitions, queries, outboxes and databases.

Administrators are not counted: they make what all use, and raise the setting. What there was before there were users
is nobody's. With a registry each home counts what it was asked for.

Invariant: what a user made counts until it is deleted, whoever deletes it, through restarts (``Principals.made``).
"""

from __future__ import annotations

from typing import Final

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.broker.verbs.access.authorizer import permissions_of
from txmq.errors import OverloadedError
from txmq.redo import entries

TOPIC_SHARE: Final = "topic"  # counted by partitions
GROUP_SHARE: Final = "group"
QUERY_SHARE: Final = "query"
DATABASE_SHARE: Final = "database"
OUTBOX_SHARE: Final = "outbox"


def refuse_over_half(
    context: Context, client: ClientConnection, kind: str, limit: int, setting: str, *, more: int = 1, unsaved: int = 0
) -> None:
    """Refuse to make more of a kind.

    Args:
        limit: how many there may be of all users.
        setting: its name.
        more: how many will be made.
        unsaved: how many of the user's there are that ``note_made`` was not told of.

    Raises:
        OverloadedError: the user has half of them.
    """
    user = counted_user(context, client)
    known = context.state.principals.made_sizes.get((kind, user), 0) + unsaved
    if user and more > 0 and known + more > max(1, limit // 2):
        raise OverloadedError(
            f"{user} has made {known} of {setting} {limit}, half of which is one user's at most: delete some, or have "
            "an administrator make them"
        )


def note_made(context: Context, client: ClientConnection, kind: str, name: str, size: int = 1) -> None:
    """Journal that the connection's user has made it, or that it counts for ``size`` from now on."""
    by, _ = context.state.principals.made.get((kind, name), ("", 0))
    journal_made(context, by or counted_user(context, client), kind, name, size)


def journal_made(context: Context, user: str, kind: str, name: str, size: int = 1) -> None:
    """The same for a named user; without a name nothing is noted."""
    if user:
        fields = {"kind": kind, "name": name, "user": user, "size": size}
        context.group.add_entry(entries.json_entry(entries.MADE, fields))
        context.state.principals.fold(entries.MADE, fields)


def counted_user(context: Context, client: ClientConnection) -> str:
    """The connection's user; empty for nobody and for administrators, whose things are not counted."""
    known = permissions_of(context, client)
    return "" if known is None or known.is_administrator else known.user
