"""Statements that stand as text in the binlog: what each does to which tables.

With row format these are DDL, the ends of transactions, savepoints, XA, and what changes neither rows nor columns. A
statement that changes rows has no row events, so it is refused: nothing here runs SQL. One that begins with a word that
is not known is refused as well.

Sources: MariaDB, "SQL Statements"; gh-ost, pt-online-schema-change: names of shadow tables.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto
from itertools import pairwise
from typing import Final

from txmq.binlog.changes import Ddl, DdlKind, TableName, XaEnd
from txmq.xid import Xid


class What(Enum):
    """What a statement is."""

    BEGIN = auto()
    COMMIT = auto()
    ROLLBACK = auto()
    SAVEPOINT = auto()
    ROLLBACK_TO = auto()
    XA_END = auto()  # XA COMMIT, XA ROLLBACK
    NOTHING = auto()  # RELEASE SAVEPOINT, XA START, XA END, a comment
    DDL = auto()
    DML = auto()  # changes rows, or may


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement recognised. ``name``: of a savepoint."""

    what: What
    name: str = ""
    ddl: Ddl | None = None
    xa: XaEnd | None = None


_TOKEN: Final = re.compile(
    r"""\s+|--[ \t\n][^\n]*|--$|\#[^\n]*|/\*(?!M?!).*?\*/|/\*M?!\d*|\*/"""  # between tokens; /*! ... */ is run
    r"""|(?P<quoted>`(?:[^`]|``)*`)"""
    r"""|(?P<string>'(?:[^'\\]|''|\\.)*'|"(?:[^"\\]|""|\\.)*")"""
    r"""|(?P<hex>[xX]'[0-9a-fA-F]*')"""
    r"""|(?P<word>[0-9A-Za-z_$@\u0080-\U0010ffff]+)|(?P<mark>.)""",
    re.DOTALL,
)
_XID: Final = re.compile(r"XA (?P<end>COMMIT|ROLLBACK) X'([0-9a-f]*)',X'([0-9a-f]*)',(\d+)\Z", re.IGNORECASE)
_OTHER: Final = frozenset(
    {
        "GRANT", "REVOKE", "SET", "FLUSH", "ANALYZE", "OPTIMIZE", "REPAIR", "CHECK", "CHECKSUM", "CACHE", "INSTALL",
        "UNINSTALL", "PURGE", "RESET", "KILL", "LOCK", "UNLOCK", "SHUTDOWN", "BACKUP", "HELP", "SHOW", "USE",
    }
)  # fmt: skip
_REACHING: Final = frozenset({"SELECT", "UNION", "EXCHANGE", "LOAD_FILE"})  # beyond the tables that are named
_ELSEWHERE: Final = frozenset({"CONNECTION", "DIRECTORY"})  # options of a table
_ENGINES: Final = frozenset(
    {"INNODB", "MYISAM", "ARIA", "MEMORY", "HEAP", "ROCKSDB", "ARCHIVE", "CSV", "BLACKHOLE", "NDB", "NDBCLUSTER"}
)
_READERS: Final = frozenset(  # engines whose tables are elsewhere
    {"FEDERATED", "FEDERATEDX", "CONNECT", "SPIDER", "MERGE", "MRG_MYISAM", "OQGRAPH", "S3", "SPHINX", "MROONGA"}
)
_OPEN: Final = frozenset(";'\"`\\")  # what stands for itself has no end, or begins another statement
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_SHADOW: Final = re.compile(r"_+(?P<table>.+?)(?:_\d{14})?_(?:gho|ghc|del|new|old)\Z")
_KEEPS_ROWS: Final = re.compile(  # a part of ALTER TABLE that leaves rows and columns as they are
    r"ALTER |COMMENT|AUTO_INCREMENT|ENGINE|ROW_FORMAT|STATS_|ALGORITHM|LOCK|FORCE|DISABLE|ENABLE|DEFAULT|ORDER"
    r"|DROP (?:INDEX|KEY|CONSTRAINT|FOREIGN|CHECK)|RENAME (?:INDEX|KEY)|WAIT|NOWAIT|KEY_BLOCK_SIZE|MAX_ROWS"
)


def shadowed(table: TableName) -> TableName | None:
    """The table that this one is a shadow of, by the names that online-alter tools give; None if it is none.

    MariaDB's and MySQL's own ``#sql-...`` shadow no table that can be named: they are shadows of themselves.
    """
    if table.name.startswith("#sql"):
        return table
    match = _SHADOW.match(table.name)
    return None if match is None else TableName(table.database, match["table"])


