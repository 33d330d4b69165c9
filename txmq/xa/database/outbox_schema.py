"""The statements that create the tables of an outbox (``outbox_tables``, ``outbox_topics``, ``fingerprint``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from txmq.xa.database.dialects import Dialect


class _Kind(NamedTuple):
    """Differences of the databases that only these tables meet; ``keys`` and ``numbers`` are indexes within a table."""

    serial: str
    bytes: str
    slot: str
    long_text: str
    options: str
    keys: str = ""
    numbers: str = ""


_KINDS = {
    "sqlite": _Kind("INTEGER PRIMARY KEY", "BLOB", "TEXT", "TEXT", ""),
    "mysql": _Kind(
        "BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY", "LONGBLOB", "VARCHAR(220) CHARACTER SET ascii COLLATE ascii_bin",
        "MEDIUMTEXT CHARACTER SET ascii COLLATE ascii_bin",
        " ENGINE=InnoDB", ", KEY (id), KEY (hash, slot)", ", KEY (home, number), KEY (state)",
    ),
    "postgresql": _Kind(
        "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY", "BYTEA", 'VARCHAR(220) COLLATE "C"', "TEXT", "",
    ),
}  # fmt: skip


def statements(marker: str, dialect: Dialect) -> Iterator[str]:
    """What creates the tables that are missing."""
    d, kind, name = dialect, _KINDS[dialect.name], f"{marker}_outbox"
    row = f"seq {kind.serial}, number {d.number} NOT NULL, id {d.text} NOT NULL UNIQUE, state {d.text} NOT NULL, "
    row += f"written_ms {d.number} NOT NULL, size_bytes {d.number} NOT NULL, reason {d.text} NOT NULL, "
    row += f"batches {kind.bytes} NOT NULL, {_home(d)}"
    key = f"slot {kind.slot} NOT NULL, hash {d.text} NOT NULL, id {d.text} NOT NULL, PRIMARY KEY (slot, hash, id)"
    numbering = f"id {d.number} NOT NULL PRIMARY KEY, series {d.text} NOT NULL, number {d.number} NOT NULL, "
    numbering += f"holder {d.text} NOT NULL, until_ms {d.number} NOT NULL"
    topic = f"name {d.text} NOT NULL PRIMARY KEY, topic_id {d.number} NOT NULL, partitions {d.number} NOT NULL, "
    topic += f"homes {kind.long_text}"
    server = f"id {d.number} NOT NULL PRIMARY KEY, fingerprint {d.text} NOT NULL"
    yield f"CREATE TABLE IF NOT EXISTS {marker}_server ({server}){d.table_options}"
    yield f"CREATE TABLE IF NOT EXISTS {name} ({row}{kind.numbers}){kind.options}"
    yield f"CREATE TABLE IF NOT EXISTS {name}_keys ({key}{kind.keys}){d.table_options}"
    yield f"CREATE TABLE IF NOT EXISTS {name}_series ({numbering}){d.table_options}"
    yield f"CREATE TABLE IF NOT EXISTS {name}_topics ({topic}){d.table_options}"


def indexes(marker: str, dialect: Dialect) -> Iterator[str]:
    """What creates the indexes that are not part of a table."""
    name = f"{marker}_outbox"
    if not _KINDS[dialect.name].keys:
        short = marker.replace(".", "_")
        for table, columns in (
            (f"{name}_keys", "id"),
            (f"{name}_keys", "hash, slot"),
            (name, "state"),
            (name, "home, number"),
        ):
            index = f"{short}_outbox_{columns.partition(',')[0]}s"
            yield f"CREATE INDEX IF NOT EXISTS {index} ON {table} ({columns})"


class Addition(NamedTuple):
    """What a table of an older txmq lacks: a column, and the statement that adds it."""

    table: str
    column: str
    statement: str


def additions(marker: str, dialect: Dialect) -> Iterator[Addition]:
    """Columns that came later, in tables that may be there without them. An older txmq goes on beside this one."""
    name, kind = f"{marker}_outbox", _KINDS[dialect.name]
    add_home = f"ALTER TABLE {name} ADD COLUMN {_home(dialect)}"
    yield Addition(name, "home", f"{add_home}, ADD KEY (home, number)" if kind.keys else add_home)
    yield Addition(f"{name}_topics", "homes", f"ALTER TABLE {name}_topics ADD COLUMN homes {kind.long_text}")


def _home(dialect: Dialect) -> str:
    return f"home {dialect.text} DEFAULT '' NOT NULL"
