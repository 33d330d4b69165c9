"""A client's knowledge of a cluster: its homes, where they are led, and the home of each partition.

Any broker tells it (``meta``, ``cluster homes``), as it knows it itself. Topics have versions, so that what an older
answer says of one is not taken over. Where a home is led has none: the newest answer counts, and a wrong address is
found out by ``hello``.
"""

from __future__ import annotations

from typing import NamedTuple

from txmq.addresses import split_address
from txmq.client.transport.reconnecting import Address
from txmq.errors import ConfigError, RemoteProtocolError
from txmq.protocol.json_text import Fields


class _KnownTopic(NamedTuple):
    """A topic; a later one of a name has a larger id, and a later state of a topic a larger version."""

    topic_id: int
    version: int
    homes: tuple[int, ...]  # of each partition


class MetadataCache:
    """See the module's docstring. Changes replace what is there, so that it can be read without a lock.

    Attributes:
        leaders: by home, where it is led; None if no leader is known to live.
        names: by home, the name of its broker.
        retired: by home that is given up as lost for ever, why.
    """

    def __init__(self) -> None:
        self.leaders: dict[int, Address | None] = {}
        self.names: dict[int, str] = {}
        self.retired: dict[int, str] = {}
        self._topics: dict[str, _KnownTopic] = {}

    def homes_of(self, topic: str) -> tuple[int, ...] | None:
        """The home of each partition; None if it is not known."""
        known = self._topics.get(topic)
        return None if known is None else known.homes

    def topic_id(self, topic: str) -> int:
        """The id of the topic that has the name; 0 if it is not known."""
        known = self._topics.get(topic)
        return 0 if known is None else known.topic_id

    def found(self, home: int, address: Address) -> None:
        """A home has answered there."""
        self.leaders = {**self.leaders, home: address}

    def forget(self, topic: str) -> None:
        """What is known of a topic may be wrong."""
        self._topics.pop(topic, None)

    def forget_all(self) -> list[str]:
        """Forget each topic; returns their names."""
        forgotten, self._topics = self._topics, {}
        return list(forgotten)

    def learn_topics(self, answer: Fields) -> None:
        """Take over an answer to ``meta``; one of a broker that is alone says nothing of homes.

        Raises:
            RemoteProtocolError: it cannot be read.
        """
        try:
            self._learn_leaders(answer.get("leaders", {}))
            self._learn_retired(answer.get("retired", {}))
            for topic in answer["topics"]:
                if "homes" in topic:
                    homes = tuple(int(home, 16) for home in topic["homes"])
                    self._learn_topic(
                        str(topic["name"]), _KnownTopic(int(topic["topic_id"]), int(topic["version"]), homes)
                    )
        except (ConfigError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise RemoteProtocolError(f"not a map of topics: {error!r}") from None

    def _learn_topic(self, name: str, told: _KnownTopic) -> None:
        known = self._topics.get(name)
        if known is None or known[:2] <= told[:2]:
            self._topics[name] = told
            missing = dict.fromkeys(home for home in told.homes if home not in self.leaders)
            if missing:
                self.leaders = {**missing, **self.leaders}

    def learn_homes(self, answer: Fields) -> None:
        """Take over an answer to ``cluster homes``.

        Raises:
            RemoteProtocolError: it cannot be read.
        """
        try:
            self._learn_leaders({row["home"]: row["leader"] for row in answer["homes"]})
            self._learn_retired({row["home"]: row["retired"] for row in answer["homes"] if row.get("retired")})
            self.names = {int(row["home"], 16): str(row["name"]) for row in answer["homes"]}
        except (ConfigError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise RemoteProtocolError(f"not a list of homes: {error!r}") from None

    def _learn_retired(self, told: Fields) -> None:
        """A home that is retired stays so."""
        self.retired = {**self.retired, **{int(home, 16): str(reason) for home, reason in told.items()}}

    def _learn_leaders(self, told: Fields) -> None:
        leaders = {int(home, 16): None if text is None else split_address(text) for home, text in told.items()}
        self.leaders = {**self.leaders, **leaders}
