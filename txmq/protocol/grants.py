"""Grants: what a user may do, to what. Allow-only: what no grant covers is denied.

A grant is an operation on a thing of some kind. The thing's name may end with ``*``: all names that begin so. A user
with ``cluster`` is an administrator and may do everything. ``describe`` on the broker, of which there is one (``all``),
is for monitoring: figures and lists of everything, no message, and nothing changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from txmq.errors import BadRequestError
from txmq.model import is_valid_name
from txmq.protocol.grammar import is_hex32

ALL: Final = "*"
_ANY: Final = ""  # operation
CLUSTER: Final = "cluster"
BROKER: Final = "broker"
WHOLE: Final = "all"  # the name of the one thing of kind ``broker``
OPERATIONS: Final = {
    "topic": ("read", "write", "create", "alter", "delete", "describe"),
    "group": ("read", "settle", "alter", "delete"),
    "resource": ("settle", "install"),
    BROKER: ("describe",),
    CLUSTER: (CLUSTER,),
}

_EXPECTED: Final = {"resource": "a uuid of 32 hex digits, or *", BROKER: WHOLE}
_NAME: Final = "a name, which may end with *"


class Grant(NamedTuple):
    """One operation on one thing, or on all whose names begin alike."""

    may: str
    kind: str
    name: str


ADMINISTRATOR: Final = Grant(CLUSTER, CLUSTER, ALL)


class Allowed:
    """The grants of one user, for look-ups: one costs the same however many they are.

    A name is looked up whole, and by its beginnings of the lengths that granted ones have: of mostly one or two.
    """

    __slots__ = ("_beginnings", "_names", "is_administrator")

    def __init__(self, grants: Iterable[Grant]) -> None:
        self.is_administrator = False
        self._names: dict[tuple[str, str], set[str]] = {}
        self._beginnings: dict[tuple[str, str], dict[int, set[str]]] = {}
        for grant in grants:
            may, kind, name = grant
            self.is_administrator |= kind == CLUSTER
            for key in ((may, kind), (_ANY, kind)):
                if name.endswith(ALL):
                    self._beginnings.setdefault(key, {}).setdefault(len(name) - 1, set()).add(name[:-1])
                else:
                    self._names.setdefault(key, set()).add(name)

    def covers(self, may: str, kind: str, name: str) -> bool:
        """Whether one of them covers it."""
        key = may, kind
        if self.is_administrator or name in self._names.get(key, ()):
            return True
        beginnings = self._beginnings.get(key)
        return beginnings is not None and any(name[:length] in of_it for length, of_it in beginnings.items())

    def covers_any(self, kind: str, name: str) -> bool:
        """Whether one of them covers any operation on a thing."""
        return self.covers(_ANY, kind, name)

    def has(self, may: str, kind: str) -> bool:
        """Whether one of them is for any thing at all."""
        return self.is_administrator or (may, kind) in self._names or (may, kind) in self._beginnings


def read_grants(may: str, kind: str, name: str) -> list[Grant]:
    """The grants of a comma-separated list of operations.

    Raises:
        BadRequestError: an operation that the kind does not have, or no name of that kind.
    """
    known, wanted = OPERATIONS[kind], may.split(",")
    unknown = [word for word in wanted if word not in known]
    if unknown:
        raise BadRequestError(f"acl: may={unknown[0][:40]!r}: a {kind} has {', '.join(known)}")
    if not _is_name(kind, name):
        raise BadRequestError(f"acl: {kind}={name[:80]!r}: expected {_EXPECTED.get(kind, _NAME)}")
    return [Grant(word, kind, name) for word in dict.fromkeys(wanted)]


def _is_name(kind: str, name: str) -> bool:
    if kind == BROKER:
        return name == WHOLE
    if name == ALL:
        return True
    if kind == "resource":
        return bool(is_hex32(name.encode()))
    return is_valid_name(name.removesuffix(ALL))
