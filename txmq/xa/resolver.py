"""Resolves the transactions in doubt of several resources at the homes of a client.

Theory of operation. Each resource has a resolver of its own at each home: ``last_resource/resource_resolver.py`` if its
database decides, ``two_phase/branch_resolver.py`` if the broker does. A round (``run_once``) lets each have its turn.
Before that the brokers hear of transactions that a body has ended by itself (``report``).

Invariant: a database or broker that is away costs the others nothing but its turn; a home that hangs costs them one
wait, and is set aside until it answers (``HomeClient.look``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from txmq.errors import ClosedError, FencedError, TransactionConflictError, TxmqError, UnknownTransactionError
from txmq.runtime.clocks import OSClock
from txmq.runtime.logging import get_logger
from txmq.runtime.ports import Clock
from txmq.xa.last_resource.resource import LastResource
from txmq.xa.last_resource.resource_resolver import LastResourceResolver
from txmq.xa.reporter import Hanging, Hazard
from txmq.xa.resolver_ports import (
    FAILED_POLL_S_MAX,
    POLL_S,
    REPORT_TIMEOUT_S,
    HomeClient,
    RoutedClient,
    Stop,
    home_of,
)
from txmq.xa.two_phase.branch_resolver import BranchResolver
from txmq.xa.two_phase.resource_ports import XAResource


class Resolver:
    """Resolves what is in doubt for some resources at every home of a client.

    Args:
        client: its homes may grow while it runs.
        resources: may grow while it runs.

    Thread safety: used by one thread at a time.
    """

    def __init__(
        self, client: RoutedClient, resources: Iterable[LastResource | XAResource], clock: Clock | None = None
    ) -> None:
        self.client, self._clock = client, clock or OSClock()
        self._resources: list[LastResource | XAResource] = []
        # A cluster's are found by the rounds: to look may take time.
        self._homes: tuple[HomeClient, ...] = tuple(client.routes.links()) if client.routes.is_single_home else ()
        self._resource_resolvers: list[LastResourceResolver | BranchResolver] = []
        self._hazards: deque[tuple[Hazard, Callable[[], None]]] = deque()
        for resource in resources:
            self.add(resource)

    def add(self, resource: LastResource | XAResource) -> None:
        """Resolve for one more resource; nothing if it is known."""
        for known in self._resources:
            if known is resource:
                return
        self._resources.append(resource)
        for home in self._homes:
            self._add_at(home, resource)

    def _add_at(self, home: HomeClient, resource: LastResource | XAResource) -> None:
        if isinstance(resource, LastResource):
            self._resource_resolvers.append(LastResourceResolver(home, resource, self._clock, self.client.routes))
        else:
            self._resource_resolvers.append(BranchResolver(home, resource, self._clock, self.client.routes))

    def _look_for_homes(self) -> None:
        for home in self.client.routes.links():
            if home not in self._homes:
                self._homes = (*self._homes, home)
                for resource in list(self._resources):
                    self._add_at(home, resource)

    def anew(self) -> Resolver:
        """The same work, with connections of its own."""
        return Resolver(self.client, self._resources, self._clock)

    def branch_resolver(self, resource: XAResource, txid: str) -> BranchResolver:
        """The resolver of an XA resource that was added, at the home of a transaction.

        Raises:
            LookupError: it was not.
        """
        self._look_for_homes()
        home = home_of(self.client.routes, txid)
        for resource_resolver in self._resource_resolvers:
            if (
                isinstance(resource_resolver, BranchResolver)
                and resource_resolver.resource is resource
                and resource_resolver.client is home
            ):
                return resource_resolver
        raise LookupError(f"{resource!r} is not known to the resolver")

    def await_completes(self, timeout_s: float) -> None:
        """Wait for the answers to the ``complete`` requests of owners in this process."""
        until = self._clock.monotonic() + timeout_s
        for resource_resolver in list(self._resource_resolvers):
            if isinstance(resource_resolver, BranchResolver):
                resource_resolver.await_answers(until)

    def run_once(self) -> int:
        """One round; how many transactions were resolved. Raises as ``round``."""
        return len(self.round())

    def round(self) -> set[str]:
        """One round.

        Returns:
            The transactions that were resolved: each once, of however many resources.

        Raises:
            ClosedError: the client is closed. That a database or the broker is away is logged, not raised.
        """
        self._look_for_homes()
        self._report_hazards()
        return {txid for resource_resolver in list(self._resource_resolvers) for txid in resource_resolver.round()}

    def report(self, hazard: Hazard, on_reported: Callable[[], None]) -> None:
        """Report a hazard in the next round, and again until the broker keeps it; then call ``on_reported``."""
        self._hazards.append((hazard, on_reported))

    def _report_hazards(self) -> None:
        for _ in range(len(self._hazards)):
            hazard, on_reported = self._hazards[0]
            log = get_logger(resource=hazard.resource)
            try:
                home = home_of(self.client.routes, hazard.txid)
                home.look()
                home.control.submit(
                    "rollback", hazard.txid, extensions=hazard.extensions(), timeout=REPORT_TIMEOUT_S
                ).result()
            except ClosedError:
                raise
            except (TransactionConflictError, UnknownTransactionError, FencedError) as error:
                log.error("heuristic not kept by the broker", txid=hazard.txid, error=str(error), reason=hazard.reason)
            except TxmqError:
                return  # away, or full of them: the next round
            self._hazards.popleft()
            on_reported()

    @property
    def wants_another_look(self) -> bool:
        """Whether the last round saw a loss that counts only if the next round sees it, too."""
        return any(
            resource_resolver.wants_another_look
            for resource_resolver in self._resource_resolvers
            if isinstance(resource_resolver, BranchResolver)
        )

    def hanging(self) -> list[tuple[str, Hanging]]:
        """Branches that stay prepared, and in which resource."""
        found = {
            (resource_resolver.resource.name, one.txid): one
            for resource_resolver in self._resource_resolvers
            if isinstance(resource_resolver, BranchResolver)
            for one in resource_resolver.hanging
        }
        return [(name, one) for (name, _), one in found.items()]

    def problems(self) -> list[tuple[str, Exception]]:
        """Resources whose last round failed, in the database or at the broker, and the error."""
        return [
            (resource_resolver.resource.name, resource_resolver.problem)
            for resource_resolver in self._resource_resolvers
            if resource_resolver.problem is not None
        ]

    def run(self, stop: Stop) -> None:
        """Rounds until ``stop``, or until the client is closed."""
        delay_s = 0.0
        try:
            while not stop.wait(delay_s):
                self.run_once()
                delay_s = self._delay_s()
        except ClosedError:
            pass
        finally:
            self.close()

    def _delay_s(self) -> float:
        return FAILED_POLL_S_MAX if any(one.has_failed for one in self._resource_resolvers) else POLL_S

    def close(self) -> None:
        """Remove the markers of this process's finished transactions, and close the connections to the databases."""
        for resource_resolver in self._resource_resolvers:
            resource_resolver.end()
