"""A simulated broker's connections to the leaders of other homes: the conversation that ships, over simulated links."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from tools.images.node import Node
from tools.simulation.tls import BROKER, binding_of
from txmq.broker.cluster.branch_asks import BranchAsk
from txmq.broker.cluster.interbroker_conversation import InterbrokerConversation
from txmq.errors import TxmqError
from txmq.runtime.tls import TlsSession

from .network import HomeLink

if TYPE_CHECKING:
    from .home import Home


class Conversations:
    """Those of one life of a broker; see ``txmq.broker.shell.interbroker_links``."""

    def __init__(self, home: Home, node: Node, homes: Mapping[str, Home]) -> None:
        self.home, self.node, self.homes = home, node, homes
        self._open: dict[int, _Open] = {}

    def ask(self, asks: Iterable[BranchAsk]) -> None:
        """Send them, each to the leader of its home."""
        for ask in asks:
            one = self._open.get(ask.home)
            if one is not None and one.conversation.secret != self.secret:
                self.lost(one)
            if ask.home not in self._open:
                self._open[ask.home] = _Open(self, ask.home)
            self._open[ask.home].conversation.ask(ask)
            self.home.world.meet("a home asked another one")
        for one in list(self._open.values()):
            one.flush()

    @property
    def secret(self) -> str:
        """See ``InterbrokerLinks``."""
        principals = self.node.state.principals
        return principals.between_brokers if principals.users else ""

    def tick(self) -> None:
        """Time has passed."""
        for one in list(self._open.values()):
            one.tick()

    def close(self) -> None:
        """The process has died."""
        for one in self._open.values():
            one.close()

    def lost(self, one: _Open) -> None:
        """A connection ended, or none could be made."""
        if self._open.get(one.conversation.home) is one:
            del self._open[one.conversation.home]
            self.node.core.home_lost(one.conversation.home)
        one.close()


class _Open:
    """One connection, or the attempt to make one."""

    def __init__(self, owner: Conversations, home: int) -> None:
        self._owner, self._world = owner, owner.home.world
        self.conversation: InterbrokerConversation[BranchAsk] = InterbrokerConversation(
            owner.node.context.identity, home, self._world.now, owner.node.context.random, owner.secret
        )
        self._link: HomeLink | None = None
        self._post(self._world.rng.uniform(0.0001, 0.003), self._connect)

    def _post(self, seconds: float, call: object) -> None:
        owner = self._owner
        assert callable(call)
        self._world.after(seconds, lambda: owner.home.reach(owner.node, call))

    def _connect(self) -> None:
        view = self._owner.node.context.cluster
        address = None if view is None else view.leader(self.conversation.home)
        target = None if address is None else self._owner.homes.get(address.partition(":")[0])
        if target is not None:
            self._link = target.connect(
                lambda data: self._post(0.0, lambda: self._received(data)),
                lambda: self._post(0.0, self._ended), self._owner.home.name,
            )  # fmt: skip
        if self._link is None:
            self._owner.lost(self)
            return
        if self._world.has_tls:
            self._link.speak_tls(BROKER, self._shaken)
        self.flush()

    def _shaken(self, session: TlsSession) -> None:
        self.conversation.binding = binding_of(session)

    def flush(self) -> None:
        """Hand over what there is to send."""
        if self._link is not None and self.conversation.output:
            data, self.conversation.output = b"".join(self.conversation.output), []
            self._link.write(data)

    def tick(self) -> None:
        """Cut off what stands still."""
        try:
            self.conversation.tick(self._world.now)
        except TxmqError:
            self._owner.lost(self)
        else:
            self.flush()

    def close(self) -> None:
        """End it."""
        link, self._link = self._link, None
        if link is not None:
            link.cut()

    def _ended(self) -> None:
        self._owner.lost(self)

    def _received(self, data: bytes) -> None:
        if self._link is None:
            return
        try:
            answers = self.conversation.received(data, self._world.now)
        except TxmqError:
            self._owner.lost(self)
            return
        self.flush()
        context = self._owner.node.context
        context.now_ms = self._owner.node.clock.now_ms()
        if self.conversation.is_greeted:
            self._owner.node.core.context.branch_asks.reached(self.conversation.home)
        for answer in answers:
            self._owner.node.core.branch_answered(answer.ask, answer.code, answer.body)
