"""Homes, and where they are led, as this broker knows them: for the verb ``cluster``, and for answers about topics."""

from __future__ import annotations

from typing import Any

from txmq.broker.context import Context


def known_homes(context: Context) -> dict[str, Any]:
    """All homes. A broker that is alone tells of itself."""
    identity, view = context.identity, context.cluster
    if view is None:
        own = {
            "home": f"{identity.node:016x}", "name": identity.name, "epoch": context.state.epoch,
            "leader": context.address or context.settings.listen,
        }  # fmt: skip
        return {"cluster": f"{identity.cluster:016x}", "map_version": 0, "homes": [own]}
    rows = [
        {
            "home": f"{home.home:016x}", "name": home.name, "epoch": home.epoch, "leader": home.address,
            **({"retired": home.retired} if home.retired else {}),
        }
        for _, home in sorted(view.homes.items())
    ]  # fmt: skip
    return {"cluster": f"{identity.cluster:016x}", "map_version": view.map_version, "homes": rows}


def homes_fields(context: Context) -> dict[str, Any]:
    """By home, where it is led, and why it is given up if it is: what an answer about a topic tells of homes."""
    rows = known_homes(context)["homes"]
    retired = {row["home"]: row["retired"] for row in rows if row.get("retired")}
    return {"leaders": {row["home"]: row["leader"] for row in rows}, **({"retired": retired} if retired else {})}
