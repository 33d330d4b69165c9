"""What one connection may do: its user's grants, and what was asked of them, as of one version of the principals.

Invariants:
    * what no grant covers is denied; a connection without a login has no grants;
    * a change of any user or grant makes it stale (``version``): it is made anew before it is asked again.
"""

from __future__ import annotations

from typing import Final

from txmq.broker.state.access.principals import User
from txmq.protocol.grants import Allowed
from txmq.protocol.interbroker_login import is_peer

ANSWERS_MAX: Final = 1000  # that are kept of a connection: names come from requests
NEVER: Final = -1  # no version of the principals


class Permissions:
    """See the module's docstring.

    Attributes:
        user: empty: nobody.
        is_administrator: may do everything.
        is_peer: it is the broker of another home, which asks and tells of branches for users, and nothing else.
        version: of the principals, when these were theirs.
    """

    __slots__ = ("_allowed", "_answers", "is_administrator", "is_peer", "user", "version")

    def __init__(self, user: User | None, version: int) -> None:
        self.user, self.version = "" if user is None else user.name, version
        self._allowed = _NOTHING if user is None else user.allowed
        self.is_administrator = user is not None and user.is_administrator
        self.is_peer = is_peer(self.user)
        self._answers: dict[tuple[str, str, str | bytes], bool] = {}

    def may(self, operation: str, kind: str, name: str | bytes) -> bool:
        """Whether a grant covers it."""
        if self.is_administrator:
            return True
        key = (operation, kind, name)
        found = self._answers.get(key)
        if found is None:
            if len(self._answers) >= ANSWERS_MAX:
                self._answers.clear()
            found = self._answers[key] = self._allowed.covers(operation, kind, _text(name))
        return found

    def may_any(self, kind: str, name: str | bytes) -> bool:
        """Whether a grant covers any operation on a thing: a user who may do anything with it sees it."""
        return self.is_administrator or self._allowed.covers_any(kind, _text(name))

    def has(self, operation: str, kind: str) -> bool:
        """Whether it is granted for any thing at all."""
        return self.is_administrator or self._allowed.has(operation, kind)


_NOTHING: Final = Allowed(())


def _text(name: str | bytes) -> str:
    return name if isinstance(name, str) else name.decode("ascii", "replace")


def of_nobody() -> Permissions:
    """Those of a connection that has not logged in; stale, so that they are made anew when they are asked."""
    return Permissions(None, NEVER)
