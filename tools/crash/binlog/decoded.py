"""What a binlog holds, by the program of the server's own makers, which shares nothing with txmq's reader.

``read_binlog`` gives the transactions that a replica would run, in the order in which they take effect: the rows of an
XA transaction with its XA COMMIT, each with the id of the XA PREPARE under which it stands. What a killed server has
left of a transaction at the end of a file is none.

``mariadb-binlog`` and ``mysqlbinlog`` print rows alike. A group begins with ``GTID`` in the header of an event of
MariaDB, and with GTID_NEXT of MySQL, where BEGIN, XA START and XA COMMIT ... ONE PHASE are statements.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from txmq.testing.processes.database_programs import chosen_program

_HEADER: Final = re.compile(rb"#\d{6} +\d+:\d\d:\d\d server id \d+ +end_log_pos \d+ (?:CRC32 0x[0-9a-f]+ )?\t(.*)")
_CHANGE: Final = re.compile(rb"### (INSERT INTO|UPDATE|DELETE FROM) `(.*)`\.`(.*)`")
_CELL: Final = re.compile(rb"###   @\d+=(.*?) */\* (.*) meta=-?\d+ nullable=\d is_null=\d \*/$")
_OPS: Final = {b"INSERT INTO": "c", b"UPDATE": "u", b"DELETE FROM": "d"}
_XA_END: Final = re.compile(r"XA (COMMIT|ROLLBACK) (\S+)$")
_GTID_NEXT: Final = re.compile(rb"SET @@SESSION\.GTID_NEXT= '([^':]+:\d+)'")

Cell = tuple[bytes, str]  # as shown, and the type's name there
Image = tuple[Cell, ...]


class DecodedChange(NamedTuple):
    """A change of a row: ``gtid`` is that of the group of events in which it stands, ``row`` its number in there."""

    gtid: str
    row: int
    op: str
    table: str
    before: Image | None
    after: Image | None


class Decoded(NamedTuple):
    """A transaction: ``statement`` is empty but for statements that change tables."""

    gtid: str
    changes: Sequence[DecodedChange]
    statement: str = ""


def binlog_files(data_directory: Path) -> list[Path]:
    """Of a server, in order."""
    return sorted(path for path in data_directory.glob("binlog.*") if path.suffix[1:].isdigit())


def read_binlog(files: Iterable[Path], database: str) -> Iterator[Decoded]:
    """The transactions of files, with the changes of one database's tables.

    Raises:
        subprocess.CalledProcessError: the program failed.
    """
    command = [chosen_program().binlog_reader, "--base64-output=decode-rows", "-vv", *map(str, files)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        yield from decoded(program.stdout, database)
    if program.returncode:
        raise subprocess.CalledProcessError(program.returncode, command)


def decoded(lines: Iterable[bytes], database: str) -> Iterator[Decoded]:
    """The same of the program's output."""
    reader = _Reader(database)
    for line in lines:
        yield from reader.take(line.rstrip(b"\n"))
    yield from reader.end()


class _Reader:
    def __init__(self, database: str) -> None:
        self._database = database.encode()
        self._parked: dict[str, list[DecodedChange]] = {}
        self._begin("")

    def _begin(self, gtid: str) -> None:
        self._gtid, self._changes, self._statement = gtid, list[DecodedChange](), ""
        self._is_transaction = False
        self._query: list[str] | None = None  # of a statement that is being read
        self._images: list[list[Cell]] = []
        self._change: tuple[str, str] | None = None
        self._rows = 0

    # --- lines -------------------------------------------------------------------------------------------------------

    def take(self, line: bytes) -> Iterator[Decoded]:
        if line.startswith(b"###"):
            self._take_row(line)
            return
        self._end_row()
        header = _HEADER.match(line) if line.startswith(b"#") else None
        if header is not None:
            yield from self._take_event(header[1].decode("utf-8", "replace"))
        elif self._query is not None:
            if line == b"/*!*/;":
                yield from self._take_statement("\n".join(self._query))
                self._query = None
            elif not line.endswith(b"/*!*/;"):  # what sets the session's variables
                self._query.append(line.decode("utf-8", "replace"))
        elif (found := _GTID_NEXT.match(line)) is not None:
            yield from self.end()
            self._begin(found[1].decode())
        elif self._gtid and line.startswith((b"START TRANSACTION", b"XA START ")):
            self._is_transaction = True
        elif self._gtid and line.startswith(b"XA PREPARE "):
            self._parked[line.decode().removeprefix("XA PREPARE ")] = self._changes
            self._begin("")
        elif self._gtid and line.startswith(b"XA COMMIT "):  # in one phase: it is in the place of XA PREPARE
            yield self._committed(self._changes)

    def _take_event(self, text: str) -> Iterator[Decoded]:
        name, _, rest = text.partition(" ")
        if name == "GTID":
            yield from self.end()
            self._begin(rest.split()[0])
        elif name == "Start:":  # another file: what is open is never finished
            yield from self.end()
            self._begin("")
        elif name == "Xid":
            yield self._committed(self._changes)
        elif name.startswith("Query"):
            self._query = []

    def end(self) -> Iterator[Decoded]:
        """A statement by itself ends where the next group begins."""
        self._end_row()
        if self._gtid and self._statement and not self._is_transaction:
            yield self._committed(self._changes)

    def _take_statement(self, text: str) -> Iterator[Decoded]:
        found = _XA_END.match(text)
        if found is not None:
            rows = self._parked.pop(found[2], [])
            yield self._committed(rows if found[1] == "COMMIT" else [])
        elif text == "COMMIT":
            yield self._committed(self._changes)
        elif text == "ROLLBACK":
            self._begin("")
        elif text.startswith(("BEGIN", "XA START ")):
            self._is_transaction = True
        elif not text.startswith(("SAVEPOINT ", "ROLLBACK TO", "XA END ")):
            self._statement = text

    def _committed(self, changes: Sequence[DecodedChange]) -> Decoded:
        found = Decoded(self._gtid, changes, self._statement)
        self._begin("")
        return found

    # --- rows --------------------------------------------------------------------------------------------------------

    def _take_row(self, line: bytes) -> None:
        cell = _CELL.match(line)
        if cell is not None:
            self._images[-1].append((cell[1], cell[2].decode()))
        elif line in (b"### SET", b"### WHERE"):
            self._images.append([])
        elif (found := _CHANGE.match(line)) is not None:
            self._end_row()
            self._change = (_OPS[found[1]], found[3].decode()) if found[2] == self._database else None
            self._images = []
        else:
            raise ValueError(f"a line of a binlog's reader that is not known: {line[:200]!r}")

    def _end_row(self) -> None:
        if self._change is not None and self._images:
            (op, table), images = self._change, [tuple(image) for image in self._images]
            before = images[0] if op in "ud" else None
            after = images[-1] if op in "uc" else None
            self._changes.append(DecodedChange(self._gtid, self._rows, op, table, before, after))
            self._rows += 1
        self._change, self._images = None, []
