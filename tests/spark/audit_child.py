"""``txmq audit --follow`` as a process that shares the test's Java machine: it starts in a second, not in ten.

What it leaves when it is killed is what the command leaves, because Java does nothing by itself.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import txmq
from txmq.cli.audit_run import AuditCommand, Request
from txmq.errors import TxmqError
from txmq.spark.datasource import TxmqDataSource
from txmq.testing.processes.child import ChildProcess

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).resolve().parents[2]
TOLD_TIMEOUT_S = 300.0


class AuditEndedError(TxmqError):
    """The audit ended, or told nothing in time."""


class AuditChild(ChildProcess):
    """The process."""

    failure = AuditEndedError
    title = "the audit"

    def __init__(self, spark: SparkSession, request: dict[str, Any], log_file: Path) -> None:
        super().__init__(log_file)
        self._spark = spark
        gateway = spark.sparkContext._gateway
        assert gateway is not None
        parameters = gateway.gateway_parameters
        self._request = json.dumps(request | {"directory": str(request["directory"])})
        self._env = {
            "PYTHONPATH": str(ROOT),
            "PYSPARK_GATEWAY_PORT": str(parameters.port),
            "PYSPARK_GATEWAY_SECRET": str(parameters.auth_token),
        }

    def start(self, *, crash: str | None = None) -> AuditChild:
        """Start it; ``crash``: a value of TXMQ_CRASH."""
        self._require_stopped()
        armed = {} if crash is None else {"TXMQ_CRASH": crash}
        self._spawn([sys.executable, "-m", __name__, self._request], {**os.environ, **self._env, **armed})
        return self

    def __enter__(self) -> AuditChild:
        return self

    def __exit__(self, *error: Any) -> None:
        """What the child registered in the session that it shares goes with its process: register it anew."""
        super().__exit__(*error)
        self._spark.dataSource.register(TxmqDataSource)

    def told(self) -> list[dict[str, Any]]:
        """The findings it has told, over all its lives."""
        return [json.loads(line) for line in self.logs().splitlines() if line.startswith("{")]

    def wait_until_told(self, *expected: tuple[str, str]) -> None:
        """Wait until each of these (kind, identity) was told."""
        self._wait_until(
            lambda: {*expected} <= {(line["kind"], line["identity"]) for line in self.told()}, TOLD_TIMEOUT_S
        )


def _attached() -> SparkSession:
    """The session that the test has."""
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    gateway = launch_gateway()  # of the environment: nothing is launched
    jvm: Any = gateway.jvm
    context = jvm.org.apache.spark.api.java.JavaSparkContext.fromSparkContext(
        jvm.org.apache.spark.SparkContext.getOrCreate()
    )
    conf = SparkConf(_jvm=jvm, _jconf=context.getConf())
    return SparkSession(SparkContext(gateway=gateway, jsc=context, conf=conf))


def main() -> int:
    """``audit_child REQUEST`` (JSON)."""
    fields = json.loads(sys.argv[1])
    tuples = {name: tuple(fields[name]) for name in ("match", "compare", "together")}
    request = Request(**{**fields, **tuples, "directory": Path(fields["directory"])})
    command = AuditCommand(request, as_json=True)
    with txmq.connect(request.bootstrap) as client:
        return command.audited(_attached(), client, *command.prepare())


if __name__ == "__main__":
    sys.exit(main())
