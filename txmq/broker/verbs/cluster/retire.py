"""``cluster retire``: an operator gives another home up as lost for ever, with no copy of its directory.

The registry keeps that nobody leads it any more (``Registry.retire_home``); every other home journals it when it hears
of it, this one before it answers. What is prepared or decided over that home is not touched: each transaction is
settled by an operator (``complete heuristic=``).
"""

from __future__ import annotations

from typing import Final
from urllib.parse import unquote

from txmq.broker.client_connection import ClientConnection
from txmq.broker.cluster.registry_asks import Result, RetireHome
from txmq.broker.context import Context
from txmq.broker.verbs.access.audit_log import audit
from txmq.broker.verbs.cluster.registry_events import as_answer
from txmq.errors import BadRequestError, TxmqError, UnavailableError
from txmq.registry.cluster_metadata import parse_home

REASON_LENGTH_MAX: Final = 1000


def retire(context: Context, client: ClientConnection, given: dict[bytes, bytes], opaque: bytes) -> None:
    """Give a home up. Idempotent."""
    view, word = context.cluster, given.get(b"home", b"").decode("ascii", "replace")
    reason = unquote(given.get(b"reason", b"").decode(), errors="replace")
    if not reason.strip() or len(reason) > REASON_LENGTH_MAX:
        raise BadRequestError(
            f"cluster retire home= needs reason=: why it is lost and who says so, at most {REASON_LENGTH_MAX} letters"
        )
    try:
        home = parse_home(word)
    except ValueError:
        raise BadRequestError(f"home={word[:40]}: expected 16 hexadecimal digits") from None
    if view is None:
        raise BadRequestError("this broker is alone: it has no other home")
    if not context.is_serving:
        raise UnavailableError("the broker waits for the registry to say that it leads its home")

    def answered(result: Result) -> None:
        if isinstance(result, TxmqError):
            context.answer_from_state(client, opaque, as_answer(result).with_traceback(None))
        else:
            context.answer_when_durable(client, opaque, b"{}")

    audit(context, client, "home retired", home=word, reason=reason)
    view.ask(lambda number: RetireHome(number, home, reason), answered)
