"""The house of the Spark tests stands: a session starts, and Spark finds the format by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_a_session_runs_a_job(spark: SparkSession) -> None:
    assert spark.range(10).count() == 10
