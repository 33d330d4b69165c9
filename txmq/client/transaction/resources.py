"""The databases that take part in a block."""

from __future__ import annotations

from collections.abc import Sequence

from txmq.client.transaction.xa_block import is_xa, refuse_twins
from txmq.errors import ConfigError
from txmq.xa import LastResource
from txmq.xa.last_resource.resource import UsedConnection
from txmq.xa.two_phase.branch import UsedXAConnection, XAResource

Resource = LastResource | UsedConnection | XAResource | UsedXAConnection


def sorted_out(resources: Sequence[Resource]) -> tuple[LastResource | UsedConnection | None, Sequence[Resource]]:
    """The last resource, and the XA resources; not both."""
    if not resources:
        return None, ()
    last: list[LastResource | UsedConnection] = []
    for resource in resources:
        if isinstance(resource, LastResource | UsedConnection):
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
    refuse_twins(resources)
    return None, resources
