"""A client for one command, and what it says about a topic, a group or a query that is not there.

The nearest name is looked for here and not by the broker: while it compared one misspelt name with 10,000, it would
answer no other client.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

from txmq.cli.access.passwords import own_password
from txmq.errors import (
    BrokerError,
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

T = TypeVar("T")


@contextmanager
def connected(
    bootstrap: str, topic: str | None = None, *, group: str | None = None, query: str | None = None,
    user: str | None = None,
) -> Iterator[Client]:  # fmt: skip
    """A client for a block. If the block names something unknown, the error suggests the nearest name."""
    import txmq
    from txmq.client.admin.users import Users
    from txmq.spark.sink.queries import Queries

    with txmq.connect(bootstrap, password=own_password(bootstrap)) as client:
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
