"""The statements that create the tables of an outbox (``outbox_tables``, ``outbox_topics``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from txmq.xa.database.dialects import Dialect


class _Kind(NamedTuple):
    """Differences of the databases that only these tables meet; ``keys`` and ``numbers`` are indexes within a table."""

    serial: str
    bytes: str
    slot: str
    options: str
    keys: str = ""
    numbers: str = ""


_KINDS = {
    "sqlite": _Kind("INTEGER PRIMARY KEY", "BLOB", "TEXT", ""),
    "mysql": _Kind(
        "BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY", "LONGBLOB", "VARCHAR(220) CHARACTER SET ascii COLLATE ascii_bin",
        " ENGINE=InnoDB", ", KEY (id), KEY (hash, slot)", ", KEY (number), KEY (state)",
    ),
    "postgresql": _Kind(
        "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY", "BYTEA", 'VARCHAR(220) COLLATE "C"', "",
    ),
}  # fmt: skip


def statements(marker: str, dialect: Dialect) -> Iterator[str]:
    """What creates the tables that are missing."""
    d, kind, name = dialect, _KINDS[dialect.name], f"{marker}_outbox"
    row = f"seq {kind.serial}, number {d.number} NOT NULL, id {d.text} NOT NULL UNIQUE, state {d.text} NOT NULL, "
    row += f"written_ms {d.number} NOT NULL, size_bytes {d.number} NOT NULL, reason {d.text} NOT NULL, "
    row += f"batches {kind.bytes} NOT NULL"
    key = f"slot {kind.slot} NOT NULL, hash {d.text} NOT NULL, id {d.text} NOT NULL, PRIMARY KEY (slot, hash, id)"
    numbering = f"id {d.number} NOT NULL PRIMARY KEY, series {d.text} NOT NULL, number {d.number} NOT NULL, "
    numbering += f"holder {d.text} NOT NULL, until_ms {d.number} NOT NULL"
    topic = f"name {d.text} NOT NULL PRIMARY KEY, topic_id {d.number} NOT NULL, partitions {d.number} NOT NULL"
    yield f"CREATE TABLE IF NOT EXISTS {name} ({row}{kind.numbers}){kind.options}"
    yield f"CREATE TABLE IF NOT EXISTS {name}_keys ({key}{kind.keys}){d.table_options}"
    yield f"CREATE TABLE IF NOT EXISTS {name}_series ({numbering}){d.table_options}"
    yield f"CREATE TABLE IF NOT EXISTS {name}_topics ({topic}){d.table_options}"
    if not kind.keys:
        short = marker.replace(".", "_")
        for table, columns in (
            (f"{name}_keys", "id"),
            (f"{name}_keys", "hash, slot"),
            (name, "number"),
            (name, "state"),
        ):
            index = f"{short}_outbox_{columns.partition(',')[0]}s"
            yield f"CREATE INDEX IF NOT EXISTS {index} ON {table} ({columns})"
