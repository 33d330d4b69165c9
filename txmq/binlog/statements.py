"""Statements that stand as text in the binlog: what each does to which tables.

With row format these are DDL, the ends of transactions, savepoints, XA, and what changes neither rows nor columns. A
statement that changes rows has no row events, so it is refused: nothing here runs SQL. One that begins with a word that
is not known is refused as well.

Sources: MariaDB, "SQL Statements"; gh-ost, pt-online-schema-change: names of shadow tables.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cache
from itertools import pairwise
from typing import Final

from txmq.binlog.decoded_changes import Ddl, DdlKind, TableName, XaEnd
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
    DML = auto()  # changes rows, or may, and no event shows them


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement recognised.

    Args:
        name: of a savepoint.
        ddl: of DML, set if it is known which tables' rows may change.
    """

    what: What
    name: str = ""
    ddl: Ddl | None = None
    xa: XaEnd | None = None


_ANSI_QUOTES, _NO_ESCAPES = "ANSI_QUOTES", "NO_BACKSLASH_ESCAPES"
_DIALECTS: Final = frozenset({"MSSQL", "ORACLE"})  # modes in which statements are read otherwise
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
# In a CREATE TABLE ... SELECT as MariaDB writes it into its binlog: how a column is stored, and nothing else.
_COMPRESSED: Final = re.compile(r"/\*M!100301 COMPRESSED\*/")
# MySQL's of a CREATE TABLE ... SELECT: the rows follow in the same transaction, as they do without it.
_ROWS_FOLLOW: Final = re.compile(r"\s+START\s+TRANSACTION\s*\Z", re.IGNORECASE)
_SHADOW: Final = re.compile(r"_+(?P<table>.+?)(?:_\d{14})?_(?:gho|ghc|del|new|old)\Z")
_KEEPS_ROWS: Final = re.compile(  # a part of ALTER TABLE that leaves rows and columns as they are
    r"ALTER |COMMENT|AUTO_INCREMENT|ENGINE|ROW_FORMAT|STATS_|ALGORITHM|LOCK|FORCE|DISABLE|ENABLE|DEFAULT|ORDER"
    r"|DROP (?:INDEX|KEY|CONSTRAINT|FOREIGN|CHECK)|RENAME (?:INDEX|KEY)|KEY_BLOCK_SIZE|MAX_ROWS"
)


@cache
def _token(*, ansi_quotes: bool, escapes: bool) -> re.Pattern[str]:
    """What splits a statement into tokens, in a sql_mode."""
    escaped = r"|\\." if escapes else ""
    no_end = r"\\" if escapes else ""
    double = r'"(?:[^"]|"")*"' if ansi_quotes else rf'"(?:[^"{no_end}]|""{escaped})*"'
    return re.compile(
        r"""\s+|--[ \t\n][^\n]*|--$|\#[^\n]*|/\*(?!M?!).*?\*/|/\*M?!\d*|\*/"""  # between tokens; /*! ... */ is run
        rf"""|(?P<quoted>`(?:[^`]|``)*`{"|" + double if ansi_quotes else ""})"""
        rf"""|(?P<string>'(?:[^'{no_end}]|''{escaped})*'{"" if ansi_quotes else "|" + double})"""
        r"""|(?P<hex>[xX]'[0-9a-fA-F]*')"""
        r"""|(?P<word>[0-9A-Za-z_$@\u0080-\U0010ffff]+)|(?P<mark>.)""",
        re.DOTALL,
    )


def _split(text: str, sql_mode: Collection[str]) -> Iterator[re.Match[str]]:
    return _token(ansi_quotes=_ANSI_QUOTES in sql_mode, escapes=_NO_ESCAPES not in sql_mode).finditer(text)


def shadowed(table: TableName) -> TableName | None:
    """The table that this one is a shadow of, by the names that online-alter tools give; None if it is none.

    MariaDB's and MySQL's own ``#sql-...`` shadow no table that can be named: they are shadows of themselves.
    """
    if table.name.startswith("#sql"):
        return table
    match = _SHADOW.match(table.name)
    return None if match is None else TableName(table.database, match["table"])


def recognise(text: str, database: str, sql_mode: Collection[str] = ()) -> Statement:
    """What a statement is.

    Args:
        database: of names without one.
        sql_mode: the modes in which it was run.
    """
    xid = _XID.match(text)
    if xid is not None:
        gtrid, bqual = bytes.fromhex(xid[2]), bytes.fromhex(xid[3])
        return Statement(What.XA_END, xa=XaEnd(Xid(int(xid[4]), gtrid, bqual), xid["end"].upper() == "COMMIT"))
    words = _Words(_tokens(text, sql_mode), database)
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
    what = What.DML if found.kind is DdlKind.UNSEEN else What.DDL
    if found.kind is DdlKind.CREATE:
        text = _ROWS_FOLLOW.sub("", text)
    return Statement(what, ddl=replace(found, statement=text, database=database))


