"""A session with a real ensemble, through kazoo: the only module that imports it.

Where kazoo differs from what ``session`` promises, it is made good here:

* kazoo queues calls while it is not connected, and carries them out when it is again: with no connection, nothing is
  handed to it. What slips in between ends with the connection, or is carried out in its order;
* kazoo waits for an answer without end: every call has a deadline;
* kazoo waits for a server that took its connection and says nothing: for the session timeout, divided by the number of
  servers. A server that is just starting may say nothing. So that the session does not expire over one such connection,
  each server is named several times;
* kazoo returns the errors of a transaction in its results: the first one is raised;
* kazoo drops its watches when the connection is lost, and calls each of them: ``session`` says the same of every watch;
* kazoo says that a session is lost only when it is connected again: the owner of a session that is SUSPENDED has to
  look at its own clock.

Source: kazoo 2.11, ``KazooClient._session_callback``, ``_call``, ``_reset_watchers``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

from kazoo import exceptions as of_kazoo
from kazoo.client import KazooClient, KazooState, KeeperState
from kazoo.handlers.threading import KazooTimeoutError, SequentialThreadingHandler
from kazoo.security import ACL, ANYONE_ID_UNSAFE, Permissions, make_digest_acl

from txmq.addresses import Credentials, TlsFiles
from txmq.errors import RegistryAwayError
from txmq.registry.zookeeper.session import (
    AccessDeniedError,
    BadVersionError,
    Check,
    ConnectionLossError,
    Create,
    Delete,
    EphemeralParentError,
    Node,
    NodeExistsError,
    NoNodeError,
    NotConnectedError,
    NotEmptyError,
    Operation,
    Result,
    SessionState,
    SetValue,
    Stat,
    Watch,
    WatchEvent,
    ZooKeeperError,
    refuse_too_large,
)
from txmq.runtime.tls import ClientTls

_CONNECTED: Final = (KeeperState.CONNECTED, KeeperState.CONNECTED_RO)
_STATES: Final = {
    KazooState.CONNECTED: SessionState.CONNECTED,
    KazooState.SUSPENDED: SessionState.SUSPENDED,
    KazooState.LOST: SessionState.LOST,
}
_EVENTS: Final = {"CREATED": "created", "DELETED": "deleted", "CHANGED": "changed", "CHILD": "children"}
_REFUSALS: Final[dict[type[Exception], type[ZooKeeperError]]] = {
    of_kazoo.NoNodeError: NoNodeError,
    of_kazoo.NodeExistsError: NodeExistsError,
    of_kazoo.BadVersionError: BadVersionError,
    of_kazoo.NotEmptyError: NotEmptyError,
    of_kazoo.NoChildrenForEphemeralsError: EphemeralParentError,
    of_kazoo.NoAuthError: AccessDeniedError,
    of_kazoo.AuthFailedError: AccessDeniedError,
}
_LOSSES: Final = (
    of_kazoo.ConnectionLoss, of_kazoo.SessionExpiredError, of_kazoo.SessionMovedError, of_kazoo.OperationTimeoutError,
    KazooTimeoutError,
)  # fmt: skip
_BYSTANDERS: Final = (of_kazoo.RolledBackError, of_kazoo.RuntimeInconsistency)  # operations besides the failed one
_TRIES_IN_A_SESSION: Final = 3  # connections that each server may leave unanswered before the session expires
_PIPELINED_MAX: Final = 500  # calls of ``get_many`` under way at once


class _TlsHandler(SequentialThreadingHandler):  # type: ignore[misc]  # kazoo has no types
    """kazoo's connections as all others of txmq: kazoo's own trust every CA of the system besides the one that was
    given, and take a common name for the host's.
    """

    def __init__(self, tls: ClientTls) -> None:
        super().__init__()
        self._tls = tls

    def create_connection(self, address: tuple[str, int], hostname: str, timeout: float, **_of_tls: object) -> Any:
        """See kazoo."""
        return self._tls.connected_socket(address, hostname, timeout)


class KazooSession:
    """See the module's docstring.

    Args:
        hosts: ``HOST:PORT`` of the ensemble's servers, with commas between them.
        session_timeout_ms: the time for which a session outlives its connection; the ensemble may grant another one.
        call_timeout_ms: the longest time a call takes.
        credentials: None leaves nodes open to every client of the ensemble.
        tls: files of TLS; None speaks plaintext.

    Raises:
        ConfigError: a file of TLS cannot be read.
        RegistryAwayError: no server of the ensemble took the connection within the call timeout.
    """

    def __init__(
        self, hosts: str, *, session_timeout_ms: int, call_timeout_ms: int, credentials: Credentials | None = None,
        tls: TlsFiles | None = None,
    ) -> None:  # fmt: skip
        self._timeout = call_timeout_ms / 1000
        self._has_credentials = credentials is not None
        self._public: list[ACL] | None = None  # of nodes that everybody may read; None: what everybody makes is open
        log = logging.getLogger("txmq.kazoo")
        log.setLevel(logging.CRITICAL)  # it warns at every try to connect; states are told to listeners
        access: dict[str, Any] = {}
        if credentials is not None:
            own = make_digest_acl(credentials.name, credentials.password, all=True)
            self._public = [own, ACL(Permissions.READ, ANYONE_ID_UNSAFE)]
            access = {"auth_data": [("digest", f"{credentials.name}:{credentials.password}")], "default_acl": [own]}
        if tls is not None:
            access |= {"handler": _TlsHandler(ClientTls(tls))}
        retry = {"max_tries": -1, "delay": 0.05, "backoff": 2, "max_delay": 1.0}
        self._client = KazooClient(
            ",".join([hosts] * _TRIES_IN_A_SESSION),
            timeout=session_timeout_ms / 1000,
            connection_retry=retry,
            logger=log,
            **access,
        )
        self._connected = self._client.handler.event_object()
        self._client.add_listener(self._hear)
        try:
            self._client.start(timeout=self._timeout)
        except KazooTimeoutError:
            hint = "" if tls is None else "; zks:// takes its secureClientPort, and a certificate that is valid for it"
            raise RegistryAwayError(
                f"no ZooKeeper server answers at {hosts} within {self._timeout:.3g} s: start it, or correct the address"
                f"{hint}"
            ) from None

    def _hear(self, state: str) -> None:
        if state == KazooState.CONNECTED:
            self._connected.set()
        else:
            self._connected.clear()

    @property
    def number(self) -> int:
        """See ``Session``."""
        known = self._client.client_id
        return 0 if known is None or known[0] is None else int(known[0])

    @property
    def password(self) -> bytes:
        """What takes the session over, together with its number."""
        known = self._client.client_id
        return b"" if known is None else bytes(known[1])

    @property
    def state(self) -> SessionState:
        """See ``Session``."""
        return _STATES[self._client.state]

    def listen(self, listener: Callable[[SessionState], None]) -> None:
        """See ``Session``."""
        self._client.add_listener(lambda state: listener(_STATES[state]))

    def wait_connected(self, timeout: float) -> bool:
        """See ``Session``."""
        self._connected.wait(timeout)
        return self._client.client_state in _CONNECTED

    def create(
        self, path: str, value: bytes, *, is_ephemeral: bool = False, is_sequential: bool = False,
        is_public: bool = False,
    ) -> str:  # fmt: skip
        """See ``Session``."""
        refuse_too_large([Create(path, value)])
        access = self._public if is_public else None
        made = self._call(
            path, lambda: self._client.create_async(path, value, access, ephemeral=is_ephemeral, sequence=is_sequential)
        )
        return str(made)

    def get(self, path: str, watch: Watch | None = None) -> Node:
        """See ``Session``."""
        value, stat = self._call(path, lambda: self._client.get_async(path, _notifier(watch)))
        return Node(value, _stat(stat))

    def get_many(self, paths: Sequence[str]) -> list[Node | None]:
        """See ``Session``."""
        nodes: list[Node | None] = []
        for start in range(0, len(paths), _PIPELINED_MAX):
            some = paths[start : start + _PIPELINED_MAX]
            self._require_connection()
            asked = [self._client.get_async(path) for path in some]
            nodes.extend(self._one_of_many(path, answer) for path, answer in zip(some, asked, strict=True))
        return nodes

    def _one_of_many(self, path: str, answer: Any) -> Node | None:
        try:
            value, stat = self._answer(path, answer)
        except NoNodeError:
            return None
        return Node(value, _stat(stat))

    def exists(self, path: str, watch: Watch | None = None) -> Stat | None:
        """See ``Session``."""
        stat = self._call(path, lambda: self._client.exists_async(path, _notifier(watch)))
        return None if stat is None else _stat(stat)

    def children(self, path: str, watch: Watch | None = None) -> list[str]:
        """See ``Session``."""
        return sorted(self._call(path, lambda: self._client.get_children_async(path, _notifier(watch))))

    def set_value(self, path: str, value: bytes, version: int) -> Stat:
        """See ``Session``."""
        refuse_too_large([SetValue(path, value, version)])
        return _stat(self._call(path, lambda: self._client.set_async(path, value, version)))

    def delete(self, path: str, version: int) -> None:
        """See ``Session``."""
        self._call(path, lambda: self._client.delete_async(path, version))

    def transact(self, operations: Sequence[Operation]) -> list[Result]:
        """See ``Session``."""
        refuse_too_large(operations)
        transaction = self._client.transaction()
        for operation in operations:
            _add(transaction, operation, self._public)
        results = self._call(operations[0].path, transaction.commit_async)
        for operation, result in zip(operations, results, strict=True):
            if isinstance(result, Exception) and not isinstance(result, _BYSTANDERS):
                raise _translated(result, operation.path) from result
        return [_result(operation, result) for operation, result in zip(operations, results, strict=True)]

    def sync(self, path: str) -> None:
        """See ``Session``."""
        self._call(path, lambda: self._client.sync_async(path))

    @property
    def has_credentials(self) -> bool:
        """See ``Session``."""
        return self._has_credentials

    def shares_access(self, path: str) -> bool:
        """See ``Session``."""
        if not self._has_credentials:
            return True
        access, _stat = self._call(path, lambda: self._client.get_acls_async(path))
        return all(entry.id.scheme != "world" for entry in access)

    def close(self) -> None:
        """See ``Session``."""
        self._client.stop()
        self._client.close()

    # --- calls -------------------------------------------------------------------------------------------------------

    def _call(self, path: str, send: Callable[[], Any]) -> Any:
        self._require_connection()
        return self._answer(path, send())

    def _require_connection(self) -> None:
        if self._client.client_state not in _CONNECTED:
            raise NotConnectedError("there is no connection to ZooKeeper")

    def _answer(self, path: str, asked: Any) -> Any:
        try:
            return asked.get(timeout=self._timeout)
        except _LOSSES as error:
            raise ConnectionLossError(f"{path}: {type(error).__name__}: {error}") from error
        except of_kazoo.ZookeeperError as error:
            raise _translated(error, path) from error


def _translated(error: Exception, path: str) -> ZooKeeperError:
    return _REFUSALS.get(type(error), ZooKeeperError)(f"{path}: {type(error).__name__}")


def _notifier(watch: Watch | None) -> Callable[[Any], None] | None:
    if watch is None:
        return None
    return lambda event: watch(WatchEvent(_EVENTS.get(event.type, "disconnected"), event.path or ""))


def _stat(stat: Any) -> Stat:
    return Stat(
        stat.version, stat.cversion, stat.numChildren, stat.dataLength, stat.czxid, stat.mzxid, stat.ephemeralOwner
    )


def _add(transaction: Any, operation: Operation, public: list[ACL] | None) -> None:
    match operation:
        case Create(path, value, is_ephemeral, is_sequential, is_public):
            access = public if is_public else None
            transaction.create(path, value, access, ephemeral=is_ephemeral, sequence=is_sequential)
        case SetValue(path, value, version):
            transaction.set_data(path, value, version)
        case Delete(path, version):
            transaction.delete(path, version)
        case Check(path, version):
            transaction.check(path, version)


def _result(operation: Operation, result: Any) -> Result:
    if isinstance(operation, Create):
        return str(result)
    return _stat(result) if isinstance(operation, SetValue) else None
