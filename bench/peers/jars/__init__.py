"""Peers that are Java programs: their jars come from Maven Central by a pom next to this file, into the cache.

``python -m bench.peers.jars kafka rocketmq`` fetches them. A pom names no host: Maven's own settings do.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from bench.model import NotInstalledError
from bench.peers.processes import cache_directory

_POMS = Path(__file__).parent
_INSTALL = "apt-get install maven openjdk-17-jre-headless && .venv/bin/python -m bench.peers.jars {}"


def java(name: str, main_class: str, arguments: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """The command that runs a class of the jars of ``name``.

    Raises:
        NotInstalledError: Java or the jars are missing.
    """
    found, jars = shutil.which("java"), cache_directory() / name
    if found is None or not any(jars.glob("*.jar")):
        raise NotInstalledError("not installed: " + _INSTALL.format(name))
    return [found, *options, "-cp", f"{jars}/*", main_class, *arguments]


def fetch(name: str) -> None:
    """Fetch the jars of ``name``; those of an earlier version are removed."""
    maven, target = shutil.which("mvn"), cache_directory() / name
    if maven is None:
        raise NotInstalledError("not installed: apt-get install maven")
    shutil.rmtree(target, ignore_errors=True)
    command = [maven, "-q", "-B", "-f", str(_POMS / f"{name}.xml"), "dependency:copy-dependencies"]
    subprocess.run([*command, "-DincludeScope=runtime", f"-DoutputDirectory={target}"], check=True)


def names() -> list[str]:
    """What can be fetched."""
    return sorted(path.stem for path in _POMS.glob("*.xml"))


def main(arguments: Sequence[str]) -> int:
    """Fetch what is named, or all."""
    for name in arguments or names():
        fetch(name)
    return 0
