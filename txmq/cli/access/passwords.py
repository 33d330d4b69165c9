"""Where a password comes from: a file, the environment, a prompt. Never the command line, which others can list."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import typer

from txmq.errors import ConfigError

PASSWORD = "TXMQ_PASSWORD"  # noqa: S105  the name of a variable
NEW_PASSWORD = "TXMQ_NEW_PASSWORD"  # noqa: S105


def new_password(path: Path | None) -> str:
    """The password that a user gets: the first line of a file, TXMQ_NEW_PASSWORD, or what is typed, twice.

    Raises:
        ConfigError: there is none; the text does not hold it.
    """
    if path is not None:
        return _first_line(path)
    given = os.environ.get(NEW_PASSWORD)
    if given:
        return given
    if not sys.stdin.isatty():
        raise ConfigError(f"no password: name a file with --password-file, or set {NEW_PASSWORD}")
    typed: str = typer.prompt("New password", hide_input=True, confirmation_prompt=True, err=True)
    return typed


def _first_line(path: Path) -> str:
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        lines = []
    if not lines or not lines[0]:
        raise ConfigError(f"--password-file {path}: expected a file whose first line is the password, in UTF-8")
    return lines[0]
