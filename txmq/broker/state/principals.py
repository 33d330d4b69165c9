"""Users, what they may do, and quotas. A fold over the journal.

``Permissions`` is what one connection may do: its user's grants, and what was asked of them, as of one version of the
principals.

With a registry the principals are a copy of what that has, and ``registry_version`` says of which version.
``records_of`` and ``changes_by`` tell the registry what is here and what changes; ``entries_between`` says what the
journal needs, so that the principals become the registry's.

Invariants:
    * each entry says all of what it is about as it is from now on: redone twice it has the effect of once;
    * once there is a user there is an administrator, who may do everything: verbs refuse to remove the last one;
    * no password is kept, only its SCRAM keys;
    * a name that is given to another user brings nothing of the former one's, which is under ``life_of`` by then;
    * what no grant covers is denied; a connection without a login has no grants;
    * a change of any user or grant makes permissions stale (``version``): they are made anew before they are asked
      again;
    * after the entries between the two, the principals say what the registry says: whatever they said before;
    * a user who is absent from newer records is removed; nobody is kept because an event was missed;
    * a user who was removed and made anew under the same name is another one (``made``): connections of the first one
      are nobody's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from txmq.broker.state.session import BrokerSession
from txmq.errors import RegistryError, UnknownUserError
from txmq.protocol.grants import ADMINISTRATOR, Allowed, Grant
from txmq.protocol.scram import ScramKeys, is_peer
from txmq.redo import entries
from txmq.registry.cluster_metadata import SECRET, Access, Changes, Record, quota_key, quota_of, user_key, user_of

NOBODY: Final = "-"
KINDS: Final = frozenset(
    {entries.USER, entries.USER_REMOVED, entries.GRANTED, entries.QUOTA_SET, entries.ACCESS, entries.MADE}
)
ANSWERS_MAX: Final = 1000  # that are kept of a connection: names come from requests
NEVER: Final = -1  # no version of the principals
Entry = tuple[int, dict[str, Any]]  # kind and fields, as the journal has them


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
            return User(name, None, None)  # has no grants: acts for users (``verbs/access/required_grants.py``)
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


class Permissions:
    """What one connection may do.

    Attributes:
        user: empty: nobody.
        is_administrator: may do everything.
        is_peer: it is the broker of another home, which asks and tells of branches for users, and nothing else.
        version: of the principals, when these were theirs.
    """

    __slots__ = ("_allowed", "_answers", "is_administrator", "is_peer", "user", "version")

    def __init__(self, user: User | None, version: int) -> None:
        self.user, self.version = "" if user is None else user.name, version
        self._allowed = _NOTHING if user is None else user.allowed
        self.is_administrator = user is not None and user.is_administrator
        self.is_peer = is_peer(self.user)
        self._answers: dict[tuple[str, str, str | bytes], bool] = {}

    def may(self, operation: str, kind: str, name: str | bytes) -> bool:
        """Whether a grant covers it."""
        if self.is_administrator:
            return True
        key = (operation, kind, name)
        found = self._answers.get(key)
        if found is None:
            if len(self._answers) >= ANSWERS_MAX:
                self._answers.clear()
            found = self._answers[key] = self._allowed.covers(operation, kind, _text(name))
        return found

    def may_any(self, kind: str, name: str | bytes) -> bool:
        """Whether a grant covers any operation on a thing: a user who may do anything with it sees it."""
        return self.is_administrator or self._allowed.covers_any(kind, _text(name))

    def has(self, operation: str, kind: str) -> bool:
        """Whether it is granted for any thing at all."""
        return self.is_administrator or self._allowed.has(operation, kind)


_NOTHING: Final = Allowed(())


def _text(name: str | bytes) -> str:
    return name if isinstance(name, str) else name.decode("ascii", "replace")


def of_nobody() -> Permissions:
    """Those of a connection that has not logged in; stale, so that they are made anew when they are asked."""
    return Permissions(None, NEVER)


class Secrets(NamedTuple):
    """What brokers of a cluster know, and nobody else; hex.

    Attributes:
        mock: of salts that unknown users get (``Principals.secret``).
        between_brokers: by which they know each other.
    """

    mock: str = ""
    between_brokers: str = ""


def user_record(
    keys: ScramKeys | None, certificate: str | None, grants: Iterable[Grant], made: int = 0
) -> dict[str, Any]:
    """All of one user."""
    stated = None if keys is None else list(keys)
    return {"keys": stated, "certificate": certificate, "grants": [list(one) for one in grants], "made": made}


def records_of(principals: Principals) -> dict[str, Record]:
    """All users and quotas of a journal."""
    users: dict[str, Record] = {user_key(name): _record_of(user) for name, user in principals.users.items()}
    return users | {quota_key(*key): limits for key, limits in principals.quotas.items()}


def _record_of(user: User) -> dict[str, Any]:
    return user_record(user.keys, user.certificate, user.grants, user.made)


def changes_by(principals: Principals, made: Iterable[Entry]) -> Changes:
    """The records of the registry that new entries change; the principals are as they were before."""
    changes: dict[str, Record | None] = {}
    for kind, fields in made:
        if kind == entries.QUOTA_SET:
            changes[quota_key(fields["kind"], fields["name"])] = fields["limits"] or None
            continue
        key = user_key(fields["user"])
        known = principals.users.get(fields["user"])
        before = changes.get(key) or (
            user_record(None, None, (), principals.registry_version + 1) if known is None else _record_of(known)
        )
        if kind == entries.USER:
            keys = fields["keys"]
            changes[key] = {
                **before,
                "keys": None if keys is None else list(keys),
                "certificate": fields["certificate"],
            }
        elif kind == entries.GRANTED:
            changes[key] = {**before, "grants": [list(grant) for grant in fields["grants"]]}
        else:
            changes[key] = None
            if ("user", fields["user"]) in principals.quotas:
                changes[quota_key("user", fields["user"])] = None
    return changes


def entries_between(principals: Principals, access: Access) -> Iterator[Entry]:
    """What the journal must say, so that the principals become the registry's; the version is the last.

    Raises:
        RegistryError: a record is none that this txmq knows.
    """
    known = decode_access(access)
    for user in list(principals.users.values()):
        if user.name not in known.users or known.users[user.name].made != user.made:
            yield entries.USER_REMOVED, {"user": user.name}  # a new one of that name comes below
    for user in known.users.values():
        yield from _entries_of(principals.users.get(user.name), user)
    quotas = {key: limits for key, limits in principals.quotas.items() if key[0] != "user" or key[1] in known.users}
    for key in [*known.quotas, *(key for key in quotas if key not in known.quotas)]:
        limits = known.quotas.get(key, {})
        if principals.quotas.get(key, {}) != limits:
            yield entries.QUOTA_SET, {"kind": key[0], "name": key[1], "limits": limits}
    if (principals.registry_version, _secrets_of(principals)) != (access.version, known.secrets):
        fields = {"version": access.version, "secret": known.secrets.mock}
        yield entries.ACCESS, {**fields, "between_brokers": known.secrets.between_brokers}


def _entries_of(known: User | None, user: User) -> Iterator[Entry]:
    if known is None or (known.keys, known.certificate) != (user.keys, user.certificate):
        fields = {"user": user.name, "keys": user.keys, "certificate": user.certificate}
        yield entries.USER, {**fields, "made": user.made} if user.made else fields
    if (() if known is None else known.grants) != user.grants:
        yield entries.GRANTED, {"user": user.name, "grants": user.grants}


def _secrets_of(principals: Principals) -> Secrets:
    return Secrets(principals.secret, principals.between_brokers)


class Decoded(NamedTuple):
    """What the records say."""

    users: Mapping[str, User]
    quotas: Mapping[tuple[str, str], dict[str, int]]
    secrets: Secrets


def decode_access(access: Access) -> Decoded:
    """Read the records.

    Raises:
        RegistryError: one of them is none that this txmq knows: another one that is left out could be a user's.
    """
    users: dict[str, User] = {}
    quotas: dict[tuple[str, str], dict[str, int]] = {}
    secrets = Secrets()
    for key, record in access.records.items():
        try:
            name, of = user_of(key), quota_of(key)
            if name is not None:
                users[name] = _user(name, record)
            elif of is not None:
                quotas[of] = {str(limit): int(value) for limit, value in record.items()}
            elif key == SECRET:
                secrets = Secrets(str(record["mock"]), str(record["between_brokers"]))
            else:
                raise KeyError(key)
        except (KeyError, TypeError, ValueError) as error:
            raise RegistryError(f"{key} in the registry cannot be read: restore it, or upgrade txmq") from error
    return Decoded(users, quotas, secrets)


def _user(name: str, record: Record) -> User:
    keys, grants = record["keys"], tuple(Grant(*map(str, grant)) for grant in record["grants"])
    made = int(record["made"])
    return User(name, None if keys is None else ScramKeys(*keys), record["certificate"], grants, made)
