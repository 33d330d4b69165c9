"""What stands in for an object of txmq in a unit test: it has the attributes that the unit needs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    AnyClass = Any  # what derives from it is, for the type checker, of every class
else:
    AnyClass = object


class StandIn(SimpleNamespace, AnyClass):
    """Attributes alone."""
