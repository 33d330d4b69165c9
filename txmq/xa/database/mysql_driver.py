"""The MySQLdb driver, imported when it is first needed: txmq works without it. No other module imports it."""

from __future__ import annotations

from types import ModuleType

from txmq.errors import ConfigError
from txmq.runtime.build import how_to_install


def mysql_driver() -> ModuleType:
    """The driver's module.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import MySQLdb
    except ImportError as error:
        raise ConfigError(
            f"MySQL and MariaDB need the driver mysqlclient ({error}): {how_to_install('mysql')} "
            "(it is built with libmariadb-dev, pkg-config and gcc)"
        ) from error
    return MySQLdb  # type: ignore[no-any-return]
