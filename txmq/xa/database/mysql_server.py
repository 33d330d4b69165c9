"""How MySQL and MariaDB are spoken to: the driver, statements in one packet, error numbers, a server's abilities.

Theory of operation. Statements without results go out together in one packet if the connection allows it (several
statements in one text): XA costs four round trips with savepoint and marker row, and bare XA has five statements. The
server stops at the first that fails. A statement with its literals left out (``Statement``) is written out as one text,
or prepared once for many.

The driver, MySQLdb, is imported when it is first needed: txmq works without it. No other module imports it.

Sources: MariaDB 10.11, "XA Transactions"; MySQL 8.0 Reference Manual, 15.3.8 "XA Transactions", error reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, Final, NamedTuple

from txmq.addresses import TlsFiles
from txmq.errors import ConfigError, caused
from txmq.runtime.build import how_to_install
from txmq.runtime.crashpoints import crash_point, is_armed
from txmq.runtime.logging import get_logger
from txmq.xa.database.dbapi import driver_of, innermost, run, text
from txmq.xa.database.dialects import code_of, mysql_variables
from txmq.xa.database.strand_connection import ThreadConnection, of_driver
from txmq.xid import Xid, xid_sql

NOTA: Final = 1397  # unknown xid: ended before, or its owner's connection lives
RMFAIL: Final = 1399  # not in this state
OUTSIDE: Final = 1400
RMERR: Final = 1401  # MySQL 8 also: XA RECOVER without XA_RECOVER_ADMIN
DUPID: Final = 1440
ROLLED_BACK: Final = frozenset({1402, 1613, 1614})  # XA_RBROLLBACK, XA_RBTIMEOUT, XA_RBDEADLOCK
KEPT_OUT: Final = frozenset({1048, 1452})  # of ``insert_committed_or_fail``: a NULL, no row that is referred to
ACCESS_DENIED: Final = frozenset({1044, 1045, 1142, 1227, 1290})
UNKNOWN_THREAD: Final = 1094
_NOT_LISTED: Final = ACCESS_DENIED | {RMERR}


def mysql_driver() -> ModuleType:
    """The driver's module.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import MySQLdb
    except ImportError as error:
        text = (
            f"MySQL and MariaDB need the driver mysqlclient ({error}): {how_to_install('mysql')} "
            "(it is built with libmariadb-dev, pkg-config and gcc)"
        )
        raise caused(ConfigError(text), error) from error
    return MySQLdb  # type: ignore[no-any-return]


def tls_arguments(files: TlsFiles | None) -> dict[str, Any]:
    """What ``connect`` takes to speak TLS and nothing else, with a server whose certificate is for the host."""
    if files is None:
        return {}
    named = {"ca": files.ca, "cert": files.cert, "key": files.key}
    return {"ssl": {name: path for name, path in named.items() if path}, "ssl_mode": "VERIFY_IDENTITY"}


