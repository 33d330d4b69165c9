"""The format ``txmq``: what Spark asks of it, and which module answers.

Spark makes one instance per use, in a Python process of its own, and pickles what the methods return to the executors.
Options arrive with keys in lower case; ``options`` finds them in any case.

Source: PySpark 4.3, pyspark/sql/datasource.py.
"""

from __future__ import annotations

from pyspark.sql.datasource import DataSource


class TxmqDataSource(DataSource):  # type: ignore[misc]  # mypy does not look into pyspark: 30 s of every check
    """``spark.read.format("txmq")``, ``spark.readStream``, ``df.write`` and ``df.writeStream``."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "txmq"
