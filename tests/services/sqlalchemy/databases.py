"""URLs of SQLAlchemy for the servers of the tests."""

from __future__ import annotations

from txmq.testing.processes.mariadb import MariaDB
from txmq.testing.processes.postgresql import PostgreSQL


def mariadb_url(server: MariaDB, driver: str = "mysqldb", name: str = "mysql") -> str:
    """Of the server's database; ``name`` is that of the dialect."""
    given = server.connect_arguments()
    return f"{name}+{driver}://root@localhost/{given['db']}?unix_socket={given['unix_socket']}&charset=utf8mb4"


def postgresql_url(server: PostgreSQL, driver: str = "psycopg") -> str:
    """Of the server's database."""
    return f"postgresql+{driver}://postgres@127.0.0.1:{server.port}/{server.database}"
