"""Whether a server has the tables of another: by ``txmq binlog compare``, and by the databases' own CHECKSUM TABLE."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.crash.binlog.values import compared_key
from tools.crash.processes import CampaignError
from txmq.testing.processes import fork_server
from txmq.testing.processes.mariadb import MariaDB

COMPARE_S: Final = 300.0
SHOWN: Final = 600
# In any other mode MariaDB's sum has what lies where a NULL is; MySQL has no such variable, and takes it for a comment.
_WITHOUT_NULLS: Final = "SET @unused = 0 /*M!, old_mode = '' */"


@dataclass(frozen=True, slots=True)
class TableDifference:
    """A table that is not the same.

    Args:
        rule: by which it was found.
        rows: the keys of rows, as ``checker.Key`` has them; without the key's values if the table has no key.
    """

    rule: str
    table: str
    text: str
    rows: tuple[tuple[str, ...], ...] = ()


class TableCheck:
    """Holds the tables of ``other`` to those of ``one``; nothing writes to either.

    Args:
        config: of a sync from one to the other.

    Attributes:
        rows: how many were compared.
    """

    def __init__(self, config: Path, one: MariaDB, other: MariaDB) -> None:
        self._config, self._one, self._other = config, one, other
        self.rows = 0

    def differences(self) -> list[TableDifference]:
        """By both means.

        Raises:
            CampaignError: the comparison cannot be made.
        """
        return [*self._compared(), *self._summed()]

    def _compared(self) -> list[TableDifference]:
        command = [sys.executable, "-m", "txmq.cli.main", "binlog", "compare", "--config", str(self._config)]
        found = fork_server.run([*command, "--settle", "0", "--json"], timeout=COMPARE_S)
        try:
            tables = json.loads(found.stdout)["tables"]
        except ValueError as error:
            said = found.stderr.decode()[-SHOWN:]
            raise CampaignError(f"txmq binlog compare ended with {found.returncode}: {said}") from error
        self.rows += sum(table["rows"] for table in tables)
        return [
            TableDifference(
                "C1", (name := table["table"].partition(".")[2]), f"compare: {json.dumps(table)[:SHOWN]}",
                tuple(compared_key(name, row["key"]) for row in table["differences"]),
            )
            for table in tables if not table["is_equal"]
        ]  # fmt: skip

    def _summed(self) -> list[TableDifference]:
        one, other = _checksums(self._one), _checksums(self._other)
        return [
            TableDifference("C2", name, f"{name}: CHECKSUM TABLE is {one.get(name)}, and {other.get(name)}")
            for name in sorted(one.keys() | other.keys())
            if name not in one or name not in other or one[name] != other[name]
        ]


def _checksums(server: MariaDB) -> dict[str, int]:
    found = {}
    with closing(server.connect(init_command=_WITHOUT_NULLS)) as connection, closing(connection.cursor()) as cursor:
        cursor.execute("SHOW TABLES")
        for (name,) in cursor.fetchall():
            cursor.execute(f"CHECKSUM TABLE {name} EXTENDED")
            ((_, found[str(name)]),) = cursor.fetchall()
    return found


def lost_rows(found: Iterable[TableDifference], changed_last: Callable[[tuple[str, ...]], str]) -> list[str]:
    """What a source has not of its own binlog, a line each: the row, and the transaction that has changed it last."""
    found = list(found)
    named = {one.table for one in found if one.rows}
    lines = []
    for one in found:
        texts = [f"{row[0]} {', '.join(row[1:])}: transaction {changed_last(row)}" for row in one.rows]
        lines += texts or ([] if one.table in named else [f"{one.rule} {one.text}"])
    return [f"the source's engine has lost of its own binlog: {line}" for line in lines]
