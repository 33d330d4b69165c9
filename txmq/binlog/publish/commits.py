"""Positions into their topic, each with messages in one txmq transaction, until what became of it is known.

Theory of operation. If the outcome of a transaction is not known, the position log says it. A transaction that was
rolled back is sent again, the same messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from txmq.binlog.config import PublishSettings
from txmq.binlog.errors import BinlogError
from txmq.binlog.publish.broker_away import PAUSE_S, BrokerWait
from txmq.binlog.publish.change_messages import Outgoing
from txmq.binlog.publish.position_log import PositionLog
from txmq.binlog.publish.published import Published
from txmq.client import Client
from txmq.errors import (
    BadRequestError,
    InvalidBatchError,
    InvalidNameError,
    OutcomeUnknownError,
    RequestTimeoutError,
    RolledBackError,
    TooLargeError,
    UnknownTopicError,
)
from txmq.runtime.crashpoints import crash_point

_FINAL = (TooLargeError, UnknownTopicError, BadRequestError, InvalidNameError, InvalidBatchError)


class PositionCommits:
    """See the module's docstring. Used by one thread.

    Args:
        gives_up: the reader ends, and the broker is not waited for any more.
    """

    def __init__(
        self, client: Client, settings: PublishSettings, wait: BrokerWait, gives_up: Callable[[], bool]
    ) -> None:
        compression = None if settings.compression == "none" else settings.compression
        self._producer, self._clock = client.producer(compression=compression), client.clock
        self._timeout_s, self._wait, self._gives_up = settings.transaction_timeout_ms / 1000, wait, gives_up

    def commit(self, log: PositionLog, before: str, published: Published, messages: Sequence[Outgoing]) -> None:
        """Publish messages and what is then published, however long that takes.

        Args:
            before: the id of the position that holds.

        Raises:
            BinlogError: the broker refuses them for good, or another reader took over.
            RequestTimeoutError: the reader ends, and nothing was published.
        """
        while True:
            is_unknown = False
            try:
                self._send(log, published, messages)
                break
            except OutcomeUnknownError as error:
                is_unknown = True
                self._wait.say(error)
            except RolledBackError as error:
                _refuse_final(error)
                self._wait.say(error)
            if self._was_committed(log, before, published.id, is_unknown=is_unknown):
                return
            if self._gives_up():
                raise RequestTimeoutError("the broker is away: what is not published is read again at the next start")
            self._clock.sleep(PAUSE_S.first)
        self._wait.answer(lambda: log.follow(published.to_json()))

    def _was_committed(self, log: PositionLog, before: str, expected: str, *, is_unknown: bool) -> bool:
        return self._wait.answer(lambda: log.was_committed(before, expected, is_unknown=is_unknown))

    def _send(self, log: PositionLog, published: Published, messages: Sequence[Outgoing]) -> None:
        with self._producer.transaction(timeout=self._timeout_s) as tx:
            for message in messages:
                tx.add(*message)
            log.write(tx, published)
            crash_point("binlog.tx.filled")
        crash_point("binlog.tx.committed")


def _refuse_final(error: RolledBackError) -> None:
    if isinstance(error.__cause__, _FINAL):
        raise BinlogError(f"the broker refuses what is to be published: {error.__cause__}") from error
