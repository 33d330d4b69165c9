"""Who did what: effects of the core that the shell writes into the log.

Invariants:
    * every line says user, address and connection; none has a secret or a payload;
    * the shell writes a line before the journal record of what it tells of (``Server``): a broker that dies in between
      leaves a line about a change that was not made, never a change without a line;
    * warnings of strangers keep no other line out; those of others are as many as requests in a turn of the loop;
    * refusals without end fill neither memory (LINES_MAX) nor the log (``state/refusals``).
"""

from __future__ import annotations

from typing import Final

from txmq.broker.client_connection import ClientConnection
from txmq.broker.context import Context
from txmq.broker.verbs.access.authorizer import require
from txmq.errors import BrokerError, TopicClosedError

LINES_MAX: Final = 1000  # that wait for the shell: endless refusals fill no memory
REFUSED: Final = "refused"
LOGIN_FAILED: Final = "login failed"
WARNINGS: Final = frozenset({REFUSED, LOGIN_FAILED})
_REFUSALS: Final = (401, 403)
_NAME_LENGTH_MAX: Final = 200  # of a client, as it calls itself before it has logged in


def audit(context: Context, client: ClientConnection, event: str, **fields: str | int) -> None:
    """Have a line written. Beyond LINES_MAX a warning is counted only (``audit_lost``)."""
    if event in WARNINGS and len(context.audited) >= LINES_MAX:
        context.counters.audit_lost += 1
        return
    who = {
        "user": client.user or "-",
        "address": client.address,
        "connection": client.number,
        "client": client.name[:_NAME_LENGTH_MAX],
    }
    context.audited.append({"event": event, **who, **fields})


def refused(context: Context, client: ClientConnection, verb: bytes, error: BrokerError) -> None:
    """A request failed; if it was refused because of its user, count it and have that written."""
    if error.code not in _REFUSALS or isinstance(error, TopicClosedError):
        return
    context.counters.refused += 1
    left_out = context.refusal_lines.take(client.user, client.address, context.now_ms)
    if left_out is not None and verb != b"auth":  # which has a line of its own
        more = {"left_out": left_out} if left_out else {}
        audit(context, client, REFUSED, verb=verb.decode("ascii", "replace"), reason=str(error), **more)


def refusal_of(
    context: Context, client: ClientConnection, verb: bytes, operation: str, kind: str, name: str
) -> BrokerError | None:
    """The refusal of what waited, and may not be answered any more; None if it may."""
    try:
        require(context, client, operation, kind, name)
    except BrokerError as error:
        refused(context, client, verb, error)
        return error.with_traceback(None)
    return None
