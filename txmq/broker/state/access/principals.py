"""Users, what they may do, and quotas. A fold over the journal.

Invariants:
    * each entry says all of what it is about as it is from now on: redone twice it has the effect of once;
    * once there is a user there is an administrator, who may do everything: verbs refuse to remove the last one;
    * no password is kept, only its SCRAM keys.
"""

from __future__ import annotations

from typing import Any, Final

from txmq.errors import UnknownUserError
from txmq.protocol.grants import ADMINISTRATOR, Grant
from txmq.protocol.scram import ScramKeys
from txmq.redo import entries

KINDS: Final = frozenset({entries.USER, entries.USER_REMOVED, entries.GRANTED, entries.QUOTA_SET})


class User:
    """One user.

    Attributes:
        keys: of the password; None: has none.
        certificate: subject or alternative name of the client certificate; None: no certificate is this user's.
        grants: in the order in which they were granted.
    """

    __slots__ = ("certificate", "grants", "keys", "name")

    def __init__(
        self, name: str, keys: ScramKeys | None, certificate: str | None, grants: tuple[Grant, ...] = ()
    ) -> None:
        self.name, self.keys, self.certificate, self.grants = name, keys, certificate, grants

    @property
    def is_administrator(self) -> bool:
        """Whether this user may do everything."""
        return ADMINISTRATOR in self.grants


class Principals:
    """All users by name, and all quotas.

    Attributes:
        users: the same object for ever; empty while everybody is anonymous.
        quotas: limits by kind ("user" or "topic") and name.
        secret: hex, drawn with the first user; no answer tells it.
        version: rises with each change.
        unsettled: by user, how many of the transactions of their sessions are unsettled; sessions count them.
    """

    def __init__(self) -> None:
        self.users: dict[str, User] = {}
        self.quotas: dict[tuple[str, str], dict[str, int]] = {}
        self.secret = ""
        self.version = 0
        self.unsettled: dict[str, int] = {}

    def known(self, name: str) -> User:
        """The user of a name.

        Raises:
            UnknownUserError: there is none.
        """
        user = self.users.get(name)
        if user is None:
            raise UnknownUserError(f"no user is named {name}; txmq user list names those that exist")
        return user

    def is_last_administrator(self, user: User) -> bool:
        """Whether nobody could grant anything without this user."""
        return user.is_administrator and sum(one.is_administrator for one in self.users.values()) == 1

    def fold(self, kind: int, fields: dict[str, Any]) -> None:
        """An entry of one of ``KINDS`` was journaled, or is redone."""
        self.version += 1
        if kind == entries.USER:
            self._put(fields)
        elif kind == entries.USER_REMOVED:
            self.users.pop(fields["user"], None)
            self.quotas.pop(("user", fields["user"]), None)
        elif kind == entries.GRANTED:
            self.users[fields["user"]].grants = tuple(Grant(*grant) for grant in fields["grants"])
        else:
            key = (fields["kind"], fields["name"])
            self.quotas.pop(key, None)
            if fields["limits"]:
                self.quotas[key] = fields["limits"]

    def _put(self, fields: dict[str, Any]) -> None:
        name, keys = fields["user"], fields["keys"]
        known = self.users.get(name)
        grants = () if known is None else known.grants
        self.users[name] = User(name, None if keys is None else ScramKeys(*keys), fields["certificate"], grants)
        self.secret = fields.get("secret", self.secret)

    def freeze(self) -> dict[str, Any] | None:
        """A copy, JSON-able; None while there is nothing to keep."""
        if not (self.users or self.quotas or self.secret):
            return None
        return {
            "secret": self.secret,
            "users": [(user.name, user.keys, user.certificate, user.grants) for user in self.users.values()],
            "quotas": [(*key, limits) for key, limits in self.quotas.items()],
        }

    def restore(self, snapshot: dict[str, Any] | None) -> None:
        """The reverse of ``freeze``, into an empty one."""
        if snapshot is None:
            return
        self.secret = snapshot["secret"]
        for name, keys, certificate, grants in snapshot["users"]:
            self._put({"user": name, "keys": keys, "certificate": certificate})
            self.users[name].grants = tuple(Grant(*grant) for grant in grants)
        self.quotas = {(kind, name): limits for kind, name, limits in snapshot["quotas"]}
