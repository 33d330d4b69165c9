"""The broker's connections to the leaders of other homes.

Invariants:
    * one connection a home at most, made when the home is asked something;
    * with users, nothing is asked over a connection on which the other side has not proved to be of the cluster;
    * each ask ends with an answer, or with ``Core.home_lost`` of its home;
    * what the core does with an answer cannot be taken back: if it fails there, the broker ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from txmq.broker.cluster.branch_asks import BranchAsk
from txmq.broker.cluster.interbroker_conversation import HomeAnswer, InterbrokerConversation
from txmq.broker.core import Core
from txmq.broker.shell.interbroker_connection import InterbrokerConnection
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.logging import get_logger
from txmq.runtime.ports import Clock
from txmq.runtime.tls import ClientTls

log = get_logger()
_Link = InterbrokerConnection[BranchAsk]


class InterbrokerLinks:
    """All of them. On the loop.

    Args:
        moved: called when answers may have changed the state.
        failed: called when the core could not take an answer in: its state may be half moved.
        tls: how the other homes are spoken to; None: in plaintext.
    """

    def __init__(
        self,
        core: Core,
        clock: Clock,
        moved: Callable[[], None],
        failed: Callable[[BaseException], None],
        tls: ClientTls | None = None,
    ) -> None:
        self.core, self.clock, self.moved, self.failed, self.tls = core, clock, moved, failed, tls
        self._links: dict[int, _Link] = {}
        self._said: dict[int, str] = {}  # of homes that branches wait for, the last failure that the log has
        self._is_closed = False

    def ask(self, asks: Sequence[BranchAsk]) -> None:
        """Send them, each to the leader of its home."""
        for ask in [] if self._is_closed else asks:
            link = self._links.get(ask.home)
            if link is not None and link.conversation.secret != self.secret:
                self.lost(link, "users were added: the other home has to prove that it is one")
                link = None
            if link is None:
                link = self._links[ask.home] = self._link_to(ask.home)
            link.conversation.ask(ask)
        for link in list(self._links.values()):
            link.flush()
        if asks:
            crash_point("broker.branch.ask_sent")

    def _link_to(self, home: int) -> _Link:
        context = self.core.context
        conversation: InterbrokerConversation[BranchAsk] = InterbrokerConversation(
            context.identity, home, self.clock.monotonic(), context.random, self.secret
        )
        address = None if context.cluster is None else context.cluster.leader(home)
        return InterbrokerConnection(self, conversation, address)

    @property
    def secret(self) -> str:
        """What brokers of the cluster prove to each other; empty while there are no users."""
        principals = self.core.state.principals
        return principals.between_brokers if principals.users else ""

    def tick(self) -> None:
        """Time has passed."""
        for link in list(self._links.values()):
            link.tick()
        for home in [home for home in self._said if not self.core.context.state.waits_for(home)]:
            self._no_longer(home, "no branch waits for another home any more")

    def _no_longer(self, home: int, event: str) -> None:
        del self._said[home]
        log.info(event, home=f"{home:016x}")

    def close(self) -> None:
        """The broker ends."""
        self._is_closed = True
        for link in self._links.values():
            link.close()
        self._links.clear()

    def lost(self, link: _Link, reason: str) -> None:
        """A connection ended, or none could be made."""
        home = link.conversation.home
        if self._links.get(home) is link:
            del self._links[home]
            self.core.home_lost(home)
            if self._said.get(home) != reason and self.core.context.state.waits_for(home):
                self._said[home] = reason
                log.warning("branches wait for another home", home=f"{home:016x}", reason=reason)
        link.close()

    def answered(self, link: _Link, answers: Iterable[HomeAnswer[BranchAsk]]) -> None:
        """A home has answered."""
        self.core.context.now_ms = self.clock.now_ms()
        if link.conversation.is_greeted:
            home = link.conversation.home
            self.core.context.branch_asks.reached(home)
            if home in self._said:
                self._no_longer(home, "branches go on: another home is back")
        try:
            for answer in answers:
                self.core.branch_answered(answer.ask, answer.code, answer.body)
        except Exception as error:  # noqa: BLE001  a defect, as in ``Connection``: only the journal is true
            self.failed(error)
            return
        self.moved()
