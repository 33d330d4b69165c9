"""Spark on this machine, for tests, demos and proofs: a session that starts in seconds, and a standalone cluster.

Theory of operation. PySpark's workers import it from a zip file without compiled modules: a second for each process. A
*home* of links without that zip makes them import the installed package. The Java machine loads 20,000 classes at each
start: an archive of them (class data sharing), made once by a session of its own, halves the time to the first job.
Both lie in the virtual environment and go with it.

A cluster has a master, and workers of one core each, from pyspark's own jars. All are Java processes of their own, and
a worker starts an executor process for each application. So tasks run in other processes than the driver's, in another
directory, and everything that a task needs must travel with it: what ``local[2]`` hides, a cluster shows.

Measured on 2 cores: first job of a Python data source 16 s after the start without, 6 s with both; the archive takes
18 s once.

Source: JEP 350 (dynamic class-data archives); module pyspark.find_spark_home; Spark, "Spark Standalone Mode", "Starting
a Cluster Manually".
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Self

from txmq.errors import TxmqError
from txmq.runtime.build import how_to_install
from txmq.runtime.private_files import make_private_directory, open_private, private_umask
from txmq.testing.processes.broker import free_port
from txmq.testing.processes.child import ChildProcess, ServerGroup

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JAVA_VERSION_MIN = 17
ARCHIVE_TIMEOUT_S = 300.0
_JVM_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto -Xlog:cds=off -Xlog:cds+dynamic=off"
_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.session.timeZone": "UTC",
}
START_TIMEOUT_S = 120.0
_IN_UTC = "-Duser.timezone=UTC"  # of times that JDBC gives without a zone
_EXECUTOR = b"CoarseGrainedExecutorBackend"
_HOST = "127.0.0.1"
_MASTER, _WORKER = "org.apache.spark.deploy.master.Master", "org.apache.spark.deploy.worker.Worker"


def find_java(user: str, failure: type[TxmqError]) -> str:
    """The program ``java``: of ``JAVA_HOME`` if that is set, else of the PATH.

    Args:
        user: the server that needs it, for the error.
        failure: raised if there is none, or an older one.
    """
    java_home = os.environ.get("JAVA_HOME")
    java = str(Path(java_home) / "bin" / "java") if java_home else shutil.which("java")
    advice = f"{user} needs Java {JAVA_VERSION_MIN} or later: apt-get install openjdk-17-jre-headless"
    if java is None:
        raise failure(f"{advice}; there is no java on the PATH")
    version = _version_of(java)
    if not version.isdecimal() or int(version) < JAVA_VERSION_MIN:  # Java 8 calls itself 1.8
        raise failure(f"{advice}; {java} is version {version}")
    return java


@cache
def _version_of(java: str) -> str:
    answer = subprocess.run(  # noqa: S603
        [java, "-XshowSettings:properties", "-version"], capture_output=True, text=True, check=False
    )
    lines = (line.partition("=") for line in answer.stderr.splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == "java.specification.version"), "0")


# --- a session --------------------------------------------------------------------------------------------------------


class SparkMissingError(TxmqError):
    """PySpark or Java is not there, or too old; the text says what to install."""


def environment(*, is_quick_start: bool = True) -> dict[str, str]:
    """The variables under which a process of this machine starts Spark quickly: for ``os.environ`` or a child.

    Args:
        is_quick_start: less compiling at run time; False if throughput is measured.

    Raises:
        SparkMissingError: no PySpark, or no Java 17 or later.
    """
    home = _home()
    variables = {
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
    }
    find_java("Spark", SparkMissingError)
    if is_quick_start:
        variables["SPARK_SUBMIT_OPTS"] = f"{_JVM_OPTIONS} -XX:SharedArchiveFile={_archive(home, variables)}"
    return variables


def start_session(
    application: str = "txmq", *, settings: Mapping[str, str] | None = None, is_quick_start: bool = True
) -> SparkSession:
    """The one Spark session of this process: ``local[2]``, no web page, times in UTC. Sets the process's environment.

    Args:
        application: its name in Spark's log.
        settings: Spark settings by name, over the ones here.
        is_quick_start: less compiling at run time; False if throughput is measured.

    Raises:
        SparkMissingError: no PySpark, or no Java 17 or later.
    """
    os.environ.update(environment(is_quick_start=is_quick_start))
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").appName(application)
    for key, value in {**_SETTINGS, **(settings or {})}.items():
        builder = builder.config(key, value)
    session: SparkSession = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


@contextmanager
def open_session(directory: Path, master: str, memory: str, *, is_short: bool = False) -> Iterator[SparkSession]:
    """A session for a block; what Java says goes to ``spark.log`` in the directory; ``is_short``: of a few rows."""
    settings = {
        "spark.master": master,
        "spark.driver.memory": memory,
        "spark.sql.shuffle.partitions": "2" if is_short else "8",
        "spark.driver.extraJavaOptions": _IN_UTC,
        "spark.executor.extraJavaOptions": _IN_UTC,
        "spark.hadoop.fs.permissions.umask-mode": "077",  # Hadoop sets modes itself
    }
    make_private_directory(directory)
    logging.disable(logging.ERROR)  # py4j tells Ctrl-C as tracebacks of its own; what matters comes back as an error
    with _errors_to(directory / "spark.log"), private_umask():
        spark = start_session("txmq audit", settings=settings, is_quick_start=is_short)
    try:
        yield spark
    finally:
        with suppress(Exception):
            spark.stop()
        logging.disable(logging.NOTSET)


@contextmanager
def _errors_to(path: Path) -> Iterator[None]:
    """Processes that are started meanwhile have this file as standard error."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open_private(path, "ab") as log:
        os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _home() -> Path:
    try:
        import pyspark
    except ImportError as error:
        raise SparkMissingError(f"PySpark is not installed: {how_to_install('spark')}") from error
    installed = Path(pyspark.__file__).parent
    home = Path(sys.prefix) / "share" / "txmq" / f"spark-{pyspark.__version__}"
    with _locked(home):
        (home / "python" / "lib").mkdir(parents=True, exist_ok=True)
        for name in ("bin", "jars", "sbin", "data"):
            link = home / name
            if link.is_symlink() and link.resolve() != (installed / name).resolve():
                link.unlink()
            if not link.is_symlink():
                link.symlink_to(installed / name)
    return home


