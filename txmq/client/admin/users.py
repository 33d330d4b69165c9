"""Users and what they may do, as operators see and change them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from txmq.client.transport.reconnecting import ReconnectingConnection
from txmq.protocol.json_text import FieldsList, json_object
from txmq.protocol.scram import SALT_SIZE, keys_of
from txmq.runtime.clocks import OSRandom

_NONE: Final[Mapping[str, int]] = MappingProxyType({})


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
