"""``prepare`` under way at one home: sent again under the same id until it is answered."""

from __future__ import annotations

from collections.abc import Callable

from txmq.client.transaction.broker_side import LOST, BrokerTransaction
from txmq.errors import ConnectionLostError, RequestTimeoutError, TransactionTimeoutError
from txmq.xa.broker_port import Answer

NOT_KNOWN = (*LOST, RequestTimeoutError, TransactionTimeoutError)  # as ``Preparing.wait`` raises them


class Preparing:
    """See the module's docstring. One thread.

    Args:
        submit: sends the request.

    Attributes:
        is_doubtful: a request was sent and not answered: it may be prepared, whatever comes next.
    """

    __slots__ = ("_broker", "_reply", "_submit", "is_doubtful")

    def __init__(self, broker: BrokerTransaction, submit: Callable[[], Answer]) -> None:
        self._broker, self._submit = broker, submit
        self._reply: Answer | None = None
        self.is_doubtful = False

    def send(self) -> None:
        """Send it, if the broker is there; otherwise ``wait`` does.

        Raises:
            TxmqError: it is refused for good. Behind a lost connection the broker rolls back what was streamed.
        """
        try:
            self._reply = self._submit()
        except (ConnectionLostError, RequestTimeoutError):
            if self._broker.streamed.parts:
                raise

    def wait(self) -> None:
        """Wait until it is prepared.

        Raises:
            TxmqError: one of NOT_KNOWN, or it is refused.
        """
        broker = self._broker
        while True:
            broker.check_deadline()
            try:
                reply = self._reply
                if reply is None:
                    reply = self._submit()
                try:
                    reply.result()
                except LOST:
                    self.is_doubtful = True
                    raise
            except LOST:
                if not broker.is_back():  # the rows of the body are locked meanwhile
                    raise
                self._reply = None  # the same id: it is prepared once
                broker.pause()
            else:
                return
