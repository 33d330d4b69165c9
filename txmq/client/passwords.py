"""Where a program finds its password: in a file that only its owner may read, or in the environment."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from txmq.errors import ConfigError

PASSWORD = "TXMQ_PASSWORD"  # noqa: S105  the name of a variable


def of_environment(name: str = PASSWORD) -> str:
    """What a variable holds; empty if it is not set."""
    return os.environ.get(name, "")


def read_password(path: Path | str) -> str:
    """The first line of a file.

    Raises:
        ConfigError: there is none, or others may read it; the text does not hold it.
    """
    try:
        with Path(path).open(encoding="utf-8") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            line = file.readline().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "no UTF-8"
        raise ConfigError(f"password file {path}: cannot be read: {why}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):  # as PostgreSQL's .pgpass
        raise ConfigError(f"password file {path}: not its owner alone may read it (mode {mode:04o}); chmod 600 {path}")
    if not line:
        raise ConfigError(f"password file {path}: its first line is the password, and is empty")
    return line
