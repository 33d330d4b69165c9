"""What comes before ``prepare`` at one home, and ``prepare``: sent again under the same id until it is answered."""

from __future__ import annotations

from collections.abc import Callable

from txmq.client.transaction.broker_side import RETRY_S, BrokerTransaction
from txmq.client.transaction.refusals import LOST, raise_rolled_back
from txmq.errors import (
    ConnectionLostError,
    OverloadedError,
    RequestTimeoutError,
    SessionFullError,
    TransactionTimeoutError,
    TxmqError,
)
from txmq.xa.broker_port import Answer

NOT_KNOWN = (*LOST, RequestTimeoutError, TransactionTimeoutError)  # as ``Preparing.wait`` raises them
OVERLOADED_PAUSE_S = 0.2  # megabytes are sent again each time


def _not_again() -> Answer:
    raise AssertionError("it is prepared")


class Preparing:
    """See the module's docstring. One thread.

    Args:
        submit: sends the request.
        waits_for_room: a broker that has no room now is asked again until the deadline.
        waits_for_broker: so is one that is away: no row is locked meanwhile.

    Attributes:
        is_doubtful: a request was sent and not answered: it may be prepared, whatever comes next.
    """

    __slots__ = ("_broker", "_reply", "_submit", "_waits_for_broker", "_waits_for_room", "is_doubtful")

    def __init__(
        self,
        broker: BrokerTransaction,
        submit: Callable[[], Answer],
        *,
        waits_for_room: bool = False,
        waits_for_broker: bool = False,
    ) -> None:
        self._broker, self._submit = broker, submit
        self._waits_for_room, self._waits_for_broker = waits_for_room, waits_for_broker
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
            TxmqError: one of NOT_KNOWN, or it is refused. The cause of a timeout says what kept the broker from
            answering.
        """
        last: TxmqError | None = None
        while True:
            try:
                self._broker.check_deadline()
            except TransactionTimeoutError as error:
                error.__cause__ = last  # compiled code sets none with ``from``
                raise
            try:
                self._ask()
            except OverloadedError as error:
                if not self._waits_for_room or isinstance(error, SessionFullError):
                    raise
                last, pause_s = error, OVERLOADED_PAUSE_S
            except RequestTimeoutError as error:  # the last try, which had little time
                error.__cause__ = error.__cause__ or last
                raise
            except LOST as error:
                if not self._waits_for_broker and not self._broker.is_back():  # the rows of the body are locked
                    raise
                last, pause_s = error, RETRY_S
            else:
                self._submit = _not_again  # which knows the block: without it no cycle is left to be collected
                return
            self._reply = None  # the same id: it is prepared once
            self._broker.pause(pause_s)

    def _ask(self) -> None:
        reply = self._reply
        if reply is None:
            reply = self._submit()
        try:
            reply.result()
        except LOST:
            self.is_doubtful = True
            raise


def attach_for_caller(broker: BrokerTransaction) -> None:
    """Have a session before a database begins.

    Raises:
        RolledBackError: the broker is away, or refuses; nothing happened.
    """
    try:
        broker.attach()
    except TxmqError as error:
        raise_rolled_back(error, None)


def begin_for_caller(broker: BrokerTransaction) -> None:
    """Take the transaction's id before anything is prepared. Raises as ``attach_for_caller``."""
    try:
        broker.begin()
    except TxmqError as error:
        raise_rolled_back(error, None)
