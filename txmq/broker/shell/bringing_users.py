"""Users and a home that enters a cluster: what it brings, what it takes, when it may not serve.

Theory of operation. The registry has the truth, and each home reads it before it serves. A broker that was alone and
has users publishes them, if the cluster has none; one that found none makes its first administrator, if it was given
one. Both end the cluster's anonymity and nothing brings it back.

Invariants:
    * a home serves as the registry says at a moment after its start: a user who was removed meanwhile is unknown;
    * users are neither written nor read where others could do so (``config.why_no_users``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from txmq.broker.cluster.registry_calls import readable
from txmq.broker.shell import first_administrator
from txmq.broker.state.principals import Principals, Secrets, records_of
from txmq.broker.verbs.access.access_changes import SECRET_BITS
from txmq.config import BrokerSettings, why_no_users
from txmq.errors import RegistryError
from txmq.registry.access import SECRET, Access, Record, has_users, user_key
from txmq.registry.cluster_metadata import Listener, Registry
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.logging import get_logger
from txmq.runtime.ports import Random

log = get_logger()


class UsersOfHome(NamedTuple):
    """What a home has and was given.

    Attributes:
        access: of its journal, as the registry would have it; version 0: they were never the registry's.
        first: the first administrator's records, of the file that the settings name; None: they name none.
        why_none: why users would not be safe in the registry; empty: they are.
    """

    access: Access
    first: Callable[[], Mapping[str, Record]] | None = None
    why_none: str = ""

    @property
    def is_bringing(self) -> bool:
        """Whether they must be published: they are of a broker that was alone."""
        return self.access.version == 0 and bool(self.access.records)


def users_of(principals: Principals, settings: BrokerSettings, random: Random) -> UsersOfHome:
    """What a recovered home has and was given."""

    def drawn() -> str:
        return f"{random.bits(SECRET_BITS):064x}"

    records = records_of(principals)
    if principals.users:
        secrets = Secrets(principals.secret, principals.between_brokers or drawn())
        records[SECRET] = secrets._asdict()
    path = settings.first_administrator

    def first() -> Mapping[str, Record]:
        name, record = first_administrator.read(path)
        log.info("first administrator", user=name)
        return {user_key(name): record, SECRET: Secrets(drawn(), drawn())._asdict()}

    return UsersOfHome(Access(principals.registry_version, records), first if path else None, why_no_users(settings))


def take_users(registry: Registry, home: int, own: UsersOfHome, listener: Listener) -> Access:
    """What the cluster has after what the home brings was published. Each step may be repeated.

    Raises:
        RegistryConflictError: another home came first, or has yet to publish; try again.
        RegistryError: users would not be safe there; or the registry is older than the journal.
        ConfigError: the file of the first administrator is not there, not whole, or not its owner's alone.
    """
    if own.is_bringing:
        if has_users(own.access.records):
            _refuse_unsafe(own)
        registry.publish_access(home, own.access.records)
        crash_point("registry.users_published")
    access = registry.access(listener)
    if not has_users(access.records) and own.first is not None:
        _refuse_unsafe(own)
        access = registry.change_access(home, access.version, own.first())
        crash_point("registry.first_user_made")
    if has_users(access.records):
        _refuse_unsafe(own)
    if access.version < own.access.version:
        raise RegistryError(
            f"users in ZooKeeper have version {access.version}, and this home's journal {own.access.version}: the "
            "ensemble lost changes, and a user who was removed may be back there. Bring it up to date: txmq cluster "
            "rebuild"
        )
    return readable(access)


def _refuse_unsafe(own: UsersOfHome) -> None:
    if own.why_none:
        raise RegistryError(own.why_none)
