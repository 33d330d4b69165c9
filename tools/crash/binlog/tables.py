"""The ten tables of the campaign: together they have every type of column of the server, and every kind of key.

Each table begins with the columns of its key (of a table without one: a number that is not unique), then ``stamp``,
which each statement of the load sets to a value of its own. Statements add columns after it only. A column whose name
begins with ``o`` holds what the binlog's own reader does not show as text (another character set, compressed, ...): the
comparison of the tables looks at those, the checker of the events does not.

The name of a table says what its key is, also of what statements make of it: ``_moved`` has it, ``_like`` has it,
``_rows`` has none.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final, NamedTuple

from tools.crash.binlog.columns import COLUMNS, can_declare
from txmq.testing.processes.database_programs import Ability

DATABASE: Final = "shop"
PULSE: Final = "tab_a"  # the first table of a snapshot; the campaign alone writes it
KEYS: Final = 60  # that are changed all the time
ALL_KEYS: Final = 800
MOVED, LIKE, ROWS = "_moved", "_like", "_rows"
TABLE_NAME: Final = re.compile(rf"\btab_[a-z]+(?:{MOVED}|{LIKE}|{ROWS})?\b")
_LARGE: Final = re.compile(r"repeat\(.*, \d{4,}\)")
_LARGE_SHARE: Final = 0.01
_NULL_SHARE: Final = 0.1
_GEOMETRY: Final = re.compile("geometry|point")
_OPAQUE: Final = re.compile("character set|compressed|uuid|inet|geometry|point|enum|set\\(")


class TableColumn(NamedTuple):
    """A column that the load fills.

    Attributes:
        values: SQL, one of which it is given.
    """

    name: str
    declared: str
    values: tuple[str, ...]

    def value(self, rng: random.Random) -> str:
        """SQL of a value; a large one now and then."""
        if rng.random() < _NULL_SHARE:
            return "NULL"
        value = rng.choice(self.values)
        return "NULL" if _LARGE.search(value) and rng.random() > _LARGE_SHARE else value


class Table(NamedTuple):
    """A table.

    Attributes:
        key: its first columns, name and type.
        declared_key: what is declared of them.
        literals: SQL of the key's columns, of a number below ``ALL_KEYS``.
        columns: those that are filled.
        more: columns that fill themselves, and other indexes.
    """

    name: str
    key: tuple[tuple[str, str], ...]
    declared_key: str
    literals: Callable[[int, random.Random], tuple[str, ...]]
    columns: tuple[TableColumn, ...]
    more: tuple[str, ...] = ()

    @property
    def has_key(self) -> bool:
        """Whether a row is named by its key."""
        return not self.declared_key.startswith("KEY")

    @property
    def key_names(self) -> tuple[str, ...]:
        """The key's columns."""
        return tuple(name for name, _ in self.key)

    def of(self, abilities: Collection[Ability]) -> Table:
        """The same with the columns that a server can have, and show."""
        known = [one for one in self.columns if can_declare(one.declared, abilities)]
        if Ability.SHOWN_GEOMETRY not in abilities:
            known = [one for one in known if not _GEOMETRY.search(one.declared)]
        return self._replace(columns=tuple(known))

    def create(self) -> str:
        """SQL that makes it."""
        columns = [f"{name} {declared} NOT NULL" for name, declared in self.key]
        columns += ["stamp BIGINT NOT NULL", *(f"{column.name} {column.declared}" for column in self.columns)]
        return f"CREATE TABLE {self.name} ({', '.join([*columns, self.declared_key, *self.more])}) ROW_FORMAT=DYNAMIC"

    def where(self, number: int, rng: random.Random) -> str:
        """The condition of a key."""
        pairs = zip(self.key_names, self.literals(number, rng), strict=True)
        return " AND ".join(f"{name} = {literal}" for name, literal in pairs)


def key_columns(table: str) -> tuple[tuple[str, str], ...]:
    """The columns of a table's key, by its name: each with its type; none if it has no key."""
    if table.endswith(ROWS):
        return ()
    found = BY_NAME[table.removesuffix(MOVED).removesuffix(LIKE)]
    return found.key if found.has_key else ()


def key_width(table: str) -> int:
    """How many of a table's first columns are its key, by its name; 0: it has none."""
    return len(key_columns(table))


def _one(form: str) -> Callable[[int, random.Random], tuple[str, ...]]:
    return lambda number, _: (form.format(number),)


def _text(number: int, rng: random.Random) -> tuple[str, ...]:
    return (f"'{rng.choice('kK')}{number}'",)  # one key to the database, two to the topics


def _two(number: int, _: random.Random) -> tuple[str, ...]:
    return str(number % 7), f"'b{number // 7}'"


def _large(number: int, _: random.Random) -> tuple[str, ...]:
    return (str(2**64 - 1 - number if number % 2 else number),)


def _columns() -> Iterator[Sequence[TableColumn]]:
    """All types, dealt out to ten tables. Of codes that share a character a copy has the server's own choice."""
    dealt: list[list[TableColumn]] = [[] for _ in range(10)]
    for number, (declared, _, values) in enumerate(COLUMNS):
        name = f"{'o' if _OPAQUE.search(declared) else 'c'}{number}"
        chosen = tuple(value for value in values if not value.startswith("_"))
        dealt[number % 10].append(TableColumn(name, declared, chosen))
    yield from dealt


def _tables() -> Iterator[Table]:
    dealt = _columns()
    unique = TableColumn("u", "INT", tuple(str(number) for number in range(3 * ALL_KEYS)))
    made = (
        ("int", (("id", "INT"),), "PRIMARY KEY (id)", _one("{}"), ("twice INT AS (id * 2) VIRTUAL",)),
        ("big", (("id", "BIGINT UNSIGNED"),), "PRIMARY KEY (id)", _large, ("hidden INT INVISIBLE DEFAULT 9",)),
        ("text", (("id", "VARCHAR(20)"),), "PRIMARY KEY (id)", _text, ()),
        ("two", (("a", "INT"), ("b", "VARCHAR(10)")), "PRIMARY KEY (a, b)", _two, ()),
        ("bytes", (("id", "BINARY(4)"),), "PRIMARY KEY (id)", _one("'a{:03}'"), ("t BIGINT AS (stamp * 3) STORED",)),
        ("moment", (("id", "DATETIME(6)"),), "PRIMARY KEY (id)", _one("'2026-01-01 00:00:00.{:06}'"), ()),
        ("decimal", (("id", "DECIMAL(12,3)"),), "UNIQUE (id)", _one("{}.125"), ()),
        ("unique", (("id", "INT"),), "UNIQUE (id)", _one("{}"), ("UNIQUE (u)",)),
        ("keyless", (("id", "INT"),), "KEY (id)", _one("{}"), ()),
        ("heap", (("id", "INT"),), "KEY (id)", _one("{}"), ()),
    )  # fmt: skip
    for (name, key, declared, literals, more), columns in zip(made, dealt, strict=True):
        yield Table(f"tab_{name}", key, declared, literals, (*columns, *([unique] if name == "unique" else ())), more)


TABLES: Final = tuple(_tables())
_PULSE_TABLE: Final = Table(PULSE, (("id", "INT"),), "PRIMARY KEY (id)", _one("{}"), ())
BY_NAME: Final = {table.name: table for table in (*TABLES, _PULSE_TABLE)}
