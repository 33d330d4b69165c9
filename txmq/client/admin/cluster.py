"""What an operator sees of a cluster: the answer of one broker, and what each home's own leader says; and what
the operator says of it: that a home is lost for ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from txmq.errors import ConfigError, TxmqError
from txmq.protocol.json_text import Fields, json_object

if TYPE_CHECKING:
    from txmq.client.routes import Routes

_HOME_TIMEOUT_S = 2.0  # a leader that does not answer is told as such, and holds up the others' answers no longer


def describe_cluster(routes: Routes, timeout: float) -> Fields:
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


def retire_home(routes: Routes, home: str, reason: str, timeout: float) -> str:
    """Give a home up as lost for ever, with no copy of its directory: nothing waits for it any more.

    Args:
        home: its id, 16 hex digits, or the name of its broker, as ``describe_cluster`` has them.
        reason: the reason, and the name of the operator; kept by the registry and in the journals of the others.

    Returns:
        The home's id.

    Raises:
        ConfigError: the cluster has no such home.
        UnavailableError: a broker leads it, or the registry does not answer.

    Durability: in the registry, and in the journal of the broker that was asked, when this returns.
    """
    control = routes.any_link().control
    rows = json_object(control.repeat("cluster", "homes", timeout=timeout))["homes"]
    found = [row["home"] for row in rows if home in (row["home"], row["name"])]
    if len(found) != 1:
        known = ", ".join(f"{row['name']} ({row['home']})" for row in rows)
        raise ConfigError(
            f"home {home[:80]!r}: {'ambiguous' if found else 'not in the cluster'}; its homes are {known}"
        )
    control.repeat(
        "cluster", "retire", timeout=timeout, extensions={"home": found[0], "reason": quote(reason, safe="")}
    )
    return str(found[0])


def _asked(routes: Routes, row: dict[str, Any]) -> Fields | None:
    """The answer of a home's own leader; None if it gives none."""
    if row["leader"] is None:
        return None
    try:
        link = routes.link_of_home(int(row["home"], 16))
        own = json_object(link.control.repeat("cluster", "describe", timeout=_HOME_TIMEOUT_S))
    except TxmqError:
        return None
    return own if own["home"] == row["home"] else None
