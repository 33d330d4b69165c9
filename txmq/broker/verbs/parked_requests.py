"""A request for a topic that this home does not know waits until the registry was asked; only then it is 404.

Where there are users, so does every request after a while in which the process stood still (it was paused, or the disk
did not answer): its user may have been removed meanwhile, and the registry's word of it is under way. If the registry
does not answer, the home goes on with the users that it knows.

Another broker may have created the topic a moment ago. One read of the registry is under way at a time. It counts for
the requests that came before it began; the next one, for all that came meanwhile. A connection's later requests are
taken in when its request that waits is answered (``ClientConnection.waiting``), so that their order is kept.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from txmq.broker.client_connection import ClientConnection
from txmq.broker.cluster.cluster_view import ClusterView, Parked, RegistryState
from txmq.broker.cluster.registry_asks import Refresh, Result
from txmq.broker.context import Context
from txmq.errors import BrokerError, OverloadedError, TxmqError, UnavailableError
from txmq.protocol.requests import Request

STILL_MS_MAX: Final = 700  # between two ticks; a change of users reaches a home that runs within a second
PARKED_BYTES_MAX: Final = 32 << 20  # of the bodies of all requests that wait


class DoubtfulUsersError(UnavailableError):
    """The process stood still: whether users were removed meanwhile is being asked."""


def park(
    context: Context, view: ClusterView, client: ClientConnection, request: Request, error: BrokerError
) -> BrokerError | None:
    """Let a request wait for the registry that was refused with ``error``.

    Returns:
        The answer, if it is not to wait (any longer).
    """
    needed = view.resumed or view.refreshes_begun + 1
    if isinstance(error, DoubtfulUsersError):
        needed = max(needed, view.doubt)
    elif needed <= view.refreshes_done:
        return error if view.refresh_error is None else _unavailable(str(view.refresh_error))
    if view.state is not RegistryState.CONNECTED and not isinstance(error, DoubtfulUsersError):
        return _unavailable(view.state.value)
    size = len(request[3] or b"")
    if view.parked_bytes + size > PARKED_BYTES_MAX:
        return OverloadedError("too many requests wait for the registry; try again later")
    try:
        _ask(view)
    except OverloadedError as overloaded:
        return overloaded
    client.waiting = request
    client.given_bytes = 1 << 62  # ends the connection's turn, as a long answer does: no test in the loop for it
    view.parked[client] = Parked(request, needed)
    view.parked_bytes += size
    return None


def _unavailable(reason: str) -> UnavailableError:
    return UnavailableError(f"whether the topic exists is not known: the registry does not answer ({reason})")


def _ask(view: ClusterView) -> None:
    """Have the registry read, unless it is under way."""
    if view.refreshes_asked == view.refreshes_done:
        view.ask(Refresh, lambda result: _refreshed(view, result))
        view.refreshes_asked += 1


def _refreshed(view: ClusterView, result: Result) -> None:
    view.refreshes_done = view.refreshes_asked
    view.refresh_error = result if isinstance(result, TxmqError) else None
    if view.refreshes_done < view.doubt:  # it may have been read before the process stood still
        _ask(view)


def doubt_users(context: Context) -> bool:
    """Whether to ask first if users were removed while the process stood still."""
    view = context.cluster
    if view is None:
        return False
    if context.now_ms - context.ticked_ms > STILL_MS_MAX:
        context.ticked_ms = context.now_ms  # it is known now that it stood still
        view.doubt = view.refreshes_begun + 1
        if context.is_serving:  # else the users with which it begins may have been read before
            with suppress(OverloadedError):  # a request that is parked asks
                _ask(view)
    return context.is_serving and view.refreshes_done < view.doubt


def forget(view: ClusterView, client: ClientConnection) -> None:
    """A connection is gone: its request is not executed."""
    parked = view.parked.pop(client, None)
    if parked is not None:
        view.parked_bytes -= len(parked.request[3] or b"")


def take(view: ClusterView) -> list[tuple[ClientConnection, Parked]]:
    """All requests that wait, in order of arrival. Each must be executed again."""
    taken = list(view.parked.items())
    view.parked.clear()
    view.parked_bytes = 0
    for client, _ in taken:
        client.waiting = None
    return taken
