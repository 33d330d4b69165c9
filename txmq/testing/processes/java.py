"""The Java of this machine, for the servers that need one."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

from txmq.errors import TxmqError

JAVA_VERSION_MIN = 17


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
