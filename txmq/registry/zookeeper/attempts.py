"""Calls that are tried again until what came of them is known: after a lost connection, and after a lost race."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from txmq.errors import RegistryAwayError, RegistryConflictError, RegistryError
from txmq.registry.zookeeper.session import (
    AccessDeniedError,
    BadVersionError,
    ConnectionLossError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    RequestTooLargeError,
    Session,
    ZooKeeperError,
)

LOSSES_MAX: Final = 3  # lost connections in one call
RACES_MAX: Final = 50  # changes of others that came first
RECONNECT_TIMEOUT_S: Final = 5.0

_T = TypeVar("_T")
_RACES: Final = (BadVersionError, NodeExistsError, NoNodeError, NotEmptyError)


class Attempts:
    """Runs attempts on a session.

    Every attempt reads first: what it finds there tells whether the attempt before it was carried out.
    """

    def __init__(self, session: Session, cluster_path: str) -> None:
        self._session, self._path = session, cluster_path

    def run(self, attempt: Callable[[], _T]) -> _T:
        """The result of the first attempt that has one.

        Raises:
            RegistryAwayError: the connection is lost, or was lost again and again.
            RegistryConflictError: others were faster, again and again.
            RegistryError: the ensemble refused.
        """
        losses = races = 0
        is_node_missing = False
        while True:
            try:
                self._session.sync(self._path)
                if is_node_missing and self._session.exists(self._path) is None:
                    raise RegistryError(f"{self._path} is not in ZooKeeper: correct the address, or restore it")
                return attempt()
            except ConnectionLossError as error:
                losses += 1
                if losses > LOSSES_MAX or not self._session.wait_connected(RECONNECT_TIMEOUT_S):
                    raise RegistryAwayError(f"ZooKeeper does not answer ({error}); repeat when it is back") from error
            except _RACES as error:
                races += 1
                is_node_missing = isinstance(error, NoNodeError)
                if races > RACES_MAX:
                    raise RegistryConflictError(f"others were faster {races} times ({error}): repeat later") from error
            except ZooKeeperError as error:
                raise _refusal(error) from error


def _refusal(error: ZooKeeperError) -> RegistryError:
    if isinstance(error, AccessDeniedError):
        return RegistryError(f"ZooKeeper denies access ({error}): give the credentials under which the nodes were made")
    if isinstance(error, RequestTooLargeError):
        return RegistryError(f"too large for ZooKeeper ({error}): fewer partitions of one topic, or grants of one user")
    return RegistryError(f"ZooKeeper refuses: {error}")
