"""The resolver's thread: one in every client that has resources, started by its first transaction with one.

It also takes the answers to commits that nobody waits for, and tells homes of decisions that could not be told at the
end of the block (``PendingCommits``).

It ends when the client is closed. A forked child gets a thread of its own when it needs one: threads do not survive a
fork.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from txmq.client.transaction.homes import PendingCommits
from txmq.runtime.caller import current_process
from txmq.runtime.threads import Lock, Signal, start_daemon, thread_number
from txmq.xa import LastResource
from txmq.xa.reporter import Hazard
from txmq.xa.resolver import Resolver
from txmq.xa.resolver_ports import Answer
from txmq.xa.two_phase.resource_ports import XAResource

if TYPE_CHECKING:
    from txmq.client.client import Client

_THREAD_NAME = "txmq-resolver"
CLOSE_WAIT_S = 1.0  # a connection that is closed with answers unread may take requests with it


class BackgroundResolver:
    """A ``Resolver`` in a thread of its own.

    Thread safety: any thread.
    """

    def __init__(self, client: Client) -> None:
        self._resolver, self._client = Resolver(client, []), client
        self._added: dict[LastResource | XAResource, int] = {}  # and by which process
        self._untold: dict[PendingCommits, None] = {}
        self._of_parents: list[Resolver] = []
        self._signal = Signal()
        self._lock = Lock()
        self._process: int | None = None
        self._thread: int | None = None
        self._ended = Signal()
        self._is_stopping = False

    def add(self, resource: LastResource | XAResource) -> None:
        """Resolve for this resource, too; starts the thread. Nothing if this process has done so."""
        process = current_process()
        if self._added.get(resource) == process:
            return
        self._begin(resource)
        self._resolver.add(resource)
        self._added[resource] = process

    def tell(self, commits: PendingCommits) -> None:
        """Tell a home of decisions, until it has answered; starts the thread."""
        if commits not in self._untold:
            self._untold[commits] = None
        if self._process != current_process():
            self._begin(None)

    def _begin(self, first: LastResource | XAResource | None) -> None:
        process = current_process()
        if self._process != process:
            with self._lock:
                self._begin_in(process, first)

    def _begin_in(self, process: int, first: LastResource | XAResource | None) -> None:
        if self._process == process:
            return
        if self._process is not None:
            # Its connections to databases are the parent's: neither used nor closed here, nor garbage-collected, which
            # closes.
            self._of_parents.append(self._resolver)
            self._resolver = self._resolver.anew()
        if first is not None:
            self._resolver.add(first)
        self._process = process
        start_daemon(_THREAD_NAME, self._run)

    def wake(self) -> None:
        """Look at once: a transaction was left in doubt."""
        self._signal.set()

    def report(self, hazard: Hazard, on_reported: Callable[[], None]) -> None:
        """Report that a body has ended its database's transaction by itself, until the broker keeps it."""
        self._resolver.report(hazard, on_reported)
        self.wake()

    def completed(self, resource: XAResource, txid: str, answer: Answer) -> None:
        """``complete`` of a branch was sent; it is not awaited, except when the client is closed."""
        self._resolver.branch_resolver(resource, txid).completed(txid, answer)

    def watch(self, resource: XAResource, txid: str, on_resolved: Callable[[], None]) -> None:
        """Call ``on_resolved`` when nothing is in doubt in this resource of a transaction whose owner left it."""
        self._resolver.branch_resolver(resource, txid).watch(txid, on_resolved)

    def stop(self) -> None:
        """End the thread: it removes the last markers first, and is waited for a moment.

        The next resolver finds what is in doubt.
        """
        is_running = self._process == current_process()
        if is_running:
            self._resolver.await_completes(CLOSE_WAIT_S)
        self._is_stopping = True
        self._signal.set()
        if is_running and self._thread != thread_number():
            self._ended.wait(CLOSE_WAIT_S)

    def wait(self, timeout: float) -> bool:
        """See ``txmq.xa.resolver.Stop``."""
        if not self._is_stopping:
            self._signal.wait(timeout)
        for commits in list(self._untold):
            self._untold.pop(commits, None)  # first: a commit that is told of from now on puts them back
            commits.settle()
            if commits:
                self._untold[commits] = None
        return self._is_stopping

    def _run(self) -> None:
        self._thread = thread_number()
        try:
            self._resolver.run(self)
        finally:
            self._ended.set()


_lock = Lock()


def resolver_of(client: Client) -> BackgroundResolver:
    """The client's resolver, made when first asked for."""
    found = client.resolver
    if found is None:
        made = BackgroundResolver(client)  # asks for the homes: other clients do not wait for that
        with _lock:
            found = client.resolver = client.resolver or made
    return found


def stop_resolver(client: Client) -> None:
    """Called when a client is closed."""
    found, client.resolver = client.resolver, None
    if found is not None:
        found.stop()
