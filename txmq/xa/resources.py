"""The databases that take part in a transaction: which kinds go together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from txmq.errors import ConfigError
from txmq.xa.last_resource.resource import LastResource, UsedConnection
from txmq.xa.two_phase.resource_ports import UsedXAConnection, XAResource

Resource = LastResource | UsedConnection | XAResource | UsedXAConnection
_LAST = (LastResource, UsedConnection)  # each block asks; a union would be made anew each time


def sorted_out(resources: Sequence[Resource]) -> tuple[LastResource | UsedConnection | None, Sequence[Resource]]:
    """The last resource, and the XA resources; not both."""
    if not resources:
        return None, ()
    last: list[LastResource | UsedConnection] = []
    for resource in resources:
        if isinstance(resource, _LAST):
            last.append(resource)
        elif not is_xa(resource):
            raise ConfigError(
                f"{resource!r} is not a resource: neither a LastResource nor an XA one, nor a using() of these"
            )
    if len(last) > 1:
        raise ConfigError("a transaction takes one last resource: its COMMIT is the decision")
    if last and len(resources) > 1:
        raise ConfigError(
            "a last resource and XA resources do not mix: one decides by its own COMMIT, the others by the broker's "
            "decision; use MySQLResource for all of them"
        )
    if last:
        return last[0], ()
    if len(resources) > 1:
        refuse_twins(resources)
    return None, resources


def is_xa(resource: Any) -> bool:
    """Whether this takes part in two-phase commits."""
    return isinstance(resource, UsedXAConnection) or hasattr(resource, "open_recovery")


def refuse_twins(resources: Sequence[Any]) -> None:
    """Refuse a database that is named twice: its second marker row would wait for the first one's transaction.

    Args:
        resources: those whose identity is not known yet are told apart as objects.

    Raises:
        ConfigError: it is.
    """
    seen: dict[str | int, Any] = {}
    for given in resources:
        resource = given.resource if isinstance(given, UsedXAConnection) else given
        identity = resource.uuid or id(resource)
        if identity in seen:
            raise ConfigError(
                f"{seen[identity]!r} and {resource!r} are one database, which takes part in a transaction once: name "
                "one of them, and use its one connection"
            )
        seen[identity] = resource
