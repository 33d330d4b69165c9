"""``client.producer(retry_store=...)``: a producer that keeps on local disk what it cannot send.

Theory of operation. A message that joins no transaction is sent by an ordered producer (``ordered_producer``): there is
one way to keep a message, to number it, and to send it again. So a message has its partition before anything is tried,
messages that wait for a partition stay ahead of later ones, and the broker recognises what it has by its sequence. A
message in a transaction's block joins it, as with every producer: a transaction's outcome is never kept for later.

Invariants:
    * Outside transactions ``send`` ends with a message at the broker, a message on this host's disk, or an error that
      says that it is on neither.
    * A transaction does not wait for kept messages, and may overtake them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from txmq.client.arguments import require_wait
from txmq.client.partitioner import PartitionSelector
from txmq.client.producer.bulk import Pair
from txmq.client.producer.core import Record
from txmq.client.producer.producer import Producer, ProducerSettings
from txmq.client.spooling.ordered_producer import OrderedOptions
from txmq.client.transaction.half_message import CheckBacks
from txmq.errors import ConfigError, TxmqError
from txmq.model import ParkedMessage, SendResult
from txmq.runtime.threads import Future

if TYPE_CHECKING:
    from txmq.client.client import Client

_DEFAULTS = ProducerSettings()
_AT_A_TIME = 256  # of many messages; then an event loop goes on
_WITHOUT_STORE = ("linger_ms", "batch_size_bytes", "buffer_size_bytes", "max_in_flight")


class RetryingProducer(Producer):
    """A producer with a retry store; made by ``Client.producer``. Thread safety: as ``Producer``.

    Raises:
        ConfigError: an argument that only a producer without a store takes.
        DirectoryInUseError: another process, or another producer of this one, has the store.
        StorageError: the store cannot be opened.
    """

    def __init__(
        self, client: Client, selector: PartitionSelector | None, settings: ProducerSettings,
        checks: CheckBacks | None, store: str,
    ) -> None:  # fmt: skip
        super().__init__(client, selector, settings, checks)
        refused = [name for name in _WITHOUT_STORE if getattr(settings, name) != getattr(_DEFAULTS, name)]
        if refused:
            raise ConfigError(f"{', '.join(refused)}: not with a retry_store, which sends in its own way")
        options = OrderedOptions(timeout=settings.timeout, compression=settings.compression)
        self._kept = client.ordered_producer(self._selector, store, options=options)

    @property
    def spooled(self) -> int:
        """How many messages wait in the store."""
        return self._kept.spooled

    def parked(self) -> list[ParkedMessage]:
        """Kept messages that the broker refuses, each with its reason; ``txmq spool`` shows them and tries again."""
        return self._kept.parked()

    def flush(self, timeout: float | None = None) -> None:
        """Wait until only parked messages are kept. Raises RequestTimeoutError if that lasts longer."""
        require_wait(timeout)
        self._kept.flush(self.settings.timeout if timeout is None else timeout)

    def close(self, timeout: float | None = None) -> None:
        """End. The next producer that opens the store sends what is kept."""
        self._closed = True
        self._kept.close()

    def _send_alone(
        self, topic: str, partition: int, record: Record, deadline: float, _is_selected: bool
    ) -> SendResult:  # fmt: skip
        return self._kept.send_to((topic, partition), record, deadline, self._kept.topic_ref(topic, deadline))

    def _send_alone_async(
        self, topic: str, partition: int, record: Record, deadline: float, _is_selected: bool
    ) -> Future[SendResult]:  # fmt: skip
        return self._kept.send_to_async((topic, partition), record, deadline, self._kept.topic_ref(topic, deadline))

    def send_pairs_outside(self, topic: str, pairs: Sequence[Pair], timeout: float | None) -> Sequence[SendResult]:
        futures: list[Future[SendResult]] = []
        for first in range(0, len(pairs), _AT_A_TIME):
            futures += [self._begun(topic, pair, timeout) for pair in pairs[first : first + _AT_A_TIME]]
            self.client.clock.sleep(0.0)
        failures = [error for future in futures if (error := future.exception()) is not None]
        if failures:
            failures[0].add_note(f"{len(pairs) - len(failures)} of {len(pairs)} messages were acknowledged or spooled")
            raise failures[0]
        return [future.result() for future in futures]

    def _begun(self, topic: str, pair: Pair, timeout: float | None) -> Future[SendResult]:
        key, value = pair
        try:
            return self.send_async(topic, value, key, timeout=timeout)
        except TxmqError as error:
            future: Future[SendResult] = Future()
            future.set_exception(error)
            return future

    def _partitions_of(self, topic: str, wait_s_max: float | None) -> int:
        return self._asked(lambda seconds: self._kept.topic_ref(topic, self._deadline(seconds)).partitions, wait_s_max)

    def _batch_size_bytes_max(self) -> int:
        return self._kept.request_size_bytes_max
