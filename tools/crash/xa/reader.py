"""The XA campaign's reader: ``python -m tools.crash.xa.reader DIRECTORY ADDRESS NAME``.

Of each message it sees it looks for the rows, in every server that must have them, on new connections: a visible
message implies readable rows.
"""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

import MySQLdb

import txmq
from tools.crash.directory import HistoryFile
from tools.crash.reader import Follower, follow
from tools.crash.xa.directory import RESOURCES, SERVER_OF, XaCampaignDirectory


class XAReader(Follower):
    """Follows the log; a server that is away is asked again later, about what was seen meanwhile."""

    def __init__(self, world: XaCampaignDirectory, client: txmq.Client, history: HistoryFile) -> None:
        super().__init__(world, client, history)
        self._databases, self._due = world, list[str]()

    def look_for_rows(self, values: list[str]) -> None:
        operations = {value.rpartition(".")[0] for value in values}
        self._due.extend(sorted(operation for operation in operations if operation[-1] in RESOURCES))
        name = f"{self.history.process}-read-{self.reads}"
        try:
            connections = [self._databases.connect(number) for number in range(len(self._databases.server_names))]
        except MySQLdb.Error as error:
            sys.stderr.write(f"{name}: {error!r}\n")
            return
        due, self._due = self._due, []
        self.history.write("dbread", "invoke", name, [])
        found = []
        try:
            for operation in due:
                for resource in RESOURCES[operation[-1]]:
                    with closing(connections[SERVER_OF[resource]].cursor()) as cursor:
                        cursor.execute("SELECT 1 FROM entries WHERE rowid_text = %s", (operation,))
                        found.append(["read", resource, operation, cursor.fetchone() is not None])
        except MySQLdb.Error as error:
            sys.stderr.write(f"{name}: {error!r}\n")
            self._due.extend(due)
        finally:
            for connection in connections:
                connection.close()
        self.history.write("dbread", "ok", name, found)


if __name__ == "__main__":
    follow(XAReader, XaCampaignDirectory(Path(sys.argv[1])), *sys.argv[2:])
