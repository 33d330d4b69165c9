"""Which server or file a connection leads to, whatever its contents say. Only an outbox asks: for all else the fencing
tokens tell (``xa/fencing.py``).

A copied database has its original's identity, and all rows: only properties that are not copied with them tell the two
apart.

===========  ========================================================================================================
Galera       the uuid of the cluster's state: any node may answer
MySQL        ``server_uuid`` and the data directory (a copy of the directory must go without its ``auto.cnf``)
MariaDB      ``server_uid`` (a hash of network address and port), or host and port if it has none; data directory
PostgreSQL   system identifier and timeline; a standby has no timeline of its own, and is an error
SQLite       device, inode and absolute path of the file
===========  ========================================================================================================

Sources: MariaDB, "server_uid", "wsrep_cluster_state_uuid"; MySQL 8.0, 19.1.6 "server_uuid"; PostgreSQL 15, 9.27.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Final
from urllib.parse import quote

from txmq.errors import ConfigError
from txmq.xa.database.dbapi import Connection, run, text
from txmq.xa.database.dialects import MYSQL, POSTGRESQL, SQLITE, Dialect, mysql_variables
from txmq.xa.database.sqlite_file import main_file, names_of

_SIZE_MAX: Final = 200  # the column's
_VARIABLES = ("wsrep_on", "server_uuid", "server_uid", "hostname", "port", "datadir")


class StrangeServerError(ConfigError):
    """The database is not the one that goes on, but perhaps a copy: what is absent from it proves nothing."""


def fingerprint(connection: Connection, dialect: Dialect) -> str:
    """At most 200 ASCII characters. Reads only; within a transaction or without one.

    Raises:
        ConfigError: the server does not tell.
        Exception: the driver's own.
    """
    found = " ".join(quote(word, safe="/.:-_=+") for word in _FOUND[dialect.name](connection))
    if len(found) <= _SIZE_MAX:
        return found
    kind = found.partition(" ")[0]
    return f"{kind} sha256:{hashlib.sha256(found.encode()).hexdigest()}"


def _mysql(connection: Connection) -> list[str]:
    found = mysql_variables(connection, *_VARIABLES)
    if found.get("wsrep_on") == "ON":
        state = dict(run(connection, "SHOW STATUS LIKE 'wsrep_cluster_state_uuid'")[0])
        uuid = next((text(value) for value in state.values()), "")
        if not uuid.strip("0-"):
            raise ConfigError("this node is in no Galera cluster now")
        return ["galera", uuid]
    if found.get("server_uuid"):
        return ["mysql", found["server_uuid"], found.get("datadir", "")]
    server = found.get("server_uid") or f"{found.get('hostname', '')}:{found.get('port', '')}"
    return ["mariadb", server, found.get("datadir", "")]


def _postgresql(connection: Connection) -> list[str]:
    statement = (
        "SELECT CAST(system_identifier AS TEXT), substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) "
        "FROM pg_control_system()"
    )
    ((system, timeline),) = run(connection, statement)[0]
    return ["postgresql", text(system), text(timeline)]


def _sqlite(connection: Connection) -> list[str]:
    path = main_file(connection)
    return ["sqlite", *map(str, names_of(path)), path]


_FOUND: dict[str, Callable[[Connection], list[str]]] = {
    MYSQL.name: _mysql, POSTGRESQL.name: _postgresql, SQLITE.name: _sqlite,
}  # fmt: skip
