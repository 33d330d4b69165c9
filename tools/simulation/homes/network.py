"""Connections to one of several brokers: the network between a client and a home can be cut for a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tools.simulation.broker import Link

if TYPE_CHECKING:
    from .home import Home


class HomeLink(Link):
    """What is sent while the network is cut arrives when it is whole again, unless the connection is lost by then."""

    def __init__(
        self, home: Home, receive: Callable[[bytes], None], lost: Callable[[], None], client_name: str
    ) -> None:
        super().__init__(home, receive, lost)
        self.home, self.client_name = home, client_name
        self._held: list[Callable[[], None]] = []

    @property
    def _is_cut(self) -> bool:
        return self.home.is_cut_from(self.client_name)

    def deliver(self, take: Callable[[bytes], None], piece: bytes) -> None:
        """See ``Link``."""
        if self._is_cut or self._held:
            self._held.append(lambda: super(HomeLink, self).deliver(take, piece))
        else:
            super().deliver(take, piece)

    def hang_up(self) -> None:
        """See ``Link``."""
        if self._is_cut:
            self._held.append(super().hang_up)
        else:
            super().hang_up()

    def is_whole_again(self) -> None:
        """The network carries again."""
        held, self._held = self._held, []
        for arrive in held:
            arrive()
