"""A Spark session for tests, demos and proofs, on this machine, that starts in seconds.

Theory of operation. PySpark's workers import it from a zip file without compiled modules: a second for each process. A
*home* of links without that zip makes them import the installed package. The Java machine loads 20,000 classes at each
start: an archive of them (class data sharing), made once by a session of its own, halves the time to the first job.
Both lie in the virtual environment and go with it.

Measured on 2 cores: first job of a Python data source 16 s after the start without, 6 s with both; the archive takes
18 s once.

Source: JEP 350 (dynamic class-data archives); module pyspark.find_spark_home.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from txmq.errors import TxmqError
from txmq.runtime.build import how_to_install
from txmq.testing.processes.java import find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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
