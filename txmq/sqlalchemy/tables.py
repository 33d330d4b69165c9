"""Tables in the application's metadata, as ``txmq/outbox/tables.py`` and the offset store create them.

Sources: SQLAlchemy, "Working with Multiple Backend-Specific Types", "Custom SQL Constructs and Compilation Extension".
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sqlalchemy import (
    BigInteger,
    Column,
    FunctionElement,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    text,
)
from sqlalchemy.dialects import mysql
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.types import TypeEngine

from txmq.errors import ConfigError
from txmq.outbox.tables import KEY_PREFIX, OutboxTables
from txmq.xa.database.dialects import MYSQL, POSTGRESQL, SQLITE, Dialect

_MYSQL = ("mysql", "mariadb")
_NAME_LENGTH = 200  # of topics, ids of transactions and homes
_LOG_LENGTH = 2000  # of ``OffsetPosition.log``
_NUMBER: TypeEngine[int] = BigInteger().with_variant(Integer(), "sqlite")
_BYTES: TypeEngine[bytes] = LargeBinary().with_variant(mysql.LONGBLOB(), *_MYSQL)
_LONG_TEXT: TypeEngine[str] = Text().with_variant(mysql.LONGTEXT(), *_MYSQL)
_ASCII: TypeEngine[str] = (
    String(_NAME_LENGTH)
    .with_variant(Text(), "sqlite")
    .with_variant(mysql.VARCHAR(_NAME_LENGTH, charset="ascii", collation="ascii_bin"), *_MYSQL)
    .with_variant(String(_NAME_LENGTH, collation="C"), "postgresql")
)
_KEY_PREFIX: dict[str, Any] = {f"{name}_length": KEY_PREFIX for name in _MYSQL}
_OPTIONS: dict[str, Any] = {"mysql_engine": "InnoDB", "mariadb_engine": "InnoDB"}


class NowMs(FunctionElement[int]):
    """The database's clock in ms since 1970."""

    inherit_cache = True
    type = BigInteger()


def _clock_of(dialect: Dialect, *names: str) -> None:
    for name in names:
        compiles(NowMs, name)(lambda _element, _compiler, **_: dialect.now_ms)


_clock_of(SQLITE, "sqlite")
_clock_of(MYSQL, *_MYSQL)
_clock_of(POSTGRESQL, "postgresql")


class SchemaTables(NamedTuple):
    """The three tables."""

    messages: Table
    parked: Table
    relay: Table


def _parts(name: str) -> tuple[str, str]:
    """Schema and table. SQLAlchemy quotes what has capitals; relays and stores do not."""
    if name != name.lower():
        raise ConfigError(f"table={name!r}: give a name in lower case, which needs no quotes in any database")
    schema, _, plain = name.rpartition(".")
    return schema, plain


def tables_in(metadata: MetaData, name: str) -> SchemaTables:
    """The tables, added to the metadata.

    Args:
        name: of the first one, perhaps with a schema.

    Raises:
        ConfigError: it cannot be one.
    """
    OutboxTables(name, SQLITE, SQLITE.placeholder)
    schema, plain = _parts(name)
    given: dict[str, Any] = {"schema": schema or None, **_OPTIONS}
    messages = Table(
        plain, metadata,
        Column("id", _NUMBER, Identity(cache=1), primary_key=True, autoincrement=True),
        *_columns_of_a_message(),
        Index(f"{plain}_unit", "unit"),
        sqlite_autoincrement=True, **given,
    )  # fmt: skip
    parked = Table(
        f"{plain}_parked", metadata,
        Column("id", _NUMBER, primary_key=True, autoincrement=False),
        *_columns_of_a_message(),
        Column("why", _ASCII, nullable=False),
        Column("since_ms", _NUMBER, nullable=False),
        Index(f"{plain}_parked_key", "message_key", postgresql_using="hash", **_KEY_PREFIX),
        Index(f"{plain}_parked_unit", "unit"),
        Index(f"{plain}_parked_why", "why"),
        **given,
    )  # fmt: skip
    relay = Table(
        f"{plain}_relay", metadata,
        Column("id", Integer, primary_key=True, autoincrement=False),
        Column("uuid", _ASCII, nullable=False),
        Column("home", _ASCII, nullable=False),
        Column("last", _ASCII),
        Column("claim", _ASCII),
        Column("ids", _LONG_TEXT, nullable=False),
        Column("holder", _ASCII),
        Column("until_ms", _NUMBER, nullable=False),
        **given,
    )  # fmt: skip
    return SchemaTables(messages, parked, relay)


def offset_table_in(metadata: MetaData, name: str) -> Table:
    """The table of a ``DatabaseOffsetStore``, added to the metadata.

    Args:
        name: perhaps with a schema.

    Raises:
        ConfigError: it has capitals.
    """
    schema, plain = _parts(name)
    return Table(
        plain, metadata,
        Column("consumer_group", _ASCII, primary_key=True),
        Column("topic", _ASCII, primary_key=True),
        Column("partition_number", Integer, primary_key=True, autoincrement=False),
        Column("generation", BigInteger, nullable=False),
        Column("next_offset", BigInteger),
        Column("aside", Text().with_variant(mysql.MEDIUMTEXT(charset="utf8mb4"), *_MYSQL)),
        Column("log_history", String(_LOG_LENGTH)),
        Column("saves", BigInteger, server_default=text("0"), nullable=False),
        Column("saved_ms", BigInteger),
        schema=schema or None, sqlite_with_rowid=False, **_OPTIONS,
    )  # fmt: skip


def _columns_of_a_message() -> list[Column[Any]]:
    return [
        Column("unit", _NUMBER),
        Column("topic", _ASCII, nullable=False),
        Column("message_key", _BYTES),
        Column("value", _BYTES, nullable=False),
        Column("headers", _BYTES),
        Column("created_ms", _NUMBER, nullable=False),
    ]