def recognise(text: str, database: str, *, ansi_quotes: bool = False) -> Statement:
    """What a statement is. ``database``: of names without one."""
    xid = _XID.match(text)
    if xid is not None:
        gtrid, bqual = bytes.fromhex(xid[2]), bytes.fromhex(xid[3])
        return Statement(What.XA_END, xa=XaEnd(Xid(int(xid[4]), gtrid, bqual), xid["end"].upper() == "COMMIT"))
    words = _Words(_tokens(text, ansi_quotes=ansi_quotes), database)
    if words.skip("SET", "STATEMENT"):
        words.skip_to("FOR")
    first = words.peek()
    if first in _ENDS and words.count <= 2:
        return Statement(_ENDS[first])
    if words.skip("ROLLBACK", "TO") or words.skip("ROLLBACK", "WORK", "TO"):
        words.skip("SAVEPOINT")
        return Statement(What.ROLLBACK_TO, words.name())
    if words.skip("SAVEPOINT"):
        return Statement(What.SAVEPOINT, words.name())
    if first in ("", "RELEASE") or words.starts("XA", "START") or words.starts("XA", "END"):
        return Statement(What.NOTHING)
    if words.starts("START", "TRANSACTION"):
        return Statement(What.BEGIN)
    found = _ddl(words)
    if found is None:
        return Statement(What.DML)
    kind, tables, additive = found
    return Statement(What.DDL, ddl=Ddl(kind, text, database, tables, additive))


_ENDS: Final = {"BEGIN": What.BEGIN, "COMMIT": What.COMMIT, "ROLLBACK": What.ROLLBACK}
_Found = tuple[DdlKind, tuple[TableName, ...], bool]
_NO_TABLE: Final[_Found] = (DdlKind.OTHER, (), True)


def _ddl(words: _Words) -> _Found | None:
    first = words.peek()
    if first == "TRUNCATE":
        words.skip("TRUNCATE")
        words.skip("TABLE")
        return DdlKind.TRUNCATE, (words.table(),), False
    if words.skip("DELETE", "FROM"):  # a MEMORY table after the server's restart; without WHERE it is as TRUNCATE
        table = words.table()
        return (DdlKind.TRUNCATE, (table,), False) if words.at_end else None
    if first == "RENAME":
        words.skip("RENAME")
        return _rename(words) if words.skip("TABLE") or words.skip("TABLES") else _NO_TABLE
    if first in _OBJECTS:
        words.skip(first)
        return _OBJECTS[first](words)
    return _NO_TABLE if first in _OTHER else None


def _create(words: _Words) -> _Found:
    replaces = words.skip("OR", "REPLACE")
    if words.skip("TABLE"):
        words.skip("IF", "NOT", "EXISTS")
        tables = [words.table()]
        if words.skip("LIKE") or words.skip("(", "LIKE"):
            tables.append(words.table())
        return DdlKind.CREATE, tuple(tables), not replaces
    return _index_or_other(words)


def _index_or_other(words: _Words) -> _Found:
    for kind in ("UNIQUE", "FULLTEXT", "SPATIAL", "ONLINE", "OFFLINE"):
        words.skip(kind)
    if words.skip("INDEX") or words.skip("KEY"):
        words.skip_to("ON")
        return DdlKind.ALTER, (words.table(),), True
    return _database(words) or _NO_TABLE


def _database(words: _Words) -> _Found | None:
    if not (words.skip("DATABASE") or words.skip("SCHEMA")):
        return None
    words.skip("IF", "NOT", "EXISTS")
    words.skip("IF", "EXISTS")
    return DdlKind.DATABASE, (TableName(words.name(), ""),), False


def _drop(words: _Words) -> _Found:
    if not (words.skip("TABLE") or words.skip("TABLES")):
        return _index_or_other(words)
    words.skip("IF", "EXISTS")
    tables = [words.table()]
    while words.skip(","):
        tables.append(words.table())
    return DdlKind.DROP, tuple(tables), False


def _rename(words: _Words) -> _Found:
    words.skip("IF", "EXISTS")
    pairs = [_pair(words)]
    while words.skip(","):
        pairs.append(_pair(words))
    moved = dict(pairs)
    swapped = [
        new for old, new in pairs if shadowed(old) == new and new in moved and shadowed(moved[new]) == new
    ]  # the shadow's rows are in the table's place, and the table's under a shadow's name
    if swapped:
        return DdlKind.SWAP, tuple(swapped), False
    return DdlKind.RENAME, tuple(name for pair in pairs for name in pair), False


def _pair(words: _Words) -> tuple[TableName, TableName]:
    old = words.table()
    words.skip_to("TO")
    return old, words.table()


def _alter(words: _Words) -> _Found:
    for kind in ("ONLINE", "OFFLINE", "IGNORE"):
        words.skip(kind)
    if not words.skip("TABLE"):
        return _database(words) or _NO_TABLE
    words.skip("IF", "EXISTS")
    table = words.table()
    tables, additive = [table], True
    for part in words.parts():
        if part.starts("RENAME") and not (part.starts("RENAME", "INDEX") or part.starts("RENAME", "KEY")):
            part.skip("RENAME")
            if part.skip("COLUMN"):
                additive = False
                continue
            part.skip("TO") or part.skip("AS") or part.skip("=")
            tables.append(part.table())
            additive = False
        else:
            additive = additive and part.keeps_rows()
    return DdlKind.ALTER, tuple(tables), additive


