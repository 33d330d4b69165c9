"""Which server a test's database is: this machine's MariaDB, or another one that was unpacked somewhere.

``TXMQ_TEST_DATABASE`` names the root of an unpacked server (``make test-mysql`` unpacks some); without it the MariaDB
on this machine's path is taken. A program says how a data directory is made, which options the server is started with,
and what a server of its kind can do: a test asks for an ability (``pytest.mark.needs``), never for a name or version.

Sources: MariaDB 10.11, "mariadb-install-db"; MySQL 9.7 Reference Manual, 2.9.1 "Initializing the Data Directory".
"""

from __future__ import annotations

import enum
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from txmq.errors import TxmqError

VARIABLE: Final = "TXMQ_TEST_DATABASE"
_SERVER_DIRECTORIES = ("/usr/sbin", "/usr/local/sbin", "/usr/libexec")  # often not in PATH
_BOTH_WITH_BINARY_LOG = (
    "--log-bin=binlog",
    "--binlog-format=ROW",
    "--binlog-row-metadata=FULL",  # names of columns, signs, character sets: txmq binlog asks for it
    "--server-id=1",
    "--sync-binlog=1",
)


class MariaDBFailedError(TxmqError):
    """The server is not installed, ended, or did not serve or stop in time; the text ends with the end of its log."""


class Ability(enum.Enum):
    """What one vendor's server can do and the other's cannot."""

    ARIA = "has tables of the engine Aria"
    ATTACHED_XA = "keeps a prepared XA branch with its session, until that ends"
    BINARY_JSON = "stores JSON in a form of its own, and not as text"
    CONVERTED_PARTITIONS = "makes a table of a partition, and the reverse"
    DOMAINS = "counts GTIDs by domains: each server's follow one another"
    HIDDEN_CASCADES = "changes rows by foreign keys without row events"
    KEY_FILES = "encrypts with the keys of a file"
    LOSES_ONE_PHASE = "may lack after a kill an XA transaction in one phase that its binary log has"
    MARIADB_DIALECT = "has a dialect of its own in SQLAlchemy"
    MIXED_TRANSACTIONS = "lets a transaction change tables that cannot roll back"
    OLD_TEMPORAL_TYPES = "makes temporal columns in the format of before MySQL 5.6"
    TWO_PHASE_ALTER = "writes an ALTER TABLE when it begins and when it ends"
    UCA1400 = "has collations of UCA 14"
    REPLICA_UPDATES = "writes what it replicates into its binary log, unless it is told not to"
    VECTORS = "has columns of the type VECTOR"
    CASCADES_IN_BINLOG = "writes into its binary log what foreign keys change"
    CHECKS_SWITCHED_OFF = "leaves CHECK constraints unchecked, if a session says so"
    COMPOUND_STATEMENTS = "prepares several statements as one"
    COMPRESSED_COLUMNS = "has compressed columns"
    COMPRESSED_EVENTS = "compresses single events of its binary log"
    ENDS_EMPTY_BRANCHES = "rolls an XA branch back by itself that wrote nothing, when it is ended"
    FORGETS_ROLLBACKS = "may have a branch prepared again after a crash that it said was rolled back"
    NETWORK_TYPES = "has columns of the types UUID, INET4, INET6"
    REPLACED_TABLES = "makes a table in the place of another one (CREATE OR REPLACE TABLE)"
    SEQUENCES = "has sequences"
    SHOWN_GEOMETRY = "shows geometries in its binary log: its program reads on after one"
    SNAPSHOTS = "tells at which place in its binary log a consistent read stands"


class DatabaseProgram(Protocol):
    """The program of a server.

    Attributes:
        binlog_gtids: SQL of the GTIDs that its binary log holds.
        in_transaction: SQL that says whether the session is in one.
        idle_timeout: the variable that ends a session which is idle within a transaction.
        isolation: the variable of that name.
        recovery_privilege: what XA RECOVER needs on *.*; empty: nothing.
        reset_binary_log: the statement that makes it begin anew.
        options: that it is started with in any case.
        binary_log: options that make it keep a binary log.
        without_binary_log: options that keep it from having one.
        small: options that keep what it reserves on disk small.
    """

    binlog_gtids: str
    in_transaction: str
    idle_timeout: str
    isolation: str
    recovery_privilege: str
    reset_binary_log: str
    options: Sequence[str]
    binary_log: Sequence[str]
    without_binary_log: Sequence[str]
    small: Sequence[str]

    @property
    def server(self) -> str:
        """The path of the program."""

    @property
    def binlog_reader(self) -> str:
        """The path of its makers' program that shows a binary log."""

    @property
    def abilities(self) -> frozenset[Ability]:
        """What it can do."""

    def install_command(self, data_dir: Path, scratch: Path) -> list[str]:
        """What makes a data directory in which root has no password. ``scratch`` is a directory for its files."""


_OF_MYSQL = frozenset({Ability.BINARY_JSON, Ability.CASCADES_IN_BINLOG, Ability.REPLICA_UPDATES, Ability.VECTORS})
_OF_MARIADB = frozenset(Ability) - _OF_MYSQL


