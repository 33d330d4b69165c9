"""The source's binlog replayed into a server of its own, by its makers' programs: the binlog's word on the tables.

Theory of operation. A server that is killed may have in its binlog what its engine has lost: a replica has that, and so
must the target. Therefore the target is held to the binlog, and not to the source. ``mariadb-binlog`` or
``mysqlbinlog`` gives the binlog as SQL, and ``mariadb`` runs it, under new GTIDs in MySQL. The changes of an XA
transaction are run at its XA COMMIT, in a transaction of their own: what a killed server has prepared may be in its
binlog alone, and no end of it follows; or in its engine alone, and an end follows of what the binlog does not have.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from tools.crash.binlog.tables import DATABASE
from tools.crash.processes import CampaignError
from txmq.testing.processes.database_programs import chosen_program
from txmq.testing.processes.mariadb import MariaDB

_XA: Final = re.compile(rb"XA (START|END|PREPARE|COMMIT|ROLLBACK) (X'[^ /]*)")
GROUP: Final = re.compile(rb"#\d{6} .*\t(?:GTID\s(\S+)|Start: )")
_GTID_NEXT: Final = b"SET @@SESSION.GTID_NEXT= "
_NEW_GTID: Final = _GTID_NEXT + b"'AUTOMATIC'/*!*/;"
_ROWS, _ROWS_END = b"BINLOG '", b"'/*!*/;"
_SAID_BYTES = 2000


class Replay:
    """See the module's docstring.

    Args:
        server: an empty one, which is this object's.
    """

    def __init__(self, server: MariaDB) -> None:
        self.server = server
        self._files = 0

    def start(self) -> None:
        """Start the server; the binlog makes the database."""
        self.server.start()
        self.server.execute(f"DROP DATABASE {DATABASE}")

    def catch_up(self, files: Sequence[Path]) -> None:
        """Run what was not run before.

        Args:
            files: of the binlog, all of them from its first one on, none of which is written to any more.

        Raises:
            CampaignError: the binlog cannot be replayed.
        """
        new, self._files = files[self._files :], len(files)
        if not new:
            return
        run_lines(self.server, replayable(binlog_lines(new)))


def binlog_lines(files: Sequence[Path]) -> list[bytes]:
    """Files of a binlog as SQL.

    Raises:
        subprocess.CalledProcessError: the program failed.
    """
    command = [chosen_program().binlog_reader, *map(str, files)]
    return subprocess.run(command, capture_output=True, check=True).stdout.split(b"\n")


def run_lines(server: MariaDB, lines: Iterable[bytes]) -> None:
    """Run SQL of ``binlog_lines``.

    Raises:
        CampaignError: the server refuses it.
    """
    arguments = server.connect_arguments()
    found = subprocess.run(
        [
            "mariadb", "--no-defaults", "--binary-mode", "--default-character-set=utf8mb4",
            f"--user={arguments['user']}", f"--socket={arguments['unix_socket']}",
        ],
        input=b"\n".join(lines), capture_output=True, check=False,
    )  # fmt: skip
    if found.returncode:
        said = found.stderr[-_SAID_BYTES:].decode("utf-8", "replace")
        raise CampaignError(f"the SQL of a binlog cannot be run: {said}")


def replayable(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The output of ``binlog_lines`` with the changes of XA transactions at their XA COMMIT."""
    parked: dict[bytes, list[bytes]] = {}
    rows: list[bytes] | None = None  # of the XA transaction that is being read
    are_rows = False
    for line in lines:
        if GROUP.match(line):
            rows = None
        if (found := _XA.match(line)) is not None:
            word, xid = found.groups()
            if word == b"START":
                rows = parked[xid] = []
            elif word == b"COMMIT":
                yield from (b"START TRANSACTION/*!*/;", *parked.pop(xid, ()), b"COMMIT")
            continue
        are_rows = are_rows or line.startswith(_ROWS)
        if rows is not None and are_rows:
            rows.append(line)
        else:
            yield _NEW_GTID if line.startswith(_GTID_NEXT) else line
        are_rows = are_rows and line != _ROWS_END
