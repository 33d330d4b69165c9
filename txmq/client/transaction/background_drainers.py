"""The threads that drain outboxes which blocks use always (``xa/last_resource/pump.py``): one a resource and home.

They belong to the client's resolver (``background_resolver``), and end with it: a client that is closed drains for a
moment what waits, and leaves the rest to others.
"""

from __future__ import annotations

from contextlib import suppress

from txmq.client.transport.ports import RoutedBroker, RoutedHome
from txmq.errors import ClosedError
from txmq.runtime.owner import current_process
from txmq.runtime.threads import Signal, start_daemon, thread_number
from txmq.xa import LastResource
from txmq.xa.last_resource.pump import Pump

_THREAD_NAME = "txmq-drainer"


class _Drainer:
    """One thread, and what wakes it."""

    def __init__(self, client: RoutedBroker, home: RoutedHome, resource: LastResource) -> None:
        state = resource.outbox
        assert state is not None
        self.home, self.resource = home, resource
        self._clock = client.clock
        self._pump = Pump(home, resource, state, client.clock, client.routes)
        self._woken, self._ending, self._ended = Signal(), Signal(), Signal()
        self._until: float | None = None
        self._thread: int | None = None
        start_daemon(_THREAD_NAME, self._run)

    def wake(self) -> None:
        """Rows are committed."""
        self._woken.set()

    def end(self, until: float) -> None:
        """Drain until then, and end."""
        self._until = until
        self._ending.set()
        self._woken.set()

    def await_end(self, until: float) -> None:
        """Wait until it has ended, if this is another thread."""
        if self._thread not in (None, thread_number()):
            self._ended.wait(until - self._clock.monotonic())

    def _run(self) -> None:
        self._thread = thread_number()
        try:
            with suppress(ClosedError):
                self._drain()
            self._pump.end(self._until or self._clock.monotonic())
        finally:
            self._ended.set()

    def _drain(self) -> None:
        while self._until is None:
            pause = self._pump.step()
            if self._until is None and pause.seconds > 0:
                (self._woken if pause.is_ended_by_commits else self._ending).wait(pause.seconds)


class BackgroundDrainers:
    """See the module's docstring. Thread safety: any thread, but for ``look``, which is the resolver's."""

    def __init__(self, client: RoutedBroker) -> None:
        self._client = client
        self._of: dict[LastResource, list[_Drainer]] = {}
        self._of_parents: list[dict[LastResource, list[_Drainer]]] = []
        self._process = 0
        self._is_stopping = False

    def add(self, resource: LastResource) -> None:
        """From now on this client drains it; nothing if it does, or if its blocks do not use the outbox always."""
        state = resource.outbox
        if state is None or not state.is_always or self._is_stopping:
            return
        process = current_process()
        if self._process != process:
            # Connections of its drainers are the parent's: neither used nor closed here.
            self._of_parents.append(self._of)
            self._of, self._process = {}, process
        if resource not in self._of:
            self._of[resource] = []
            state.pumped_in = process

    def look(self) -> None:
        """Begin with what was added, and at homes that are new."""
        if self._process != current_process() or self._is_stopping:
            return
        for resource, drainers in list(self._of.items()):
            known = [one.home for one in drainers]
            for home in self._client.routes.links():
                if home not in known:
                    drainers.append(_Drainer(self._client, home, resource))

    def wake(self, resource: LastResource) -> None:
        """A block has committed."""
        for drainer in self._of.get(resource, ()):
            drainer.wake()

    def stop(self, until: float) -> None:
        """End all: they drain for a moment. Once is enough."""
        was_stopping, self._is_stopping = self._is_stopping, True
        if was_stopping or self._process != current_process():
            return
        found = [drainer for drainers in self._of.values() for drainer in drainers]
        for drainer in found:
            drainer.end(until)
        for drainer in found:
            drainer.await_end(until + 1.0)
        for resource in self._of:
            if resource.outbox is not None and resource.outbox.pumped_in == self._process:
                resource.outbox.pumped_in = 0
