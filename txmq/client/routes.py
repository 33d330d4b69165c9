"""Which home owns a partition: the links of a client, and the choice among them.

A lone broker owns every partition, so there is one link.
"""

from __future__ import annotations

from txmq.client.home_link import HomeLink


class Routes:
    """The links of a client. Thread safety: any thread."""

    def __init__(self, link: HomeLink) -> None:
        self._only = link

    is_lone = True  # one broker without a registry

    def link_for(self, topic: str, partition: int) -> HomeLink:
        """The link of the home that owns a partition, as far as that is known."""
        return self._only

    def link_of_home(self, home: int) -> HomeLink:
        """The link of a home, such as the one in a transaction's id; a lone broker answers for every home."""
        return self._only

    def any_link(self) -> HomeLink:
        """A link for a request that any broker answers."""
        return self._only

    def links(self) -> tuple[HomeLink, ...]:
        """The links of all homes that are known, in the order of the homes' ids."""
        return (self._only,)

    def corrected(self, topic: str) -> None:
        """A broker does not own a partition of the topic: find out which home does. A lone broker owns them all."""

    def close(self) -> None:
        """Close the links."""
        for link in self.links():
            link.close()
