"""A client for one command, and what it says about a topic that is not there.

The nearest name is looked for here and not by the broker: comparing one misspelt name with 10,000 holds a processor for
200 ms, which must not be everybody's.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from txmq.errors import TxmqError, UnknownTopicError

if TYPE_CHECKING:
    from txmq.client import Client


@contextmanager
def connected(bootstrap: str, topic: str | None = None) -> Iterator[Client]:
    """A client for a block; where the block finds no topic of that name, the error names the nearest one."""
    import txmq

    with txmq.connect(bootstrap) as client:
        try:
            yield client
        except UnknownTopicError as error:
            known = _names(client)
            near = None if topic is None or topic in known else nearest(topic, known)
            if near is None:
                raise
            raise UnknownTopicError(f"{error}; did you mean {near!r}?") from None


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was most likely meant, if any is near."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1)), None)


def _names(client: Client) -> list[str]:
    try:
        return [topic.name for topic in client.topics.list()]
    except TxmqError:  # the first error is the one to tell
        return []
