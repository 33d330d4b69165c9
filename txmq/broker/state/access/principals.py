"""Users, what they may do, and quotas. A fold over the journal.

With a registry they are a copy of what that has (``access_records.py``), and ``registry_version`` says of which
version.

Invariants:
    * each entry says all of what it is about as it is from now on: redone twice it has the effect of once;
    * once there is a user there is an administrator, who may do everything: verbs refuse to remove the last one;
    * no password is kept, only its SCRAM keys;
    * a name that is given to another user brings nothing of the former one's, which is under ``life_of`` by then.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from txmq.broker.state.session import BrokerSession
from txmq.errors import UnknownUserError
from txmq.protocol.grants import ADMINISTRATOR, Allowed, Grant
from txmq.protocol.interbroker_login import is_peer
from txmq.protocol.scram import ScramKeys
from txmq.redo import entries

NOBODY: Final = "-"
KINDS: Final = frozenset(
    {entries.USER, entries.USER_REMOVED, entries.GRANTED, entries.QUOTA_SET, entries.ACCESS, entries.MADE}
)


class User:
    """One user.

    Attributes:
        keys: of the password; None: has none.
        certificate: subject or alternative name of the client certificate; None: no certificate is this user's.
        grants: in the order in which they were granted.
        allowed: the same, for look-ups.
        made: with a registry the version that made the user; another user of the same name has another one.
    """

    __slots__ = ("_grants", "allowed", "certificate", "keys", "made", "name")

    def __init__(
        self, name: str, keys: ScramKeys | None, certificate: str | None, grants: tuple[Grant, ...] = (), made: int = 0
    ) -> None:
        self.name, self.keys, self.certificate, self.made = name, keys, certificate, made
        self.grants = grants

    @property
    def grants(self) -> tuple[Grant, ...]:
        """See above."""
        return self._grants

    @grants.setter
    def grants(self, grants: tuple[Grant, ...]) -> None:
        self._grants, self.allowed = grants, Allowed(grants)

    @property
    def is_administrator(self) -> bool:
        """Whether this user may do everything."""
        return ADMINISTRATOR in self.grants


class Principals:
    """All users by name, and all quotas.

    Args:
        sessions: of all users, by number.

    Attributes:
        users: the same object for ever; empty while everybody is anonymous.
        quotas: limits by kind ("user" or "topic") and name.
        secret: hex, drawn with the first user; no answer tells it.
        registry_version: of the registry's users, grants and quotas that these are; 0: never any.
        between_brokers: hex, the secret by which brokers of a cluster know each other; empty: there is none.
        version: rises with each change.
        unsettled: by user, how many of the transactions of their sessions are unsettled; sessions count them.
        streams: by user, how many of these are open: streamed, and not prepared or decided.
        payload_bytes: by user, of the messages of both.
        sessions: by user, how many there are.
        sequences: by user, how many sequences their producers have; ``SequenceTable`` counts them.
        made: by kind and name, the user who made a group, topic, query or outbox, and how many it counts for
            (a topic: its partitions). Not those of administrators, nor of before there were users.
        made_sizes: the sums of that, by kind and user.
    """

    def __init__(self, sessions: Mapping[int, BrokerSession] = MappingProxyType({})) -> None:
        self._sessions = sessions
        self.users: dict[str, User] = {}
        self.quotas: dict[tuple[str, str], dict[str, int]] = {}
        self.secret = ""
        self.registry_version, self.between_brokers = 0, ""
        self.version = 0
        self.unsettled: dict[str, int] = {}
        self.streams: dict[str, int] = {}
        self.payload_bytes: dict[str, int] = {}
        self.sessions: dict[str, int] = {}
        self.sequences: dict[str, int] = {}
        self.made: dict[tuple[str, str], tuple[str, int]] = {}
        self.made_sizes: dict[tuple[str, str], int] = {}

    def known(self, name: str) -> User:
        """The user of a name.

        Raises:
            UnknownUserError: there is none.
        """
        user = self.users.get(name)
        if user is None:
            raise UnknownUserError(f"no user is named {name}; txmq user list names those that exist")
        return user

    def speaker(self, name: str) -> User | None:
        """Whom a connection speaks for that has logged in under a name: a user, or another home's broker."""
        if is_peer(name) and self.between_brokers:
            return User(name, None, None)  # has no grants: acts for users (``verbs/access/acting_for_users.py``)
        return self.users.get(name)

    def life_of(self, owner: str) -> str:
        """The owner of a session under a name that no later user has: ``name~made``, or ``-`` for nobody."""
        user = self.users.get(owner)
        return owner or NOBODY if user is None else f"{user.name}~{user.made:x}"

    def living(self, life: str) -> User | None:
        """The user whose life it is (``life_of``); None: is no more, or has not been heard of."""
        name = life.partition("~")[0]
        return self.users.get(name) if name in self.users and self.life_of(name) == life else None

    def is_last_administrator(self, user: User) -> bool:
        """Whether nobody could grant anything without this user."""
        return user.is_administrator and sum(one.is_administrator for one in self.users.values()) == 1

    def fold(self, kind: int, fields: dict[str, Any]) -> None:
        """An entry of one of ``KINDS`` was journaled, or is redone."""
        if kind == entries.MADE:
            self._note_made(fields["kind"], fields["name"], fields["user"], fields["size"])
            return
        self.version += 1
        if kind == entries.USER:
            self._put(fields)
        elif kind == entries.USER_REMOVED:
            self._bury(fields["user"])
            self.quotas.pop(("user", fields["user"]), None)
        elif kind == entries.GRANTED:
            self.users[fields["user"]].grants = tuple(Grant(*grant) for grant in fields["grants"])
        elif kind == entries.ACCESS:
            self.registry_version = fields["version"]
            self.secret, self.between_brokers = fields["secret"], fields["between_brokers"]
        else:
            key = (fields["kind"], fields["name"])
            self.quotas.pop(key, None)
            if fields["limits"]:
                self.quotas[key] = fields["limits"]

    def unmade(self, kind: str, name: str) -> None:
        """It is deleted: it counts no more."""
        user, size = self.made.pop((kind, name), ("", 0))
        if size:
            self.made_sizes[kind, user] -= size
            if not self.made_sizes[kind, user]:
                del self.made_sizes[kind, user]

    def _note_made(self, kind: str, name: str, user: str, size: int) -> None:
        self.unmade(kind, name)
        self.made[kind, name] = user, size
        self.made_sizes[kind, user] = self.made_sizes.get((kind, user), 0) + size

    def _bury(self, name: str) -> None:
        """A user is removed. What there was under the name does not go to a later user of that name."""
        life = self.life_of(name)
        if self.users.pop(name, None) is None:
            return
        if self.sessions.get(name):
            for session in self._sessions.values():
                if session.user == name:
                    session.user = life
        for counts in (self.unsettled, self.streams, self.payload_bytes, self.sessions, self.sequences):
            if name in counts:
                counts[life] = counts.get(life, 0) + counts.pop(name)
        for (kind, thing), (user, size) in list(self.made.items()):
            if user == name:
                self._note_made(kind, thing, life, size)

    def _put(self, fields: dict[str, Any]) -> None:
        name, keys = fields["user"], fields["keys"]
        known = self.users.get(name)
        grants = () if known is None else known.grants
        known_keys = None if keys is None else ScramKeys(*keys)
        self.users[name] = User(name, known_keys, fields["certificate"], grants, fields.get("made", 0))
        self.secret = fields.get("secret", self.secret)

    def freeze(self) -> dict[str, Any] | None:
        """A copy, JSON-able; None while there is nothing to keep."""
        if not (self.users or self.quotas or self.secret or self.registry_version or self.made):
            return None
        of_registry = {"registry_version": self.registry_version, "between_brokers": self.between_brokers}
        return {
            **(of_registry if self.registry_version else {}),
            "secret": self.secret,
            "users": [
                (user.name, user.keys, user.certificate, user.grants, *([user.made] if user.made else []))
                for user in self.users.values()
            ],
            "quotas": [(*key, limits) for key, limits in self.quotas.items()],
            **({"made": [(*key, *by) for key, by in self.made.items()]} if self.made else {}),
        }

    def restore(self, snapshot: dict[str, Any] | None) -> None:
        """The reverse of ``freeze``, into an empty one."""
        if snapshot is None:
            return
        self.secret = snapshot["secret"]
        self.registry_version = snapshot.get("registry_version", 0)
        self.between_brokers = snapshot.get("between_brokers", "")
        for name, keys, certificate, grants, *made in snapshot["users"]:
            self._put({"user": name, "keys": keys, "certificate": certificate, "made": made[0] if made else 0})
            self.users[name].grants = tuple(Grant(*grant) for grant in grants)
        self.quotas = {(kind, name): limits for kind, name, limits in snapshot["quotas"]}
        for made in snapshot.get("made", ()):
            self._note_made(*made)
