"""A connection to the leader of a home, or the attempt to make one: a socket of the event loop, no thread.

Invariants:
    * nothing here waits on the loop; a connection that stands still is cut off (``InterbrokerConversation.tick``);
    * what the other side sends can end the connection, and nothing else.
"""

from __future__ import annotations

import asyncio
from typing import Final, Generic, Protocol, cast

from txmq.addresses import split_address
from txmq.broker.cluster.interbroker_conversation import Ask, HomeAnswer, InterbrokerConversation
from txmq.errors import TxmqError
from txmq.protocol.certificates import end_point
from txmq.runtime.ports import Clock
from txmq.runtime.tls import ClientTls

CONNECT_TIMEOUT_S: Final = 1.5


class Owner(Protocol[Ask]):
    """What a connection tells of itself.

    Attributes:
        tls: how the other side is spoken to; None: in plaintext.
    """

    clock: Clock
    tls: ClientTls | None

    def answered(self, connection: InterbrokerConnection[Ask], answers: list[HomeAnswer[Ask]]) -> None:
        """Bytes came: it is greeted, or has answered."""

    def lost(self, connection: InterbrokerConnection[Ask], reason: str) -> None:
        """It ended, or could not be made."""


class InterbrokerConnection(asyncio.Protocol, Generic[Ask]):
    """See the module's docstring.

    Args:
        address: the leader's; None: none is known to live.
    """

    def __init__(
        self, owner: Owner[Ask], conversation: InterbrokerConversation[Ask], address: str | None
    ) -> None:  # fmt: skip
        self.conversation, self._owner = conversation, owner
        self._transport: asyncio.Transport | None = None
        self._connecting = asyncio.get_running_loop().create_task(self._connect(address))

    async def _connect(self, address: str | None) -> None:
        try:
            if address is None:
                raise OSError("no leader of it is known to live")
            host, port = split_address(address, "the leader's address")
            loop, tls = asyncio.get_running_loop(), self._owner.tls
            # asyncio's own TLS will do here: one connection a home.
            connecting = loop.create_connection(lambda: self, host, port, ssl=None if tls is None else tls.context)
            await asyncio.wait_for(connecting, CONNECT_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001  such as a certificate whose names are no text
            self._owner.lost(self, str(error) or type(error).__name__)

    def flush(self) -> None:
        """Hand over what must be sent."""
        if self._transport is not None and self.conversation.output:
            data, self.conversation.output = b"".join(self.conversation.output), []
            self._transport.write(data)

    def tick(self) -> None:
        """Cut off what stands still."""
        try:
            self.conversation.tick(self._owner.clock.monotonic())
        except TxmqError as error:
            self._owner.lost(self, str(error))
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
            answers = self.conversation.received(data, self._owner.clock.monotonic())
        except Exception as error:  # noqa: BLE001  whatever the other side sends ends this connection, and nothing else
            self._owner.lost(self, str(error) or type(error).__name__)
            return
        self.flush()
        self._owner.answered(self, answers)

    def connection_lost(self, error: Exception | None) -> None:
        """The connection ended."""
        self._owner.lost(self, str(error) if error is not None else "the connection was closed")
