"""Offsets in ZooKeeper, in MetaQ's layout: for tools that read them there.

Theory of operation. A node for each partition has the offset as its value. Its one child is named by the newest
generation that has loaded the partition. ``load`` replaces the child, then reads the value. ``save`` sets the value in
one transaction with a check that the child of its own generation is there: an older owner's save fails as a whole.

```
<chroot>/txmq/consumers/<group>/offsets/<topic>/0-<partition>               <generation>-<offset>
<chroot>/txmq/consumers/<group>/offsets/<topic>/0-<partition>/<generation>
```

MetaQ has ``<message id>-<offset>`` there, and the number of a broker in place of 0: a partition's number is unique in
its topic here. ``<generation>-<offset>`` is the last line; the first one says which log the offset counts in (empty if
that is not known), and a text about deferred messages stands between. An empty value says that nothing was saved.

Invariants:
    * a node that is missing above the groups is an error: a wrong path, or an ensemble that lost its data, never means
      that nothing was saved;
    * a value without a generation was not written by this store, and is an error.

Sources: MetaQ, ``ZkOffsetStorage``; ZooKeeper Programmer's Guide, "Consistency Guarantees".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from typing import Final, TypeVar

from txmq.addresses import parse_ensemble
from txmq.client.consumer.offsets.offset_store import OffsetPosition, StoredOffset
from txmq.errors import ConfigError, FencedError, OffsetStoreAwayError, RegistryAwayError, StorageError, TxmqError
from txmq.model import TopicPartition
from txmq.registry.zookeeper.session import (
    ANY_VERSION,
    Check,
    Create,
    Delete,
    NodeExistsError,
    NoNodeError,
    Operation,
    RequestTooLargeError,
    Session,
    SetValue,
)
from txmq.runtime.threads import Lock

_T = TypeVar("_T")
_TOGETHER_MAX: Final = 200  # partitions in one transaction: ZooKeeper syncs its log once for all of them
_SESSION_TIMEOUT_MS: Final = 10_000
_CALL_TIMEOUT_MS: Final = 2000  # the consumer's heartbeat waits for it
_ROOT = re.compile(r"(?:/[A-Za-z0-9][A-Za-z0-9._-]*)+")
_VALUE = re.compile(r"[0-9]{1,20}-([0-9]{1,20})")


class ZooKeeperOffsetStore:
    """See the module's docstring.

    Args:
        address: ``zk://[NAME:PASSWORD@]HOST[:PORT][,HOST[:PORT]...][/PATH]``. With name and password, no other client
            reads or changes the nodes.
        root: the node below PATH that has the groups. Not one that MetaQ's consumers use: their offsets count bytes.

    Thread safety: any thread; several consumers may share one.
    """

    is_shared = True

    def __init__(self, address: str, *, root: str = "/txmq", open_session: Callable[[], Session] | None = None) -> None:
        self._ensemble = parse_ensemble(address, "address")
        if not isinstance(root, str) or _ROOT.fullmatch(root) is None:
            raise ConfigError(f"root = {root!r}: expected a path such as /txmq")
        self._groups = f"{self._ensemble.chroot}{root}/consumers"
        self._open_session = open_session or self._connect
        self._session: Session | None = None
        self._lock = Lock()

    def install(self) -> None:
        """Make the nodes above the groups if they are missing. Idempotent.

        Raises:
            StorageError: the ensemble cannot be reached, or refuses.
        """

        def make(session: Session) -> None:
            for path in _with_parents(self._groups):
                with suppress(NodeExistsError):
                    session.create(path, b"")

        self._ask(make)

    # --- for the consumer --------------------------------------------------------------------------------------------

    def enter(self, group: str) -> None:
        """Check that the nodes above the groups are there.

        Raises:
            OffsetStoreAwayError: the ensemble does not answer.
            StorageError: they are not.
        """
        self._ask(self._require_groups)

    def load(self, group: str, slot: TopicPartition, generation: int) -> StoredOffset | None:
        """See ``OffsetStore``."""
        return self._ask(lambda session: self._load(session, group, slot, generation))

    def _load(self, session: Session, group: str, slot: TopicPartition, generation: int) -> StoredOffset | None:
        path = self._node(group, slot)
        while True:
            session.sync(self._groups)
            try:
                known = [_generation(path, name) for name in session.children(path)]
                if max(known, default=0) > generation:
                    raise FencedError(
                        f"{path} knows generation {max(known)}, not {generation}: another owner is newer. "
                        "If the broker's clock went back: delete that node"
                    )
                if generation not in known:
                    self._fence(session, path, known, generation)
                return _stored(path, session.get(path).value)  # of this session: not older than the fence
            except NoNodeError:
                self._require_groups(session)
                self._make(session, path)
            except NodeExistsError:
                continue  # the same generation came from elsewhere

    def _fence(self, session: Session, path: str, known: Sequence[int], generation: int) -> None:
        if not known and session.get(path).value:
            raise StorageError(f"{path} has a value that txmq did not write (MetaQ's?): choose another root")
        changes: list[Operation] = [Delete(f"{path}/{former}", ANY_VERSION) for former in known]
        session.transact([*changes, Create(f"{path}/{generation}", b"")])

    def _make(self, session: Session, path: str) -> None:
        for above in _with_parents(path):
            if above.startswith(f"{self._groups}/"):
                with suppress(NodeExistsError):
                    session.create(above, b"")

    def save(self, group: str, positions: Sequence[OffsetPosition]) -> Collection[TopicPartition]:
        """See ``OffsetStore``. One transaction for up to 200 partitions."""

        def saved(session: Session) -> list[TopicPartition]:
            refused: list[TopicPartition] = []
            for start in range(0, len(positions), _TOGETHER_MAX):
                some = positions[start : start + _TOGETHER_MAX]
                try:
                    session.transact([step for position in some for step in self._steps(group, position)])
                except (NoNodeError, RequestTooLargeError):
                    refused += [one.slot for one in some if not self._is_saved(session, group, one)]
            return refused

        return self._ask(saved)

    def _is_saved(self, session: Session, group: str, position: OffsetPosition) -> bool:
        try:
            session.transact(self._steps(group, position))
        except NoNodeError:
            self._require_groups(session)
            return False
        return True

    def _steps(self, group: str, position: OffsetPosition) -> list[Operation]:
        path = self._node(group, position.slot)
        lines = [f"{position.generation}-{position.offset}"]
        if position.deferred is not None:
            lines.insert(0, position.deferred)
        if position.log is not None or len(lines) > 1:
            lines.insert(0, position.log or "")
        value = "\n".join(lines).encode()
        return [Check(f"{path}/{position.generation}", ANY_VERSION), SetValue(path, value, ANY_VERSION)]

    def leave(self, group: str) -> None:
        """End the session; it is opened again if another consumer uses this store."""
        with self._lock:
            session, self._session = self._session, None
            if session is not None:
                session.close()

    # --- nodes -------------------------------------------------------------------------------------------------------

    def _node(self, group: str, slot: TopicPartition) -> str:
        return f"{self._groups}/{group}/offsets/{slot[0]}/0-{slot[1]}"

    def _require_groups(self, session: Session) -> None:
        session.sync(self._groups)
        if session.exists(self._groups) is None:
            raise StorageError(f"{self._groups} is not in ZooKeeper: correct the address, or call install() once")

    def _ask(self, ask: Callable[[Session], _T]) -> _T:
        """Call with the store's session, which connects again by itself."""
        with self._lock:
            try:
                if self._session is None:
                    self._session = self._open_session()
                return ask(self._session)
            except (FencedError, StorageError):
                raise
            except RegistryAwayError as error:
                raise OffsetStoreAwayError(f"offset store at {self._ensemble.hosts}: {error}") from error
            except TxmqError as error:
                raise StorageError(f"offset store at {self._ensemble.hosts}: {error}") from error

    def _connect(self) -> Session:
        from txmq.registry.zookeeper.kazoo_session import KazooSession

        return KazooSession(
            self._ensemble.hosts, session_timeout_ms=_SESSION_TIMEOUT_MS, call_timeout_ms=_CALL_TIMEOUT_MS,
            credentials=self._ensemble.credentials, tls=self._ensemble.tls,
        )  # fmt: skip


def _with_parents(path: str) -> Iterator[str]:
    parts = path.split("/")[1:]
    return ("/" + "/".join(parts[:count]) for count in range(1, len(parts) + 1))


def _generation(path: str, name: str) -> int:
    if not (name.isascii() and name.isdigit() and len(name) <= 20):
        raise StorageError(f"{path}/{name} was not made by txmq: delete it, or choose another root")
    return int(name)


def _stored(path: str, value: bytes) -> StoredOffset | None:
    if not value:
        return None
    texts, _, last = value.decode("utf-8", "replace").rpartition("\n")
    log, line, deferred = texts.partition("\n")
    found = _VALUE.fullmatch(last)
    if found is None:
        raise StorageError(f"{path} has a value that txmq did not write: restore it")
    return StoredOffset(int(found[1]), deferred if line else None, log or None)
