"""What an operator sees of a cluster: the answer of one broker, and beside it what each home's own leader says."""

from __future__ import annotations

from typing import Any

from txmq.client.transport.ports import HomeBroker, Routing
from txmq.errors import TxmqError
from txmq.protocol.json_text import Fields, json_object

_HOME_TIMEOUT_S = 2.0  # a leader that does not answer is told as such, and holds up the others' answers no longer


def describe_cluster(routes: Routing[HomeBroker], timeout: float) -> Fields:
    """Homes, leaders, topics and what is unavailable, as any broker knows them.

    Each home gets ``registry``, the state of its leader's session; None if the leader does not answer.
    ``branches`` are those of all homes whose leaders answered, each with its ``home``.
    """
    seen = json_object(routes.any_link().control.repeat("cluster", "describe", timeout=timeout))
    branches: list[Fields] = []
    for row in seen["homes"]:
        own = _asked(routes, row)
        row["registry"] = None if own is None else (own["registry"] or {}).get("state")
        branches += [{"home": row["home"], **branch} for branch in (own or {}).get("branches", ())]
    return {**seen, "branches": branches}


def _asked(routes: Routing[HomeBroker], row: dict[str, Any]) -> Fields | None:
    """The answer of a home's own leader; None if it gives none."""
    if row["leader"] is None:
        return None
    try:
        link = routes.link_of_home(int(row["home"], 16))
        own = json_object(link.control.repeat("cluster", "describe", timeout=_HOME_TIMEOUT_S))
    except TxmqError:
        return None
    return own if own["home"] == row["home"] else None
