"""Resources: databases that take part in transactions. MySQLResource needs the driver mysqlclient when one is made."""

from __future__ import annotations

from txmq.xa.last_resource import LastResource
from txmq.xa.mysql import MySQLResource

__all__ = ["LastResource", "MySQLResource"]
