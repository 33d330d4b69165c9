"""A client for one command: as whom it connects, and what it says about a topic, a group or a query that is not there.

A password comes from a file, the environment or a prompt, and never from the command line, which others can list.

The nearest name is looked for here and not by the broker: while it compared one misspelt name with 10,000, it would
answer no other client.
"""

from __future__ import annotations

import difflib
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from txmq.addresses import parse_password_file, parse_tls, parse_user
from txmq.errors import (
    BrokerError,
    ConfigError,
    ConnectionLostError,
    PartialResultError,
    TxmqError,
    UnknownGroupError,
    UnknownQueryError,
    UnknownTopicError,
    UnknownUserError,
)

if TYPE_CHECKING:
    import threading

    from txmq.client import Client
    from txmq.client.admin.cluster import Users

NEW_PASSWORD = "TXMQ_NEW_PASSWORD"  # noqa: S105  the name of a variable
PasswordFile = Annotated[
    str | None,
    typer.Option("--password-file", metavar="FILE", help="Its first line is the password. [TXMQ_NEW_PASSWORD, prompt]"),
]
_GENERATED_BYTES = 18
T = TypeVar("T")
UserName = Annotated[str, typer.Argument(metavar="USER", help="Name of the user.", show_default=False)]


def own_password(bootstrap: str) -> str:
    """What the user of an address types, if nothing else tells the password; empty: ``txmq.connect`` finds it.

    Raises:
        ConfigError: it is no address.
    """
    if not (user := parse_user(bootstrap)) or not sys.stdin.isatty():
        return ""
    from txmq.client.bootstrap import of_environment

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
    from txmq.client.bootstrap import of_environment, read_password

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


@contextmanager
def connected(
    bootstrap: str, topic: str | None = None, *, group: str | None = None, query: str | None = None,
    user: str | None = None, meets_replicas: bool = False,
) -> Iterator[Client]:  # fmt: skip
    """A client for a block. If the block names something unknown, the error suggests the nearest name."""
    import txmq
    from txmq.client.admin.cluster import Users
    from txmq.spark.sink.queries import Queries

    with txmq.connect(bootstrap, password=own_password(bootstrap), lazy=meets_replicas) as client:
        client.routes.meets_replicas = meets_replicas
        try:
            yield client
        except UnknownTopicError as error:
            raise _with_nearest(error, topic, lambda: [one.name for one in client.topics.list()]) from None
        except UnknownGroupError as error:
            raise _with_nearest(error, group, lambda: [row["group"] for row in partly(client.groups.list)[0]]) from None
        except UnknownQueryError as error:
            raise _with_nearest(error, query, lambda: [row["query"] for row in Queries(client).list()]) from None
        except UnknownUserError as error:
            known = Users(client.control, client.timeout)
            raise _with_nearest(error, user, lambda: [row["user"] for row in known.list()]) from None


def connected_when_there(bootstrap: str, stop: threading.Event) -> Client | None:
    """A client for a command that runs on: a broker that is away is waited for; None if it is to stop before."""
    import txmq
    from txmq.runtime import logging
    from txmq.xa.resolver_ports import FAILED_POLL_S_MAX

    password, is_said = own_password(bootstrap), False
    while not stop.is_set():
        try:
            return txmq.connect(bootstrap, password=password)
        except ConnectionLostError as error:
            if not is_said:
                logging.get_logger().warning("waiting for the broker", broker=bootstrap, error=str(error))
            is_said = True
            stop.wait(FAILED_POLL_S_MAX)
    return None


def _with_nearest(error: BrokerError, word: str | None, known: Callable[[], list[str]]) -> BrokerError:
    names: list[str] = []
    with suppress(TxmqError):  # the first error is the one to tell
        names = known()
    near = None if word is None or word in names else nearest(word, names)
    return error if near is None else type(error)(f"{error}; did you mean {near!r}?")


def partly(ask: Callable[[], list[T]]) -> tuple[list[T], PartialResultError | None]:
    """What is told, and the error about homes that did not answer: to be raised after the output."""
    try:
        return ask(), None
    except PartialResultError as error:
        return error.found, error


def raise_missing(*errors: PartialResultError | None) -> None:
    """End the command with the first error, if there is one: a list that looks whole must be whole."""
    for error in errors:
        if error is not None:
            raise error


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was most likely meant, if any is near."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1)), None)


@contextmanager
def administering(bootstrap: str, user: str | None = None) -> Iterator[Users]:
    """The users of a broker, for a block. If it names an unknown one, the error suggests the nearest name."""
    from txmq.client.admin.cluster import Users

    with connected(bootstrap, user=user) as client:
        yield Users(client.control, client.timeout)
