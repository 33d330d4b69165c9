"""Where Spark finds the format ``txmq``.

Spark imports every top-level module named ``pyspark_*`` and registers its ``DefaultSource``.

Source: PySpark 4.3, pyspark/sql/worker/lookup_data_sources.py.
"""

from txmq.spark.datasource import TxmqDataSource as DefaultSource

__all__ = ["DefaultSource"]
