"""What the processes of the binlog campaign agree on: files, addresses, decisions of XA transactions.

While the file ``calm`` is there, the load runs no statement that changes a table, and no XA transaction; while
``snapshot`` is there, none that moves, empties or drops a table, and it inserts nothing into tables without a key.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import MySQLdb

from tools.crash.binlog.columns import SESSION
from tools.sync_settings import sync_settings

LOCK_WAIT_S = 1
# Else ALTER TABLE of MariaDB 11.8 copies without a lock and leaves out what an XA transaction has changed whose owner
# has gone and which another session commits meanwhile: the source contradicts its own binlog.
COPIES_LOCKED = "SET lock_wait_timeout = @@lock_wait_timeout /*M!110200 , old_mode = 'LOCK_ALTER_TABLE_COPY' */"
PARTITIONS: Final = 3
TRANSACTION_ROWS_MAX: Final = 60  # some transactions of the load are larger
_MORE: Final = {
    "source": "connect_timeout_ms = 3000\nsilence_ms_max = 2000\n",
    "publish": f"partitions = {PARTITIONS}\nsession_timeout_ms = 1000\ntransaction_rows_max = {TRANSACTION_ROWS_MAX}\n",
    "snapshot": "chunk_rows = 40\nview_ms_max = 100\n",
    "apply": "session_timeout_ms = 1000\nthreads = 3\nbatch_rows_max = 50\n",
}


@dataclass(frozen=True, slots=True)
class BinlogCampaignDirectory:
    """One campaign's directory."""

    directory: Path

    @property
    def broker(self) -> Path:
        """The broker's data directory."""
        return self.directory / "broker"

    @property
    def source(self) -> Path:
        """The directory of the database that is read."""
        return self.directory / "source"

    @property
    def target(self) -> Path:
        """The directory of the database that is written."""
        return self.directory / "target"

    @property
    def replay(self) -> Path:
        """The directory of the database that the source's binlog is replayed into."""
        return self.directory / "replay"

    @property
    def calm(self) -> Path:
        """See the module's docstring."""
        return self.directory / "calm"

    @property
    def snapshot(self) -> Path:
        """See the module's docstring."""
        return self.directory / "snapshot"

    @property
    def _address(self) -> Path:
        return self.directory / "source.json"

    @property
    def _decisions(self) -> Path:
        return self.directory / "decisions"

    def config(self, name: str, command: str = "run") -> Path:
        """Of a sync, for a command of ``txmq binlog``."""
        return self.directory / f"{name}.{command}.toml"

    def write_config(
        self, name: str, mode: str, bootstrap: str, source: int, target: int, command: str = "run", *, start: str = ""
    ) -> None:
        """The file that a command is started with; reader and applier of a sync differ in ``bootstrap`` alone.

        Args:
            start: GTIDs, after which the reader begins without a snapshot; empty: with one.
        """
        more = dict(_MORE)
        if start:
            more["source"] += f'start = "{start}"\n'
            more["snapshot"] += 'mode = "never"\n'
        more["publish"] += f'mode = "{mode}"\nspool = "{self.directory / name}.spool"\n'
        more["apply"] += f'state_database = "state_{name}"\n'
        self.config(name, command).write_text(sync_settings(name, bootstrap, source, target, **more), "utf-8")

    def write_address(self, arguments: dict[str, Any]) -> None:
        """Where the load finds the source."""
        self._address.write_text(json.dumps(arguments), "utf-8")

    def decide(self, xid: str) -> None:
        """Note that a prepared XA transaction must be committed. What is not noted must be rolled back."""
        with self._decisions.open("a", encoding="utf-8") as file:
            file.write(f"{xid}\n")  # one write: SIGKILL cannot tear it

    def decided(self) -> set[str]:
        """The XA transactions that must be committed."""
        return set(self._decisions.read_text("utf-8").split()) if self._decisions.exists() else set()

    def connect(self) -> Any:
        """A new connection to the source, in autocommit, with the session that the load's values need."""
        arguments = json.loads(self._address.read_text("utf-8"))
        connection = MySQLdb.connect(**arguments | {"autocommit": True, "connect_timeout": 3})
        cursor = connection.cursor()
        for statement in (
            *SESSION, COPIES_LOCKED,
            f"SET innodb_lock_wait_timeout = {LOCK_WAIT_S}", f"SET lock_wait_timeout = {LOCK_WAIT_S}",
        ):  # fmt: skip
            cursor.execute(statement)
        cursor.close()
        return connection
