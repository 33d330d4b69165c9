"""The broker's connections to the leaders of other homes: sockets of the event loop, no thread.

Invariants:
    * nothing here waits on the loop; a connection that stands still is cut off (``InterbrokerConversation.tick``);
    * one connection a home at most, made when the home is asked something;
    * with users, nothing is asked over a connection on which the other side has not proved to be of the cluster;
    * each ask ends with an answer, or with ``Core.home_lost`` of its home;
    * what the other side sends can end its own connection, and nothing else; what the core does with it, not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Final, cast

from txmq.addresses import split_address
from txmq.broker.cluster.branch_asks import BranchAsk
from txmq.broker.cluster.interbroker_conversation import HomeAnswer, InterbrokerConversation
from txmq.broker.core import Core
from txmq.errors import TxmqError
from txmq.protocol.certificates import end_point
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.logging import get_logger
from txmq.runtime.ports import Clock
from txmq.runtime.tls import ClientTls

log = get_logger()
CONNECT_TIMEOUT_S: Final = 1.5


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
        self._links: dict[int, _HomeLink] = {}
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
                link = self._links[ask.home] = _HomeLink(self, ask.home)
            link.conversation.ask(ask)
        for link in list(self._links.values()):
            link.flush()
        if asks:
            crash_point("broker.branch.ask_sent")

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

    def lost(self, link: _HomeLink, reason: str) -> None:
        """A connection ended, or none could be made."""
        home = link.conversation.home
        if self._links.get(home) is link:
            del self._links[home]
            self.core.home_lost(home)
            if self._said.get(home) != reason and self.core.context.state.waits_for(home):
                self._said[home] = reason
                log.warning("branches wait for another home", home=f"{home:016x}", reason=reason)
        link.close()

    def answered(self, link: _HomeLink, answers: Iterable[HomeAnswer[BranchAsk]]) -> None:
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


class _HomeLink(asyncio.Protocol):
    """One connection, or the attempt to make one."""

    def __init__(self, links: InterbrokerLinks, home: int) -> None:
        self._links = links
        context = links.core.context
        self.conversation: InterbrokerConversation[BranchAsk] = InterbrokerConversation(
            context.identity, home, links.clock.monotonic(), context.random, links.secret
        )
        self._transport: asyncio.Transport | None = None
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        view = self._links.core.context.cluster
        address = None if view is None else view.leader(self.conversation.home)
        try:
            if address is None:
                raise OSError("no leader of it is known to live")
            host, port = split_address(address, "the leader's address")
            loop, tls = asyncio.get_running_loop(), self._links.tls
            # asyncio's own TLS will do here: few bytes, one connection a home.
            connecting = loop.create_connection(lambda: self, host, port, ssl=None if tls is None else tls.context)
            await asyncio.wait_for(connecting, CONNECT_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001  such as a certificate whose names are no text
            self._links.lost(self, str(error) or type(error).__name__)

    def flush(self) -> None:
        """Hand over what must be sent."""
        if self._transport is not None and self.conversation.output:
            data, self.conversation.output = b"".join(self.conversation.output), []
            self._transport.write(data)

    def tick(self) -> None:
        """Cut off what stands still."""
        try:
            self.conversation.tick(self._links.clock.monotonic())
        except TxmqError as error:
            self._links.lost(self, str(error))
        else:
            self.flush()

    def close(self) -> None:
        """End it; nothing more is told of it."""
        self._connecting.cancel()
        if self._transport is not None:
            self._transport.abort()

    # --- called by the loop ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection stands."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        tls = transport.get_extra_info("ssl_object")
        if tls is not None:
            self.conversation.binding = end_point(tls.getpeercert(binary_form=True))
        self.flush()

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        try:
            answers = self.conversation.received(data, self._links.clock.monotonic())
        except Exception as error:  # noqa: BLE001  whatever the other side sends ends this connection, and nothing else
            self._links.lost(self, str(error) or type(error).__name__)
            return
        self.flush()
        self._links.answered(self, answers)

    def connection_lost(self, error: Exception | None) -> None:
        """The connection ended."""
        self._links.lost(self, str(error) if error is not None else "the connection was closed")
