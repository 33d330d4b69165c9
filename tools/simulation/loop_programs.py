"""An application that runs ``txmq.aio`` on a loop of its own (``loops``), and is cancelled at its awaits.

It does what ``Application`` does, by the same text: its code runs in a strand, which awaits what ``txmq.aio`` gives it.
Each send and each block is a task, and some are cancelled at a time that is drawn. What must hold then: a block whose
body was cancelled is rolled back; one that was cancelled at its end goes to its end, and the CancelledError has its id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import txmq.aio
from tools.shown import Shown, is_shown
from tools.simulated.xa_resource import SimulatedXAResource
from txmq.client.client import Client
from txmq.client.producer.producer import Producer
from txmq.client.transaction.block import Transaction as Block
from txmq.model import Outcome
from txmq.runtime import strands

from .application import Application, Resources
from .history import Transaction
from .loops import SimLoop
from .tls import NOBODY, files_of
from .users import PASSWORD
from .world import Violation

CANCELLED = 0.2  # of what it does
_ENDS_S = 60.0


class _Strand:
    """Calls of a strand; see ``tools.shown``."""

    def call(self, work: Callable[[], Any]) -> Any:
        """Await in the strand's place."""
        found = work()
        if isinstance(found, Awaitable):
            found = strands.required().wait_for(found)
        return Shown(found, self) if is_shown(found) else found

    def given(self, _name: str, argument: Any) -> Any:
        """As it is."""
        return argument.original if isinstance(argument, Shown) else argument


class LoopApplication(Application):
    """Sends, and runs transaction blocks, on an event loop."""

    def _set_out(self) -> None:
        self._loop = SimLoop(self.host)  # type: ignore[abstract]  # what is not there is not used
        self._loop.call_soon(lambda: self._loop.create_task(self._run()))

    async def _run(self) -> None:
        host = strands.Host()
        self._loop.hosts.append(host)
        try:
            await host.run(self._main)
        except Exception as failure:  # noqa: BLE001  raised again by the world's loop
            self._loop.failure = failure

    def client(self) -> Client:
        """A client of the loop."""
        places = ",".join(f"{host}:{port}" for host, port in self.shared.addresses)
        user, password = (f"{self.shared.user}@", PASSWORD) if self.shared.user else ("", "")
        timeout = self.world.rng.choice((0.3, 1.0))
        scheme, ca = ("txmqs", files_of(NOBODY).ca) if self.world.has_tls else ("txmq", "")
        opened = _Strand().call(
            lambda: txmq.aio.connect(
                f"{scheme}://{user}{places}", ca=ca, timeout=timeout, name=self.host.name, lazy=True, password=password
            )
        )
        self._loop.hosts.append(opened.original.host)
        return cast("Client", opened)

    def _send(self, producer: Producer) -> None:
        self._as_task(lambda: super(LoopApplication, self)._send(producer))

    def _as_task(self, work: Callable[[], object]) -> BaseException | None:
        """Run it as a task, which is perhaps cancelled: what it ended with then."""
        strand, rng = strands.required(), self.world.rng
        task = self._loop.create_task(strand.host.run(work))
        if rng.random() < CANCELLED:
            self._loop.call_later(rng.choice((0.0, rng.uniform(0.0, 0.02))), task.cancel)
        strand.wait_for(asyncio.wait((task,)))
        if task.cancelled():
            self.world.meet("a task was cancelled")
            try:
                task.result()
            except asyncio.CancelledError as error:
                return error
        elif (failure := task.exception()) is not None:
            raise failure
        return None

    def _block(self, producer: Producer, resources: Resources) -> Outcome:
        timeout = self.world.rng.choice((0.05, 0.3, 2.0, 30.0))
        block = producer.transaction(*resources, timeout=timeout)
        told: list[Transaction] = []
        errors: list[Exception | None] = []
        cancelled = self._as_task(lambda: errors.append(self._run_block(block, producer, resources, told)))
        if told and cancelled is not None:
            self._judge_cancelled(told[0], block, cancelled)
        elif told:
            self._judge(told[0], block, errors[0])
        return block.outcome

    def _judge_cancelled(self, transaction: Transaction, block: Block, cancelled: BaseException) -> None:
        """The end goes to its end; what it was told then is what counts."""
        client = cast("Shown", self._client).original
        txid = getattr(cancelled, "txid", None)
        strands.required().wait_for(client.host.await_ends(_ENDS_S))
        self.world.trace(self.host.name, "cancelled", txid is not None, block.outcome.value)
        if client.host._ends:
            raise Violation(f"an end of {self.host.name} takes more than {_ENDS_S:.0f} s")
        if txid not in (None, transaction.txid):
            raise Violation(f"P6: cancelled with {txid}, it was {transaction.txid}")
        if block.outcome is Outcome.COMMITTED:
            self.world.meet("a cancelled end committed")
            self._committed(transaction, block)
        elif block.outcome is Outcome.ROLLED_BACK:
            transaction.told = "rolled-back"
        else:
            self._find_out(transaction)
        if transaction.told == "committed" and txid is None:
            raise Violation(f"P6: {transaction.txid} was cancelled without its id, and is committed")

    def _xa_rows(self, block: Block, resources: Resources, transaction: Transaction) -> None:
        """These databases are no DB-API's: their connections are used without a thread."""
        super()._xa_rows(_Direct(block), resources, transaction)  # type: ignore[arg-type]


class _Direct:
    """A block, whose connections are those of ``txmq``."""

    def __init__(self, block: Any) -> None:
        self._inner = block.original.inner

    def connection(self, resource: SimulatedXAResource) -> Any:
        """See ``Transaction``."""
        return self._inner.connection(resource)
