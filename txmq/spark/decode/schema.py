"""The columns of a source as Spark sees them: which there are, and which of them a reader makes.

Spark tells a Python source neither which columns a query uses nor which it aggregates, so everything declared is made
and shipped. ``columns`` (an option) and ``.schema(...)`` declare less.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from txmq.errors import ConfigError
from txmq.spark.decode.arrow_columns import TYPES

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

_HEADERS: Final = "headers"


def _spark_types() -> dict[str, DataType]:
    from pyspark.sql import types

    header = types.StructType(
        [types.StructField("key", types.StringType()), types.StructField("value", types.BinaryType())]
    )
    return {
        "key": types.BinaryType(),
        "value": types.BinaryType(),
        "topic": types.StringType(),
        "partition": types.IntegerType(),
        "offset": types.LongType(),
        "timestamp": types.TimestampType(),
        _HEADERS: types.ArrayType(header),
        "txid": types.StringType(),
    }


def schema_of(names: tuple[str, ...] | None, has_headers: bool) -> StructType:
    """The columns that are read if none are declared with ``.schema(...)``.

    Raises:
        ConfigError: the option ``columns`` names one that does not exist, or one twice.
    """
    from pyspark.sql.types import StructField, StructType

    if names is None:
        names = tuple(name for name in TYPES if has_headers or name != _HEADERS)
    for name in names:
        if name not in TYPES or names.count(name) > 1:
            raise ConfigError(f"option columns: {name!r} is not one of {', '.join(TYPES)}, once each")
    known = _spark_types()
    return StructType([StructField(name, known[name]) for name in names])


def names_of(schema: StructType) -> tuple[str, ...]:
    """The columns a reader must make, in order; checks what a user declared with ``.schema(...)``.

    Raises:
        ConfigError: a column that does not exist, or of another type.
    """
    known = _spark_types()
    for field in schema.fields:
        if field.dataType != known.get(field.name) or not field.nullable:
            listed = ", ".join(f"{name} {kind.simpleString()}" for name, kind in known.items())
            declared = f"{field.name} {field.dataType.simpleString()}{'' if field.nullable else ' not null'}"
            raise ConfigError(f"schema: {declared} is not one of the columns there are: {listed}")
    return tuple(field.name for field in schema.fields)
