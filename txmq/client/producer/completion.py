"""The end of a batch, as threads and futures wait for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from txmq.client.producer.batches import Batch, BatchQueue
from txmq.client.transport.reply import Waiter
from txmq.errors import TxmqError
from txmq.model import SendResult, SendStatus
from txmq.runtime.threads import Future

if TYPE_CHECKING:
    from txmq.client.producer.sender import Sender


class Completion:
    """The end of one batch, for the threads and futures that wait for it; ``Batch.owner``.

    Attributes:
        is_queued: its futures are complete, or a thread is to complete them.
    """

    __slots__ = ("batch", "done", "futures", "is_queued", "moved_to", "waiters")

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.done = self.is_queued = False
        self.moved_to: Sender | None = None  # the sender that has it now, if it is not the first one
        self.waiters: list[Waiter] = []
        self.futures: list[tuple[int, Future[SendResult]]] = []

    def waiter(self) -> Waiter:
        """A waiter for one thread: several threads may share a batch."""
        waiter = Waiter()
        self.waiters.append(waiter)
        if self.done:  # looked at second, because ``finish`` sets it first
            waiter.finish()
        return waiter

    def finish(self) -> None:
        """End all waits for the batch."""
        self.done = True
        for waiter in self.waiters:
            waiter.finish()

    def result(self, number: int) -> SendResult:
        """The result of message ``number`` of the batch. Raises the error it ended with."""
        batch = self.batch
        if batch.error is not None:
            raise type(batch.error)(*batch.error.args)
        assert batch.base_offset is not None
        queue = batch.queue
        return SendResult(queue.topic, queue.partition, batch.base_offset + number, SendStatus.ACKNOWLEDGED)

    def complete_futures(self) -> None:
        """Set the futures. That runs the application's callbacks, so never on a thread that reads for others."""
        for number, future in self.futures:
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self.result(number))
            except TxmqError as error:
                future.set_exception(error)


def unsent(topic: str, partition: int, count: int, error: TxmqError) -> Completion:
    """The completion of a batch that was not sent, with its one future."""
    batch = Batch(BatchQueue(topic, partition), 0.0, 0.0)
    batch.count, batch.error, batch.is_finished = count, error, True
    completion = completion_of(batch)
    completion.futures.append((0, Future()))
    completion.finish()
    completion.complete_futures()
    return completion


def completion_of(batch: Batch) -> Completion:
    """The batch's completion, made when it is first asked for."""
    completion = batch.owner
    if completion is None:
        completion = batch.owner = Completion(batch)
    assert isinstance(completion, Completion)
    return completion