def renamed_columns(text: str, database: str, sql_mode: Collection[str] = ()) -> dict[str, str]:
    """The columns that an ALTER TABLE gives other names: new names by old ones, these in small letters."""
    words = _Words(_tokens(text, sql_mode), database)
    words.skip_to("TABLE")
    words.skip("IF", "EXISTS")
    words.table()
    return dict(pair for part in words.parts() if (pair := part.renamed_column()) is not None)


_ENDS: Final = {"BEGIN": What.BEGIN, "COMMIT": What.COMMIT, "ROLLBACK": What.ROLLBACK}
_NO_TABLE: Final = Ddl(DdlKind.OTHER, "", "", additive=True)


def _ddl(words: _Words) -> Ddl | None:
    """What it does; statement and database are the caller's to say."""
    first = words.peek()
    if first == "TRUNCATE":
        words.skip("TRUNCATE")
        words.skip("TABLE")
        return _empties(DdlKind.TRUNCATE, words.table())
    if words.skip("DELETE", "FROM"):  # a MEMORY table after the server's restart; without WHERE it is as TRUNCATE
        table = words.table()
        return _empties(DdlKind.TRUNCATE, table) if words.at_end else None
    if first == "RENAME":
        words.skip("RENAME")
        return _rename(words) if words.skip("TABLE") or words.skip("TABLES") else _NO_TABLE
    if first in _OBJECTS:
        words.skip(first)
        return _OBJECTS[first](words)
    return _NO_TABLE if first in _OTHER else None


def _empties(kind: DdlKind, *tables: TableName) -> Ddl:
    return Ddl(kind, "", "", emptied=tables)


def _create(words: _Words) -> Ddl:
    replaces = words.skip("OR", "REPLACE")
    if not words.skip("TABLE"):
        return _index_or_other(words, empties=replaces)
    may_exist = words.skip("IF", "NOT", "EXISTS")  # then it stays as it is, and the binlog has the statement
    table = words.table()
    read = (words.table(),) if words.skip("LIKE") or words.skip("(", "LIKE") else ()
    made = Ddl(DdlKind.CREATE, "", "", read=read, additive=not replaces)
    return replace(made, concerned=(table,)) if may_exist else replace(made, emptied=(table,))


def _index_or_other(words: _Words, *, empties: bool) -> Ddl:
    for kind in ("UNIQUE", "FULLTEXT", "SPATIAL", "ONLINE", "OFFLINE"):
        words.skip(kind)
    if words.skip("INDEX") or words.skip("KEY"):
        words.skip_to("ON")
        return Ddl(DdlKind.ALTER, "", "", concerned=(words.table(),), additive=True)
    return _database(words, empties=empties) or _NO_TABLE


def _database(words: _Words, *, empties: bool) -> Ddl | None:
    if not (words.skip("DATABASE") or words.skip("SCHEMA")):
        return None
    words.skip("IF", "NOT", "EXISTS")
    words.skip("IF", "EXISTS")
    whole = TableName(words.name(), "")
    return _empties(DdlKind.DATABASE, whole) if empties else Ddl(DdlKind.DATABASE, "", "", concerned=(whole,))


def _drop(words: _Words) -> Ddl:
    if not (words.skip("TABLE") or words.skip("TABLES")):
        return _index_or_other(words, empties=True)
    words.skip("IF", "EXISTS")
    tables = [words.table()]
    while words.skip(","):
        tables.append(words.table())
    return _empties(DdlKind.DROP, *tables)


def _rename(words: _Words) -> Ddl:
    words.skip("IF", "EXISTS")
    pairs = [_pair(words)]
    while words.skip(","):
        pairs.append(_pair(words))
    moved = dict(pairs)
    swapped = [
        new for old, new in pairs if shadowed(old) == new and new in moved and shadowed(moved[new]) == new
    ]  # the shadow's rows are in the table's place, and the table's under a shadow's name
    if swapped:
        return Ddl(DdlKind.SWAP, "", "", concerned=tuple(swapped))
    return Ddl(DdlKind.RENAME, "", "", moved=tuple(pairs))


def _pair(words: _Words) -> tuple[TableName, TableName]:
    old = words.table()
    words.skip_to("TO")
    return old, words.table()