def _archive(home: Path, variables: Mapping[str, str]) -> Path:
    """The archive of Java classes; made once, by a session of its own; the file has its name when it is whole."""
    archive = home / "classes.jsa"
    with _locked(home):
        if archive.exists():
            return archive
        unfinished = home / f"classes-{os.getpid()}.jsa"
        options = f"{_JVM_OPTIONS} -XX:ArchiveClassesAtExit={unfinished}"
        with suppress(subprocess.TimeoutExpired):  # a busy machine: it goes without
            subprocess.run(  # noqa: S603
                [sys.executable, "-m", __name__],
                env={**os.environ, **variables, "SPARK_SUBMIT_OPTS": options},
                check=True,
                timeout=ARCHIVE_TIMEOUT_S,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        if unfinished.exists():
            unfinished.rename(archive)
    return archive  # a name without a file is no error to Java: it loads its classes one by one


@contextmanager
def _locked(home: Path) -> Iterator[None]:
    """Two processes that start at once: one makes, the other waits."""
    home.parent.mkdir(parents=True, exist_ok=True)
    with home.with_name(f"{home.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _load_classes() -> None:
    """Do the work of a test's session, so that its classes are in the archive."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]")
    for key, value in _SETTINGS.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.range(1000).selectExpr("id % 7 AS a", "id AS b").groupBy("a").sum("b").collect()
    gateway = session.sparkContext._gateway  # noqa: SLF001  (its process must have written the archive before this one ends)
    session.stop()
    gateway.shutdown()
    if gateway.proc is not None:
        gateway.proc.stdin.close()
        gateway.proc.wait(ARCHIVE_TIMEOUT_S)


if __name__ == "__main__":
    _load_classes()


# --- a cluster --------------------------------------------------------------------------------------------------------


class SparkClusterError(TxmqError):
    """The master or a worker ended, or did not serve in time; the text ends with the end of its log."""


class _Daemon(ChildProcess):
    failure = SparkClusterError
    title = "a process of the Spark cluster"

    def __init__(self, log_file: Path, arguments: list[str], env: Mapping[str, str], ready: str) -> None:
        super().__init__(log_file)
        self._arguments, self._env, self._ready = arguments, env, ready

    def start(self) -> Self:
        # The class path that Spark makes by itself is the only one that its archive of classes is for.
        self._spawn([str(Path(self._env["SPARK_HOME"]) / "bin" / "spark-class"), *self._arguments], self._env)
        return self._wait_until(lambda: self._ready in self.logs(), START_TIMEOUT_S)


class SparkCluster(ServerGroup):
    """One cluster. Usable as a block: its processes are killed at the end.

    Args:
        directory: for logs and the executors' work; made here.
        workers: how many, of one core and 1 GiB each.

    Attributes:
        master: ``spark://HOST:PORT`` once it is started.
    """

    def __init__(self, directory: Path | str, workers: int = 2) -> None:
        self.directory, self._workers = Path(directory).absolute(), workers
        self.master = ""
        self._daemons: list[_Daemon] = []

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
        address = ["--host", _HOST, "--webui-port", "0"]
        self._start("master", [_MASTER, *address, "--port", str(port)], env, "New state: ALIVE")
        for number in range(self._workers):
            work = ["--work-dir", str(self.directory / f"work-{number}"), "--cores", "1", "--memory", "1g"]
            arguments = [_WORKER, *address, *work, self.master]
            self._start(str(number), arguments, env, "Successfully registered with master")
        return self

    def _start(self, name: str, arguments: list[str], env: Mapping[str, str], ready: str) -> None:
        daemon = _Daemon(self.directory / f"{name}.log", arguments, env, ready)
        self._daemons.append(daemon)
        daemon.start()

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

    def kill(self) -> None:
        """SIGKILL to all of its processes; executors end with their workers."""
        for daemon in reversed(self._daemons):
            daemon.kill()
