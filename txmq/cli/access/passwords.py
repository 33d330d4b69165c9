"""Where a password comes from: a file, the environment, a prompt. Never the command line, which others can list."""

from __future__ import annotations

import secrets
import sys
from typing import Annotated

import typer

from txmq.addresses import parse_password_file, parse_tls, parse_user
from txmq.errors import ConfigError

NEW_PASSWORD = "TXMQ_NEW_PASSWORD"  # noqa: S105  the name of a variable
PasswordFile = Annotated[
    str | None,
    typer.Option("--password-file", metavar="FILE", help="Its first line is the password. [TXMQ_NEW_PASSWORD, prompt]"),
]
_GENERATED_BYTES = 18


def own_password(bootstrap: str) -> str:
    """What the user of an address types, if nothing else tells the password; empty: ``txmq.connect`` finds it.

    Raises:
        ConfigError: it is no address.
    """
    if not (user := parse_user(bootstrap)) or not sys.stdin.isatty():
        return ""
    from txmq.client.passwords import of_environment

    tls = parse_tls(bootstrap)
    if of_environment() or parse_password_file(bootstrap) or (tls is not None and tls.cert):
        return ""
    typed: str = typer.prompt(f"Password of {user}", hide_input=True, err=True)
    return typed


def new_password(path: str | None) -> str:
    """The password that a user gets: the first line of a file, TXMQ_NEW_PASSWORD, or what is typed, twice.

    Raises:
        ConfigError: there is none; the text does not hold it.
    """
    from txmq.client.passwords import of_environment, read_password

    if path is not None:
        return read_password(path)
    given = of_environment(NEW_PASSWORD)
    if given:
        return given
    if not sys.stdin.isatty():
        raise ConfigError(f"no password: name a file with --password-file, or set {NEW_PASSWORD}")
    typed: str = typer.prompt("New password", hide_input=True, confirmation_prompt=True, err=True)
    return typed


def first_password(path: str | None, *, is_generated: bool) -> tuple[str, bool]:
    """The password of the first administrator, and whether it was drawn here. Raises as ``new_password``."""
    if not is_generated:
        return new_password(path), False
    if path is not None:
        raise ConfigError("--password-file and --generate-password: give one of them")
    return secrets.token_urlsafe(_GENERATED_BYTES), True
