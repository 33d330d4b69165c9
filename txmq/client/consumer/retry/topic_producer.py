"""A producer for one topic, made at the first message; what it sends joins no transaction block."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from txmq.runtime.caller import run_alone

if TYPE_CHECKING:
    from txmq.client.client import Client
    from txmq.client.producer.producer import Producer

T = TypeVar("T")


class TopicProducer:
    """See the module's docstring. Thread safety: any thread.

    Args:
        settings: of the topic, if it has to be created.
    """

    def __init__(self, client: Client, topic: str, **settings: Any) -> None:
        self._client, self._topic, self._settings = client, topic, settings
        self._producer: Producer | None = None

    def run(self, send: Callable[[Producer], T]) -> T:
        """Call ``send`` with the producer, alone: a block that rolls back takes nothing along."""
        if self._producer is None:
            self._client.topics.ensure(self._topic, **self._settings)
            self._producer = self._client.producer()
        return run_alone(partial(send, self._producer))

    def close(self) -> None:
        """Close the producer."""
        if self._producer is not None:
            self._producer.close()
