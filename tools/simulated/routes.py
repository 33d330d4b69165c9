"""The homes of a client in memory: partition n belongs to home n modulo their number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from txmq.errors import ConnectionLostError, PartialResultError, RequestTimeoutError, UnavailableError

if TYPE_CHECKING:
    from tools.simulated.broker import SimulatedBroker

T = TypeVar("T")


class SimulatedRoutes:
    """As ``Routes``."""

    def __init__(self, *homes: SimulatedBroker) -> None:
        self._homes = homes
        self.is_single_home = len(homes) == 1
        self._topic_ids: dict[str, int] = {}
        self.likely_home: int | None = None

    def link_for(self, topic: str, partition: int) -> SimulatedBroker:
        """The partition's home."""
        return self._homes[partition % len(self._homes)]

    def link_of_home(self, home: int) -> SimulatedBroker:
        """The home of that id."""
        return next((broker for broker in self._homes if broker.home == home), self._homes[0])

    def any_link(self) -> SimulatedBroker:
        """The first that is there."""
        return next((broker for broker in self._homes if not broker.is_away), self._homes[0])

    def topic_id(self, topic: str) -> int:
        """As told when it was first asked for."""
        if self.is_single_home:
            return 0
        if topic not in self._topic_ids:
            found = self._homes[0].node.state.topics.find(topic)
            self._topic_ids[topic] = 0 if found is None else found.topic_id
        return self._topic_ids[topic]

    def forget_topics(self) -> None:
        """As of ``Routes``."""
        self._topic_ids.clear()

    def links(self) -> Sequence[SimulatedBroker]:
        """All of them."""
        return self._homes

    all_links = links

    def ask_each(self, links: Sequence[Any], ask: Callable[[Any, float], Sequence[T]]) -> list[T]:
        """As of ``Routes``."""
        if len(links) == 1:
            return [*ask(links[0], links[0].timeout)]
        found, away = list[T](), list[str]()
        for link in links:
            try:
                found += ask(link, link.timeout)
            except (ConnectionLostError, RequestTimeoutError, UnavailableError):
                away.append(repr(link))
        if away:
            raise PartialResultError(f"homes did not answer: {', '.join(away)}", found, away)
        return found
