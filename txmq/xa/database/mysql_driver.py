"""The MySQLdb driver, imported when it is first needed: txmq works without it. No other module imports it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from txmq.addresses import TlsFiles
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


def tls_arguments(files: TlsFiles | None) -> dict[str, Any]:
    """What ``connect`` takes to speak TLS and nothing else, with a server whose certificate is for the host."""
    if files is None:
        return {}
    named = {"ca": files.ca, "cert": files.cert, "key": files.key}
    return {"ssl": {name: path for name, path in named.items() if path}, "ssl_mode": "VERIFY_IDENTITY"}
