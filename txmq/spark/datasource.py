"""The format ``txmq``: leads each question of Spark to the module that answers.

Spark makes one instance per use, in a Python process of its own, and pickles what the methods return to the executors.
Options arrive with keys in lower case; ``options`` finds them in any case.

Source: PySpark 4.3, module pyspark.sql.datasource.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceArrowWriter,
        DataSourceReader,
        DataSourceStreamArrowWriter,
        DataSourceStreamReader,
    )
    from pyspark.sql.types import StructType


class TxmqDataSource(DataSource):  # type: ignore[misc]  # mypy does not look into pyspark: 30 s of every check
    """``spark.read.format("txmq")``, ``spark.readStream``, ``df.write`` and ``df.writeStream``."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "txmq"

    def schema(self) -> StructType:
        """The columns of a source if the user declares none."""
        from txmq.spark.decode.arrow_columns import schema_of
        from txmq.spark.source.options import parse_columns

        return schema_of(*parse_columns(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        """``spark.read``: through a broker, or from segment files (option ``path``)."""
        from txmq.spark.decode.arrow_columns import names_of
        from txmq.spark.source.options import parse

        options, columns = parse(self.options, is_stream=False), names_of(schema)
        if options.path is not None:
            from txmq.spark.segment_files import PathReader

            return PathReader(options, columns)
        from txmq.spark.source.batch_reader import BatchReader

        return BatchReader(options, columns)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """``spark.readStream``."""
        from txmq.spark.decode.arrow_columns import names_of
        from txmq.spark.source.options import parse
        from txmq.spark.source.stream import StreamReader

        return StreamReader(parse(self.options, is_stream=True), names_of(schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """``df.write``."""
        from txmq.spark.sink.sink import make_writer

        return make_writer(dict(self.options), schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        """``df.writeStream``."""
        from txmq.spark.sink.sink import make_stream_writer

        return make_stream_writer(dict(self.options), schema, overwrite=overwrite)
