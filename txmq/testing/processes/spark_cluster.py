"""A Spark standalone cluster on this machine, from pyspark's own jars: a master, and workers of one core each.

Theory of operation. Master and workers are Java processes of their own; a worker starts an executor process for each
application. So tasks run in other processes than the driver's, in another directory, and everything that a task needs
must travel with it: what ``local[2]`` hides, a cluster shows.

Source: Spark, "Spark Standalone Mode", "Starting a Cluster Manually".
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from txmq.errors import TxmqError
from txmq.testing.processes.broker import free_port
from txmq.testing.processes.child import ChildProcess
from txmq.testing.processes.spark import environment

START_TIMEOUT_S = 120.0
_EXECUTOR = b"CoarseGrainedExecutorBackend"
_HOST = "127.0.0.1"
_MASTER, _WORKER = "org.apache.spark.deploy.master.Master", "org.apache.spark.deploy.worker.Worker"


class SparkClusterError(TxmqError):
    """The master or a worker ended, or did not serve in time; the text ends with the end of its log."""


class _Daemon(ChildProcess):
    failure = SparkClusterError
    title = "a process of the Spark cluster"

    def run(self, arguments: list[str], env: Mapping[str, str], ready: str) -> None:
        # The class path that Spark makes by itself is the only one that its archive of classes is for.
        self._spawn([str(Path(env["SPARK_HOME"]) / "bin" / "spark-class"), *arguments], env)
        self._wait_until(lambda: ready in self.logs(), START_TIMEOUT_S)


class SparkCluster:
    """One cluster. Usable as a block: its processes are killed at the end.

    Args:
        directory: for logs and the executors' work; made here.
        workers: how many, of one core and 1 GiB each.

    Attributes:
        master: ``spark://HOST:PORT`` once it is started.
    """

    def __init__(self, directory: Path | str, workers: int = 2) -> None:
        self.directory = Path(directory).absolute()
        self.master = ""
        self._daemons = [_Daemon(self.directory / f"{name}.log") for name in ("master", *map(str, range(workers)))]

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> Self:
        """Start the master, then the workers, and wait until all of them are registered.

        Raises:
            SparkClusterError: one ended, or does not serve in time.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        # pyspark's home has no file RELEASE, by which the workers would know that the jars are in jars/.
        env = {**os.environ, **(quick := environment()), "SPARK_SCALA_VERSION": "2.13"}
        env |= {"SPARK_DAEMON_JAVA_OPTS": quick["SPARK_SUBMIT_OPTS"], "SPARK_DAEMON_MEMORY": "256m"}
        port = free_port(_HOST)
        self.master = f"spark://{_HOST}:{port}"
        master, *workers = self._daemons
        address = ["--host", _HOST, "--webui-port", "0"]
        master.run([_MASTER, *address, "--port", str(port)], env, "New state: ALIVE")
        for number, worker in enumerate(workers):
            work = ["--work-dir", str(self.directory / f"work-{number}"), "--cores", "1", "--memory", "1g"]
            worker.run([_WORKER, *address, *work, self.master], env, "Successfully registered with master")
        return self

    @property
    def daemons(self) -> list[int]:
        """The processes of the master and the workers that run."""
        return [daemon.pid for daemon in self._daemons if daemon.pid is not None]

    def executors(self) -> list[int]:
        """The processes in which tasks run now, one for each worker and application; Linux only."""
        workers, found = self.daemons, []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
                if parent in workers and _EXECUTOR in (process / "cmdline").read_bytes():
                    found.append(int(process.name))
        return found

    def stop(self) -> None:
        """End all of its processes; executors end with their workers."""
        for daemon in reversed(self._daemons):
            daemon.kill()
