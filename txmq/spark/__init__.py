"""txmq in Spark: read, write and audit committed streams. Needs PySpark (docs/how-to/spark.md) and Java 17 or later.

``spark.read.format("txmq")`` finds the source by itself where txmq is installed (``pyspark_txmq``).
"""
