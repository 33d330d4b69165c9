"""The homes of a client in memory: partition n belongs to home n modulo their number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from txmq.client.transport.session import ClientSession
from txmq.errors import ConnectionLostError, PartialResultError, RequestTimeoutError, UnavailableError

T = TypeVar("T")


class Home(Protocol):
    """A home broker in memory, as far as routes see it."""

    is_away: bool
    timeout: float
    topic_ids: dict[str, int]
    session: ClientSession


HomeT = TypeVar("HomeT", bound=Home)


class SimulatedRoutes(Generic[HomeT]):
    """As ``Routes``."""

    def __init__(self, *homes: HomeT) -> None:
        self._homes = homes
        self.is_lone = len(homes) == 1
        self._topic_ids: dict[str, int] = {}
        self.likely_home: int | None = None

    def link_for(self, topic: str, partition: int) -> HomeT:
        """The partition's home."""
        return self._homes[partition % len(self._homes)]

    def link_of_home(self, home: int) -> HomeT:
        """The home of that id."""
        return next((broker for broker in self._homes if broker.session.home == home), self._homes[0])

    def any_link(self) -> HomeT:
        """The first that is there."""
        return next((broker for broker in self._homes if not broker.is_away), self._homes[0])

    def topic_id(self, topic: str) -> int:
        """As told when it was first asked for."""
        if self.is_lone:
            return 0
        return self._topic_ids.setdefault(topic, self._homes[0].topic_ids.get(topic, 0))

    def forget_topics(self) -> None:
        """As of ``Routes``."""
        self._topic_ids.clear()

    def links(self) -> Sequence[HomeT]:
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
