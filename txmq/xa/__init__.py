"""Resources: databases that take part in transactions."""

from __future__ import annotations

from txmq.xa.last_resource import LastResource

__all__ = ["LastResource"]