class MariaDBProgram:
    """MariaDB: this machine's, or one that was unpacked below ``root``."""

    binlog_gtids = "@@gtid_binlog_pos"
    in_transaction = "@@in_transaction"
    idle_timeout = "idle_transaction_timeout"
    isolation = "tx_isolation"
    recovery_privilege = ""
    reset_binary_log = "RESET MASTER"
    options: Sequence[str] = ()
    binary_log: Sequence[str] = (*_BOTH_WITH_BINARY_LOG, "--gtid-strict-mode=1")
    without_binary_log: Sequence[str] = ()
    small: Sequence[str] = (
        "--innodb-log-file-size=8M", "--innodb-temp-data-file-path=ibtmp1:3M:autoextend",
        "--innodb-autoextend-increment=1",
    )  # fmt: skip

    def __init__(self, root: Path | None = None) -> None:
        self._root = root

    @property
    def server(self) -> str:
        return _found("mariadbd", self._root)

    @property
    def binlog_reader(self) -> str:
        return _found("mariadb-binlog", None)  # this machine's: it is in a package of clients

    @property
    def abilities(self) -> frozenset[Ability]:
        command = [self.server, "--version"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603 - found by name
        version = tuple(map(int, re.findall(r"Ver (\d+)\.(\d+)", said)[0]))
        found = set(_OF_MARIADB)
        if version >= (11, 7):
            found.add(Ability.VECTORS)
        if self._root is not None and not (self._root / "usr/lib/mysql/plugin/file_key_management.so").exists():
            found.remove(Ability.KEY_FILES)  # a plugin of another package
        return frozenset(found)

    def install_command(self, data_dir: Path, scratch: Path) -> list[str]:
        where = [] if self._root is None else [f"--basedir={self._root / 'usr'}", "--force"]  # force: no look-up of us
        return [
            _found("mariadb-install-db", self._root), "--no-defaults", *where, f"--datadir={data_dir}",
            "--auth-root-authentication-method=normal", "--skip-test-db", f"--tmpdir={scratch}",
            "--innodb-log-file-size=4M",  # the server makes one of its own size when it starts
        ]  # fmt: skip


class MySQLProgram:
    """MySQL, unpacked below ``root``."""

    abilities = _OF_MYSQL
    binlog_gtids = "@@global.gtid_executed"
    in_transaction = "(SELECT COUNT(*) FROM information_schema.innodb_trx WHERE trx_mysql_thread_id = CONNECTION_ID())"
    idle_timeout = "wait_timeout"
    isolation = "transaction_isolation"
    recovery_privilege = "XA_RECOVER_ADMIN"
    reset_binary_log = "RESET BINARY LOGS AND GTIDS"
    options: Sequence[str] = ("--mysqlx=OFF", "--secure-file-priv=", "--performance-schema=OFF")
    binary_log: Sequence[str] = (*_BOTH_WITH_BINARY_LOG, "--gtid-mode=ON", "--enforce-gtid-consistency=ON")
    without_binary_log: Sequence[str] = ("--skip-log-bin",)
    small: Sequence[str] = ("--innodb-redo-log-capacity=8M", "--innodb-autoextend-increment=1")

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def server(self) -> str:
        return _found("mysqld", self._root)

    @property
    def binlog_reader(self) -> str:
        return _found("mysqlbinlog", self._root)

    def install_command(self, data_dir: Path, scratch: Path) -> list[str]:
        users = scratch / "users.sql"  # root@localhost, which it makes, may not come by TCP: names are not resolved
        users.write_text("CREATE USER root@'127.0.0.1'; GRANT ALL ON *.* TO root@'127.0.0.1' WITH GRANT OPTION;\n")
        return [
            self.server, "--no-defaults", f"--datadir={data_dir}", "--initialize-insecure", f"--init-file={users}",
            f"--tmpdir={scratch}", *self.options, *self.small,
        ]  # fmt: skip


def chosen_program() -> DatabaseProgram:
    """The one that ``TXMQ_TEST_DATABASE`` names.

    Raises:
        MariaDBFailedError: no server was unpacked there.
    """
    root = os.environ.get(VARIABLE)
    if not root:
        return MariaDBProgram()
    place = Path(root).absolute()
    if (place / "usr/sbin/mariadbd").exists():
        return MariaDBProgram(place)
    if (place / "usr/sbin/mysqld").exists():
        return MySQLProgram(place)
    raise MariaDBFailedError(f"{VARIABLE}={root}: no server is unpacked there (usr/sbin/mysqld, usr/sbin/mariadbd)")


def _found(program: str, root: Path | None) -> str:
    ours = (os.environ.get("PATH", os.defpath), *_SERVER_DIRECTORIES)
    path = os.pathsep.join(ours if root is None else (str(root / "usr/bin"), str(root / "usr/sbin")))
    found = shutil.which(program, path=path)
    if found is None:
        package = "apt-get install mariadb-server" if root is None else f"not in {root}"
        raise MariaDBFailedError(f"{program} is not installed: {package}")
    return found
