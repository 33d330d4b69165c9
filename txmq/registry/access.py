"""Users, grants and quotas as a registry keeps them: records under one version.

Theory of operation. A record is a JSON object under a key: all of one user (``user.shop``), the quota of one user or
topic (``quota.topic.orders``), or the secrets of the cluster (``secret``). One record a user, and not one document of
all: ZooKeeper refuses values over 1 MB, which 10,000 users would pass, while one user with all grants that there can be
has a quarter of it. The version holds them together: each change raises it by 1, by compare-and-set.

The registry knows what a key means, and not what a record says; the brokers do
(``broker/state/principals.py``).

Invariants:
    * the version never falls, and two different sets of records never had the same one;
    * once there is a user there is one for ever: brokers remove no last administrator. So a version without users is
      older than any with one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from txmq.errors import RegistryError

SECRET: Final = "secret"  # noqa: S105  the key of a record
_USER: Final = "user."
_QUOTA: Final = "quota."
CHANGES_MAX: Final = 10  # records in one change

Record = Mapping[str, Any]
Changes = Mapping[str, Record | None]
"""Records by key as they are from now on; None: there is none any more."""


class Access(NamedTuple):
    """All records at one moment. Version 0: there was never one."""

    version: int
    records: Mapping[str, Record]


NO_ACCESS: Final = Access(0, MappingProxyType({}))


def user_key(name: str) -> str:
    """The key of a user's record."""
    return _USER + name


def quota_key(kind: str, name: str) -> str:
    """The key of a quota's record."""
    return f"{_QUOTA}{kind}.{name}"


def user_of(key: str) -> str | None:
    """The user whose record has the key; None: it is no user's."""
    return key.removeprefix(_USER) if key.startswith(_USER) else None


def quota_of(key: str) -> tuple[str, str] | None:
    """Kind and name of the quota whose record has the key; None: it is no quota's."""
    if not key.startswith(_QUOTA):
        return None
    kind, _, name = key.removeprefix(_QUOTA).partition(".")
    return kind, name


def has_users(keys: Iterable[str]) -> bool:
    """Whether one of the records is a user's."""
    return any(key.startswith(_USER) for key in keys)


def check_changes(changes: Changes) -> None:
    """Refuse more than a registry makes at once.

    Raises:
        RegistryError: says how many can be.
    """
    if len(changes) > CHANGES_MAX:
        raise RegistryError(f"{len(changes)} records in one change: at most {CHANGES_MAX}")
