"""The reader of a server's binlog: the only home of mysql-replication. Importing it needs the extra ``binlog``."""

from txmq.errors import ConfigError
from txmq.runtime.build import how_to_install

try:
    import pymysqlreplication  # noqa: F401
except ImportError as error:
    raise ConfigError(f"binlog sync needs mysql-replication ({error}): {how_to_install('binlog')}") from error

from txmq.binlog.source.options import SourceOptions
from txmq.binlog.source.source import BinlogSource

__all__ = ["BinlogSource", "SourceOptions"]
