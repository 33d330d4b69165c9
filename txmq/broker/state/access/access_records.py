"""Users, grants and quotas as records of the registry, and the entries of the journal that follow them.

Invariants:
    * after the entries between the two, the principals say what the registry says: whatever they said before;
    * a user who is absent from newer records is removed; nobody is kept because an event was missed;
    * a user who was removed and made anew under the same name is another one (``made``): connections of the first one
      are nobody's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from txmq.broker.state.access.principals import Principals, User
from txmq.errors import RegistryError
from txmq.protocol.grants import Grant
from txmq.protocol.scram import ScramKeys
from txmq.redo import entries
from txmq.registry.access import SECRET, Access, Changes, Record, quota_key, quota_of, user_key, user_of

Entry = tuple[int, dict[str, Any]]  # kind and fields, as the journal has them


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
    known = decode(access)
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


def decode(access: Access) -> Decoded:
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
