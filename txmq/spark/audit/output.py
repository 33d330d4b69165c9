"""Writes the result of an audit: a dataset of all findings, one JSON object, one page."""

from __future__ import annotations

import json
from pathlib import Path

from txmq.runtime.private_files import make_private_directory, write_private
from txmq.spark.audit.audit import AuditResult
from txmq.spark.audit.html_report import page
from txmq.spark.audit.summary import Summary

DATASET, OBJECT, PAGE = "findings", "audit.json", "audit.html"


def save(result: AuditResult, summary: Summary, directory: Path, dataset: str | None = None) -> Summary:
    """Write all three; what was there of an earlier audit is replaced.

    Args:
        directory: on this machine; made if it is missing.
        dataset: where Spark writes the findings (Parquet); default: in ``directory``. On a cluster a path that every
            executor reaches.

    Returns:
        The summary, with the dataset's place.
    """
    make_private_directory(directory)
    path = dataset or str((directory / DATASET).absolute())
    result.findings.write.mode("overwrite").parquet(path)
    summary = {**summary, "dataset": path}
    write_private(directory / OBJECT, json.dumps(summary, indent=1, ensure_ascii=True, default=str) + "\n", "w")
    write_private(directory / PAGE, page(summary), "w")
    return summary