_OBJECTS: Final = {"CREATE": _create, "DROP": _drop, "ALTER": _alter}


@dataclass(frozen=True, slots=True)
class _Token:
    text: str
    is_quoted: bool = False

    @property
    def word(self) -> str:
        return "" if self.is_quoted else self.text.upper()


def _tokens(text: str, *, ansi_quotes: bool) -> list[_Token]:
    found = []
    for match in _TOKEN.finditer(text):
        kind, raw = match.lastgroup, match[0]
        if kind == "quoted":
            found.append(_Token(raw[1:-1].replace("``", "`"), is_quoted=True))
        elif kind == "string" and raw[0] == '"' and ansi_quotes:
            found.append(_Token(raw[1:-1].replace('""', '"'), is_quoted=True))
        elif kind in ("string", "hex"):
            found.append(_Token("'"))  # what it says does not matter
        elif kind is not None:
            found.append(_Token(raw))
    while found and found[-1].text == ";" and not found[-1].is_quoted:
        found.pop()
    return found


def oddity(text: str) -> str:
    """Why a text is not run for whoever may write one topic; empty: nothing is odd about it.

    ``recognise`` trusts that a server has run the text as one statement, and looks for the tables that it changes.
    """
    found = [match for match in _TOKEN.finditer(text) if match.lastgroup is not None]
    while found and found[-1][0] == ";":
        found.pop()
    words = [match[0].upper() if match.lastgroup in ("word", "mark") else "" for match in found]
    is_cut = any(one.end() == next_.start() and one[0] + next_[0] in ("--", "/*") for one, next_ in pairwise(found))
    if is_cut or _CONTROL.search(text) or not _OPEN.isdisjoint(words):
        return "servers may read it as another statement, or as several"
    if "/*!" in text or "/*M!" in text or words[:2] == ["SET", "STATEMENT"]:
        return "it begins with SET STATEMENT, or has a comment that some servers run"
    reaching = next((word for word in words if word in _REACHING), "")
    if words.count("TABLE") + words.count("TABLES") > 1:
        reaching = "a second TABLE"
    for word, next_word, behind in zip(words, [*words[1:], ""], [*words[2:], "", ""], strict=False):
        if word in _ELSEWHERE and next_word in ("=", ""):
            reaching = word
        if word == "ENGINE" and (
            behind not in _ENGINES if next_word == "=" else next_word in _READERS or not next_word
        ):
            reaching = "another ENGINE"
    return f"{reaching} may touch other tables, or files" if reaching else ""


class _Words:
    """A place in a statement's tokens."""

    def __init__(self, tokens: list[_Token], database: str) -> None:
        self._tokens = tokens
        self._database = database
        self._at = 0

    @property
    def count(self) -> int:
        return len(self._tokens)

    @property
    def at_end(self) -> bool:
        return self._at >= len(self._tokens)

    def peek(self, ahead: int = 0) -> str:
        """A word in capitals; empty at the end, and for a quoted name."""
        place = self._at + ahead
        return self._tokens[place].word if place < len(self._tokens) else ""

    def starts(self, *words: str) -> bool:
        return all(self.peek(ahead) == word for ahead, word in enumerate(words))

    def skip(self, *words: str) -> bool:
        found = self.starts(*words)
        if found:
            self._at += len(words)
        return found

    def skip_to(self, word: str) -> None:
        while not self.at_end and not self.skip(word):
            self._at += 1

    def name(self) -> str:
        if self.at_end:
            return ""
        self._at += 1
        return self._tokens[self._at - 1].text

    def table(self) -> TableName:
        first = self.name()
        if self.skip("."):
            return TableName(first, self.name())
        return TableName(self._database, first)

    def parts(self) -> list[_Words]:
        """The rest, cut at the commas outside parentheses."""
        found, depth, part = [], 0, list[_Token]()
        for token in self._tokens[self._at :]:
            depth += (token.word == "(") - (token.word == ")")
            if token.word == "," and not depth:
                found.append(_Words(part, self._database))
                part = []
            else:
                part.append(token)
        return [*found, _Words(part, self._database)]

    def keeps_rows(self) -> bool:
        """Whether this part of an ALTER TABLE leaves rows, columns and primary key as they are."""
        text = " ".join(token.word for token in self._tokens[:4])
        if self.starts("ADD") and not self.starts("ADD", "PRIMARY"):
            return "PRIMARY" not in [token.word for token in self._tokens]
        return not self._tokens or _KEEPS_ROWS.match(text) is not None