class Statement(NamedTuple):
    """SQL with its literals left out.

    Attributes:
        template: with ``%s`` for each of them, and no other percent sign.
        literals: as they are written in SQL, in order.
    """

    template: str
    literals: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Written out."""
        return self.template % self.literals


class Compound:
    """The compound statement that is prepared on a connection.

    Attributes:
        name: None before it was prepared.
        is_refused: the server does not prepare it, or forgets it.
    """

    __slots__ = ("is_refused", "name")

    def __init__(self) -> None:
        self.name: str | None = None
        self.is_refused = False


class Server:
    """A connection's server and its abilities.

    Attributes:
        is_mariadb: else MySQL.
        connection_id: the server's number for the connection; KILL takes it.
        takes_packets: several statements may be sent in one text.
    """

    __slots__ = ("connection_id", "is_mariadb", "takes_packets", "version")

    def __init__(self, connection: Any) -> None:
        ((version, number),) = run(connection, "SELECT VERSION(), CONNECTION_ID()")[0]
        self.version, self.connection_id = text(version), int(number)
        self.is_mariadb = "mariadb" in self.version.lower()
        self.takes_packets = _takes_packets(connection)


def require_driver(connection: Any, name: str) -> None:
    """Refuse connections of another driver: the meaning of a failed XA statement is known of this one."""
    driver = driver_of(connection)
    if driver is not mysql_driver() or not hasattr(connection, "next_result"):
        which = type(of_driver(connection)).__qualname__ if driver in (None, mysql_driver()) else driver.__name__
        raise ConfigError(
            f"resource {name!r}: connect= must return a connection of MySQLdb ({how_to_install('mysql')}), "
            f"not of {which}; LastResource takes any driver"
        )


def sends_packets(connection: Any) -> bool:
    """Whether a connection, of whatever driver, is one of MySQLdb and may send several statements in one text.

    One that is wrapped is not asked: its wrapper is there to see each statement.
    """
    if isinstance(connection, ThreadConnection):
        return connection.call(sends_packets)
    if innermost(connection) is not connection or not hasattr(connection, "next_result"):
        return False
    driver = driver_of(connection)
    return driver is not None and driver.__name__ == "MySQLdb" and _takes_packets(connection)


def send(connection: Any, statements: Sequence[str], *, in_one_packet: bool) -> tuple[list[int], Exception | None]:
    """Run statements that give no rows, in order, up to the first that fails.

    Returns:
        How many rows each changed, of those that were done; and what the next one raised.
    """
    if isinstance(connection, ThreadConnection):
        return _send_there(connection, statements, in_one_packet=in_one_packet)
    counts: list[int] = []
    packets = ["; ".join(statements)] if in_one_packet else statements
    try:
        for packet in packets:
            connection.query(packet)
            counts.append(connection.affected_rows())
        # Not asked for one more: each asking gives the interpreter's lock away.
        while len(counts) < len(statements) and connection.next_result() == 0:
            counts.append(connection.affected_rows())
    except Exception as error:  # noqa: BLE001  the driver's; the caller judges it by its number
        return counts, error
    return counts, None


def _send_there(
    connection: ThreadConnection, statements: Sequence[str], *, in_one_packet: bool
) -> tuple[list[int], Exception | None]:
    try:
        return connection.call(send, statements, in_one_packet=in_one_packet)
    except Exception as error:  # noqa: BLE001  an earlier call was given up: nothing was sent
        return [], error


def rows_of(connection: Any, statements: Sequence[str]) -> list[list[Any]]:
    """Run statements in one packet; returns the rows of each, none for those that give none.

    Raises:
        the driver's error of the first that fails; those after it are not done.
    """
    if isinstance(connection, ThreadConnection):
        return connection.call(rows_of, statements)
    found: list[list[Any]] = []
    connection.query("; ".join(statements))
    while True:
        result = connection.store_result()
        found.append([] if result is None else list(result.fetch_row(0)))
        if len(found) == len(statements):  # not asked for one more, as in ``send``
            return found
        connection.next_result()


def commit(connection: Any, statements: Sequence[str], *, ahead: int = 0) -> tuple[int, Exception | None]:
    """Run COMMIT with what stands before and after it, in one packet. Returns with COMMIT's own answer.

    The answers to what is after it are read by the code that needs them: the decision is reported to the broker first.

    Args:
        ahead: how many statements stand before it.

    Returns:
        How many of those and COMMIT were done, and what the next one raised.
    """
    if isinstance(connection, ThreadConnection):
        return _commit_there(connection, statements, ahead)
    done = 0
    try:
        packet = "; ".join(statements)
        if is_armed():
            connection.send_query(packet)
            crash_point("client.tx.db_commit_sent")
            connection.read_query_result()
        else:  # the same, but gives the interpreter's lock away once
            connection.query(packet)
        done = 1
        while done <= ahead:
            connection.next_result()
            done += 1
    except Exception as error:  # noqa: BLE001  the driver's; the caller judges it by its number
        return done, error
    return done, None


def _commit_there(connection: ThreadConnection, statements: Sequence[str], ahead: int) -> tuple[int, Exception | None]:
    try:
        return connection.call(commit, statements, ahead=ahead)
    except Exception as error:  # noqa: BLE001  the call was given up, or an earlier one: no answer of the server
        return 0, error


def execute(connection: Any, statement: str) -> None:
    """Run one statement that gives no rows."""
    connection.query(statement)


def discard_results(connection: Any) -> None:
    """Read what a statement left unread.

    Raises:
        the driver's error: a later statement of the same text failed.
    """
    if isinstance(connection, ThreadConnection):
        connection.call(discard_results)
        return
    # Asked without giving the interpreter's lock away, where the driver can be (mysqlclient 2.3).
    if getattr(connection, "more_results", _perhaps)():
        while connection.next_result() == 0:
            connection.discard_result()


def _perhaps() -> bool:
    return True


def xa(verb: str, xid: Xid) -> str:
    """An XA statement."""
    return f"XA {verb} {xid_sql(xid)}"


def listed_xids(connection: Any, *, is_mariadb: bool) -> list[Xid]:
    """XA RECOVER: every prepared branch of the server, of whatever transaction manager.

    Raises:
        ConfigError: the user may not (MySQL: privilege XA_RECOVER_ADMIN).
    """
    try:
        # MySQL converts to hex on request; MariaDB's column is binary.
        rows = run(connection, "XA RECOVER" if is_mariadb else "XA RECOVER CONVERT XID")[0]
    except Exception as error:
        if code_of(error) in _NOT_LISTED:
            refused = ConfigError(f"the database user may not XA RECOVER: GRANT XA_RECOVER_ADMIN to it ({error})")
            raise caused(refused, error) from error
        raise
    return [
        _xid(_bytes(data) if is_mariadb else bytes.fromhex(text(data).removeprefix("0x")), *numbers)
        for *numbers, data in rows
    ]


def warn_of_binary_log(connection: Any, name: str) -> None:
    """Warn of a binary log: crashes and it do not go together."""
    if mysql_variables(connection, "log_bin").get("log_bin") == "ON":
        get_logger(resource=name).warning(
            "binary log is on: its vendor does not promise that prepared XA branches survive a crash together with it",
        )


def why_no_xa(connection: Any) -> str | None:
    """Why this server takes no XA transactions, or None."""
    is_galera = mysql_variables(connection, "wsrep_on").get("wsrep_on") == "ON"
    return "a Galera cluster (wsrep_on) does not support XA" if is_galera else None


def _takes_packets(connection: Any) -> bool:
    counts, error = send(connection, ("DO 1", "DO 1"), in_one_packet=True)
    if error is not None and code_of(error) != 1064:
        raise error
    return len(counts) == 2


def _xid(raw: bytes, format_id: Any, gtrid_size: Any, bqual_size: Any) -> Xid:
    gtrid_end = int(gtrid_size)
    end = gtrid_end + int(bqual_size)
    return Xid(int(format_id), raw[:gtrid_end], raw[gtrid_end:end])


def _bytes(data: bytes | str) -> bytes:
    return data.encode("utf-8", "surrogateescape") if isinstance(data, str) else bytes(data)