def _alter(words: _Words) -> Ddl:
    words.skip("ONLINE") or words.skip("OFFLINE")
    drops_duplicates = words.skip("IGNORE")
    if not words.skip("TABLE"):
        return _database(words, empties=False) or _NO_TABLE
    words.skip("IF", "EXISTS")
    table = words.table()
    words.skip("NOWAIT") or (words.skip("WAIT") and words.name())
    parts = words.parts()
    unseen = [other for part in parts for other in part.unseen_rows()]
    if unseen:
        return Ddl(DdlKind.UNSEEN, "", "", concerned=(table, *(other for other in unseen if other is not None)))
    new = next((name for part in parts if (name := part.new_name()) is not None), None)
    additive = new is None and not drops_duplicates and all(part.keeps_rows() for part in parts)
    altered = Ddl(DdlKind.ALTER, "", "", additive=additive)
    return replace(altered, concerned=(table,)) if new is None else replace(altered, moved=((table, new),))


_OBJECTS: Final = {"CREATE": _create, "DROP": _drop, "ALTER": _alter}


@dataclass(frozen=True, slots=True)
class _Token:
    text: str
    is_quoted: bool = False

    @property
    def word(self) -> str:
        return "" if self.is_quoted else self.text.upper()


def _tokens(text: str, sql_mode: Collection[str]) -> list[_Token]:
    found = []
    for match in _split(text, sql_mode):
        kind, raw = match.lastgroup, match[0]
        if kind == "quoted":
            found.append(_Token(raw[1:-1].replace(raw[0] * 2, raw[0]), is_quoted=True))
        elif kind in ("string", "hex"):
            found.append(_Token("'"))  # what it says does not matter
        elif kind is not None:
            found.append(_Token(raw))
    while found and found[-1].text == ";" and not found[-1].is_quoted:
        found.pop()
    return found


def oddity(text: str, sql_mode: Collection[str] = ()) -> str:
    """Why a text is not run for whoever may write one topic; empty: nothing is odd about it.

    ``recognise`` trusts that a server has run the text as one statement, and looks for the tables that it changes.
    """
    if not _DIALECTS.isdisjoint(sql_mode):
        return "it was run in another dialect of SQL (sql_mode)"
    found = [match for match in _split(text, sql_mode) if match.lastgroup is not None]
    while found and found[-1][0] == ";":
        found.pop()
    words = [match[0].upper() if match.lastgroup in ("word", "mark") else "" for match in found]
    is_cut = any(one.end() == next_.start() and one[0] + next_[0] in ("--", "/*") for one, next_ in pairwise(found))
    if is_cut or _CONTROL.search(text) or not _OPEN.isdisjoint(words):
        return "servers may read it as another statement, or as several"
    plain = _COMPRESSED.sub("", text)
    if "/*!" in plain or "/*M!" in plain or words[:2] == ["SET", "STATEMENT"]:
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

    def new_name(self) -> TableName | None:
        """The table's new name, if this part of an ALTER TABLE gives it one."""
        if not self.starts("RENAME") or self.peek(1) in ("COLUMN", "INDEX", "KEY"):
            return None
        self.skip("RENAME")
        self.skip("TO") or self.skip("AS") or self.skip("=")
        return self.table()

    def renamed_column(self) -> tuple[str, str] | None:
        """Old and new name of a column, if this part of an ALTER TABLE renames one."""
        while not self.at_end and not self.starts("CHANGE") and not self.starts("RENAME", "COLUMN"):
            if self.peek() not in ("WAIT", "NOWAIT") and not self.peek().isdigit():  # before the first part
                return None
            self.name()
        if self.skip("RENAME", "COLUMN"):
            self.skip("IF", "EXISTS")
            old = self.name()
            return (old.lower(), self.name()) if self.skip("TO") else None
        if not self.skip("CHANGE"):
            return None
        self.skip("COLUMN")
        self.skip("IF", "EXISTS")
        return self.name().lower(), self.name()

    def unseen_rows(self) -> list[TableName | None]:
        """The other table, or None for a file, if this part of an ALTER TABLE moves rows there or from there."""
        if (
            self.starts("EXCHANGE", "PARTITION")
            or self.starts("CONVERT", "PARTITION")
            or self.starts("CONVERT", "TABLE")
        ):
            self.skip_to("TABLE")
            return [self.table()]
        is_file = self.peek() in ("IMPORT", "DISCARD") and any(token.word == "TABLESPACE" for token in self._tokens)
        return [None] if is_file else []

    def keeps_rows(self) -> bool:
        """Whether this part of an ALTER TABLE leaves rows, columns and primary key as they are."""
        text = " ".join(token.word for token in self._tokens[:4])
        if self.starts("ADD") and not self.starts("ADD", "PRIMARY"):
            return "PRIMARY" not in [token.word for token in self._tokens]
        return not self._tokens or _KEEPS_ROWS.match(text) is not None
