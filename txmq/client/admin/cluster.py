"""What an operator sees and says of a cluster and its users.

One broker answers, and each home's own leader for itself. An operator says that a home is lost for ever, who the users
are, and what they may do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from txmq.client.transport.reconnecting import ReconnectingConnection
from txmq.errors import ConfigError, TxmqError
from txmq.protocol.json_text import Fields, FieldsList, json_object
from txmq.protocol.scram import SALT_SIZE, keys_of
from txmq.runtime.clocks import OSRandom

if TYPE_CHECKING:
    from txmq.client.routes import Routes

_HOME_TIMEOUT_S = 2.0  # a leader that does not answer is told as such, and holds up the others' answers no longer
_NONE: Final[Mapping[str, int]] = MappingProxyType({})


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


class Users:
    """``control``: a connection of an administrator, or of anybody before the first. Thread safety: any thread."""

    def __init__(self, control: ReconnectingConnection, timeout: float) -> None:
        self._control, self._timeout = control, timeout

    def add(self, user: str, password: str | None, certificate: str | None = None) -> FieldsList:
        """Make a user; forced when this returns. The password stays here: the broker is sent its keys.

        Raises:
            UserExistsError: the name is taken.
            ConfigError: it is no password.
        """
        return self._user("add", user, _credentials(password, certificate))

    def passwd(self, user: str, password: str | None, certificate: str | None = None) -> FieldsList:
        """Give a user another password, or another certificate; forced when this returns. Raises UnknownUserError."""
        return self._user("passwd", user, _credentials(password, certificate))

    def remove(self, user: str) -> FieldsList:
        """Remove a user, who is refused from then on; forced when this returns. Raises UnknownUserError."""
        return self._user("remove", user, b"")

    def list(self, user: str = "*") -> FieldsList:
        """Users: name, whether there is a password, the certificate, whether an administrator, number of grants."""
        return self._user("list", user, b"")

    def _user(self, action: str, user: str, body: bytes) -> FieldsList:
        answer = self._control.call("user", action, user, timeout=self._timeout, body=[body])
        found: FieldsList = json_object(answer)["users"]
        return found

    def acl(self, action: str, user: str = "*", words: Mapping[str, str | None] | None = None) -> FieldsList:
        """``grant``, ``revoke`` or ``list``: users and their grants. Changes are forced when this returns."""
        answer = self._control.call("acl", action, user, timeout=self._timeout, extensions=words)
        found: FieldsList = json_object(answer)["users"]
        return found

    def quota(self, action: str, kind: str = "*", name: str = "*", limits: Mapping[str, int] = _NONE) -> FieldsList:
        """``set``, ``remove`` or ``list``: limits of a ``user`` or ``topic``. Changes are forced when this returns."""
        words = {limit: str(value) for limit, value in limits.items()}
        answer = self._control.call("quota", action, kind, name, timeout=self._timeout, extensions=words)
        found: FieldsList = json_object(answer)["quotas"]
        return found


def _credentials(password: str | None, certificate: str | None) -> bytes:
    salt = OSRandom().bits(8 * SALT_SIZE).to_bytes(SALT_SIZE, "big")
    keys = None if password is None else keys_of(password, salt).to_json()
    return json.dumps({"keys": keys, "certificate": certificate}).encode()
