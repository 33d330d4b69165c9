"""Half messages on an event loop: ``async with await producer.half("orders", b"created", key=b"42"): await save(42)``.

Theory of operation. The half message is the synchronous one (``txmq/client/transaction/half_message.py``), and so are
the check-backs, whose checker may be a coroutine function: a task of the client for each home awaits it.

*Cancellation.* A half message that a cancelled task was about to get is rolled back: no work for it had begun. A body
that is cancelled is as one that failed: its work may be done, so the checker is asked. What decides goes to its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

from txmq.aio.twin import Facade
from txmq.client.transaction import half_message
from txmq.client.transaction.half_message import Checker as SyncChecker
from txmq.client.transaction.half_message import CheckRequest
from txmq.model import Outcome, Resolution, SendResult
from txmq.runtime.strands import required

Checker = Callable[[CheckRequest], Awaitable[Resolution]]


def checker_for_strands(checker: Checker | None) -> SyncChecker | None:
    """The checker as check-backs call it."""
    if not callable(checker):
        return checker

    def check(request: CheckRequest) -> Resolution:
        return required().wait_for(checker(request))

    return check


class HalfMessage(Facade[half_message.HalfMessage]):
    """One half message; as ``txmq.HalfMessage``. Made by ``await producer.half(...)``; usable as a block.

    Attributes:
        txid: its transaction id. Write it into your row, and your checker needs to look for nothing else.
        outcome: COMMITTED or ROLLED_BACK once that is durable in the broker; UNKNOWN before.
        pending: ("broker",) while your decision has yet to reach the broker.
    """

    @property
    def txid(self) -> str:
        """See the class."""
        return self.inner.txid

    @property
    def outcome(self) -> Outcome:
        """See the class."""
        return self.inner.outcome

    @property
    def pending(self) -> tuple[str, ...]:
        """See the class."""
        return self.inner.pending

    @property
    def result(self) -> Coroutine[Any, Any, SendResult]:
        """To be awaited: where the message is; as of ``txmq.HalfMessage``."""
        return self.host.run(lambda: self.inner.result)

    async def commit(self) -> None:
        """Your work is done, durably: let the message out; as ``txmq.HalfMessage.commit``."""
        await self._to_end(self.inner.commit)

    async def rollback(self) -> None:
        """Your work was not done, and will not be: drop the message; as ``txmq.HalfMessage.rollback``."""
        await self._to_end(self.inner.rollback)

    async def __aenter__(self) -> Self:
        self.inner.__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        if isinstance(error, asyncio.CancelledError):
            await self._to_end(partial(self.inner.ask_checker, error))
        else:
            await self._to_end(partial(self.inner.__exit__, kind, error, trace))
        return False

    async def _to_end(self, work: Callable[[], object]) -> None:
        try:
            await self.host.to_end(work)
        except asyncio.CancelledError as cancelled:
            cancelled.txid = self.txid  # type: ignore[attr-defined]
            cancelled.add_note(f"half message {self.txid} goes to its end: ask client.outcome({self.txid!r})")
            raise
