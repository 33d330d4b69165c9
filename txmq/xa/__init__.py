"""Resources: databases that take part in transactions. MySQLResource needs the driver mysqlclient when one is made."""

from __future__ import annotations

from txmq.xa.last_resource import LastResource
from txmq.xa.mysql import MySQLResource
from txmq.xa.xopen import XACode, XAFlag

__all__ = ["LastResource", "MySQLResource", "XACode", "XAFlag"]
