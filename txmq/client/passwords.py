"""Where a program finds its password: in a file that only its owner may read, or in the environment."""

from __future__ import annotations

import os

from txmq.errors import ConfigError

PASSWORD = "TXMQ_PASSWORD"  # noqa: S105  the name of a variable


def of_environment(name: str = PASSWORD) -> str:
    """What a variable holds; empty if it is not set."""
    return os.environ.get(name, "")


def read_password(path: str) -> str:
    """The first line of a file.

    Raises:
        ConfigError: there is none, or others may read it; the text does not hold it.
    """
    from txmq.runtime.private_files import read_private  # most clients read none

    line = next(iter(read_private(path).splitlines()), "")
    if not line:
        raise ConfigError(f"{path}: its first line is the password, and is empty")
    return line
