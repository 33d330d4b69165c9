"""Resources: databases that take part in transactions. MySQLResource needs the driver mysqlclient when one is made."""

from __future__ import annotations

from txmq.xa.last_resource.resource import LastResource
from txmq.xa.mysql.resource import MySQLResource
from txmq.xa.xopen import XACode, XAFlag

__all__ = ["LastResource", "MySQLResource", "XACode", "XAFlag"]
