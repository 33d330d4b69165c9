"""The nodes of the registry in ZooKeeper: paths, and values as JSON.

```
<chroot>/txmq/cluster                  {"format": 1 or 2, "cluster": <16 hex>}   made last: the others are there
<chroot>/txmq/homes/<home>/state       {"epoch": n, "start": <32 hex>, "name": ...}   changed by compare-and-set;
                                       "retired": <why> if the home is given up as lost
<chroot>/txmq/homes/<home>/replicas/1  {"address": ..., "start": <32 hex>, "lock": ..., "format": 2}   ephemeral:
                                       the leader, and the newest format that it knows; 1 if there is none
<chroot>/txmq/homes/<home>/replicas/<32 hex>  {"address": ...}   ephemeral: a replica, by its incarnation
<chroot>/txmq/brokers/ids/<name>       <home>   which home has the name
<chroot>/txmq/ids/topics               n   the highest id that was drawn
<chroot>/txmq/ids/queries              n   the highest epoch of a query's driver that was drawn
<chroot>/txmq/topics                   {"version": n, "newest": [[n, <topic>], ...]}   of the map; set with each topic
<chroot>/txmq/topics/<name>            {"version": n, "homes": [<home>, ...], "topic_id": n, ...}
<chroot>/txmq/deleted/<id>             {"name": ..., "homes": [<home>, ...]}   homes that have not dropped it
<chroot>/txmq/anchors/<kind>.<name>    <home>
<chroot>/txmq/access                   {"version": n, "publisher": <home> or null, "newest": [[n, <home>, [key]], ...]}
<chroot>/txmq/access/user.<name>       {"keys": [...] or null, "certificate": ..., "grants": [...], "made": n}
<chroot>/txmq/access/quota.<kind>.<name>   {"<limit>": n, ...}
<chroot>/txmq/access/secret            {...}   what brokers of the cluster know, and nobody else
```

A home is 16 hexadecimal digits. The nodes below ``replicas`` alone are ephemeral, and a process has one: the end of
a session is one transaction over its nodes, and a server does not start after one that is larger than it reads
(ZOOKEEPER-4306). With credentials all nodes are closed to others, but those that say where homes are led: a
client finds its brokers there, and cannot write users.

Format 2 is raised to with the first user, and differs in nothing else: a txmq that knows no users reads it when it
starts, and does not join. One that leads a home by then says so by its leader's node.
"""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

from txmq.errors import RegistryError
from txmq.registry.cluster_metadata import DeletedTopic, PlacedTopic, Record, parse_home

FORMAT: Final = 1
FORMAT_WITH_USERS: Final = 2
LEADER: Final = "1"


class Paths:
    """Where the nodes are, below a chroot (``""`` or ``/prod``)."""

    def __init__(self, chroot: str) -> None:
        self.root = f"{chroot}/txmq"
        self.cluster = f"{self.root}/cluster"
        self.homes = f"{self.root}/homes"
        self.names = f"{self.root}/brokers/ids"
        self.last_id = f"{self.root}/ids/topics"
        self.last_query_epoch = f"{self.root}/ids/queries"
        self.topics = f"{self.root}/topics"
        self.deleted = f"{self.root}/deleted"
        self.anchors = f"{self.root}/anchors"
        self.access = f"{self.root}/access"

    def fixed(self) -> list[tuple[str, bytes]]:
        """The nodes that are always there, with their first values, parents first."""
        parts = self.root.split("/")[1:]
        above = ["/" + "/".join(parts[:count]) for count in range(1, len(parts) + 1)]
        empty = [*above, self.homes, f"{self.root}/brokers", self.names, f"{self.root}/ids", self.deleted, self.anchors]
        counters = [(path, b"0") for path in (self.last_id, self.last_query_epoch)]
        return [*((path, b"") for path in empty), *counters, (self.topics, encode_map(MapHead(0, ())))]

    def home(self, home: int) -> str:
        """A home's node."""
        return f"{self.homes}/{home:016x}"

    def state(self, home: int) -> str:
        """A home's epoch, and who drew it."""
        return f"{self.home(home)}/state"

    def replicas(self, home: int) -> str:
        """A home's data directories that are there now."""
        return f"{self.home(home)}/replicas"

    def leader(self, home: int) -> str:
        """The data directory that leads."""
        return f"{self.replicas(home)}/{LEADER}"

    def replica(self, home: int, incarnation: int) -> str:
        """A copy of it."""
        return f"{self.replicas(home)}/{incarnation:032x}"

    def name(self, name: str) -> str:
        """A broker's name."""
        return f"{self.names}/{name}"

    def topic(self, name: str) -> str:
        """A topic."""
        return f"{self.topics}/{name}"

    def deleted_topic(self, topic_id: int) -> str:
        """A topic that was deleted."""
        return f"{self.deleted}/{topic_id}"

    def anchor(self, kind: str, name: str) -> str:
        """The home of a group or query."""
        return f"{self.anchors}/{kind}.{name}"

    def access_record(self, key: str) -> str:
        """A user, a quota, the secrets."""
        return f"{self.access}/{key}"


class MapHead(NamedTuple):
    """The version of the map of topics, and its newest changes: version and the topic's name, oldest first.

    A change that touches no topic has an empty name.
    """

    version: int
    newest: tuple[tuple[int, str], ...]


class AccessChange(NamedTuple):
    """One change of users, grants or quotas: the version that it made, the home that made it, what it touched."""

    version: int
    home: int
    keys: tuple[str, ...]


class AccessHead(NamedTuple):
    """The version of users, grants and quotas, and its newest changes, oldest first.

    ``publisher``: the home that brings users, and has yet to publish them; None: what is there is all.
    """

    version: int
    publisher: int | None
    newest: tuple[AccessChange, ...]


class HomeState(NamedTuple):
    """A home as it was led last.

    Attributes:
        epoch: the newest.
        start: of the process that drew it.
        name: the broker's.
        retired: why the home is retired; empty if it is not.
    """

    epoch: int
    start: int
    name: str
    retired: str = ""


class Leader(NamedTuple):
    """The process that leads a home; ``format``: the newest that it knows."""

    address: str
    start: int
    lock: str
    format: int = FORMAT_WITH_USERS


def encode_cluster(cluster: int, *, has_users: bool = False) -> bytes:
    """The cluster's node."""
    return _encode({"format": FORMAT_WITH_USERS if has_users else FORMAT, "cluster": f"{cluster:016x}"})


def decode_cluster(path: str, value: bytes) -> int:
    """The reverse.

    Raises:
        RegistryError: a newer version wrote it, or it cannot be read.
    """
    fields = _fields(path, value)
    known = fields.get("format")
    if known not in (FORMAT, FORMAT_WITH_USERS):
        raise RegistryError(f"{path} has format {known}, this txmq reads {FORMAT_WITH_USERS}: upgrade txmq")
    return _home(path, fields.get("cluster"))


def encode_state(state: HomeState) -> bytes:
    """A home's state."""
    fields = {"epoch": state.epoch, "start": f"{state.start:032x}", "name": state.name}
    return _encode({**fields, "retired": state.retired} if state.retired else fields)


def decode_state(path: str, value: bytes) -> HomeState:
    """The reverse."""
    fields = _fields(path, value)
    try:
        start, retired = int(fields["start"], 16), str(fields.get("retired", ""))
        return HomeState(int(fields["epoch"]), start, str(fields["name"]), retired)
    except (KeyError, TypeError, ValueError) as error:
        raise _unreadable(path, error) from error


def encode_leader(leader: Leader) -> bytes:
    """A leader's node."""
    fields = leader._asdict() | {"start": f"{leader.start:032x}"}
    return _encode(fields)


def decode_leader(path: str, value: bytes) -> Leader:
    """The reverse."""
    fields = _fields(path, value)
    try:
        known = int(fields.get("format", FORMAT))
        return Leader(str(fields["address"]), int(fields["start"], 16), str(fields["lock"]), known)
    except (KeyError, TypeError, ValueError) as error:
        raise _unreadable(path, error) from error


def encode_replica(address: str) -> bytes:
    """A replica's node."""
    return _encode({"address": address})


def decode_replica(path: str, value: bytes) -> str:
    """The reverse."""
    try:
        return str(_fields(path, value)["address"])
    except KeyError as error:
        raise _unreadable(path, error) from error


def encode_map(head: MapHead) -> bytes:
    """The node of the map's version."""
    return _encode({"version": head.version, "newest": [list(change) for change in head.newest]})


def decode_map(path: str, value: bytes) -> MapHead:
    """The reverse."""
    fields = _fields(path, value)
    try:
        newest = tuple((int(version), str(name)) for version, name in fields["newest"])
        return MapHead(int(fields["version"]), newest)
    except (KeyError, TypeError, ValueError) as error:
        raise _unreadable(path, error) from error


def encode_topic(placed: PlacedTopic) -> bytes:
    """A topic's node."""
    return _encode(placed.to_json())


def decode_topic(path: str, value: bytes) -> PlacedTopic:
    """The reverse."""
    try:
        return PlacedTopic.from_json(_fields(path, value))
    except (KeyError, TypeError, ValueError, AssertionError) as error:
        raise _unreadable(path, error) from error


def encode_deleted(deleted: DeletedTopic) -> bytes:
    """The node of a topic that was deleted."""
    return _encode({"name": deleted.name, "homes": [f"{home:016x}" for home in deleted.homes]})


def decode_deleted(path: str, value: bytes) -> DeletedTopic:
    """The reverse."""
    fields = _fields(path, value)
    try:
        homes = tuple(_home(path, home) for home in fields["homes"])
        return DeletedTopic(int(path.rpartition("/")[2]), str(fields["name"]), homes)
    except (KeyError, TypeError, ValueError) as error:
        raise _unreadable(path, error) from error


def encode_access(head: AccessHead) -> bytes:
    """The node of the version of users, grants and quotas."""
    newest = [[version, f"{home:016x}", list(keys)] for version, home, keys in head.newest]
    publisher = None if head.publisher is None else f"{head.publisher:016x}"
    return _encode({"version": head.version, "publisher": publisher, "newest": newest})


def decode_access(path: str, value: bytes) -> AccessHead:
    """The reverse."""
    fields = _fields(path, value)
    try:
        publisher = None if fields["publisher"] is None else _home(path, fields["publisher"])
        newest = tuple(
            AccessChange(int(version), _home(path, home), tuple(map(str, keys)))
            for version, home, keys in fields["newest"]
        )
        return AccessHead(int(fields["version"]), publisher, newest)
    except (KeyError, TypeError, ValueError) as error:
        raise _unreadable(path, error) from error


def encode_record(record: Record) -> bytes:
    """A user, a quota, the secrets."""
    return _encode(dict(record))


def decode_record(path: str, value: bytes) -> Record:
    """The reverse."""
    return _fields(path, value)


def encode_home(home: int) -> bytes:
    """A home's number."""
    return f"{home:016x}".encode()


def decode_home(path: str, value: bytes) -> int:
    """The reverse."""
    return _home(path, value.decode("ascii", "replace"))


def decode_number(path: str, value: bytes) -> int:
    """A counter."""
    if not value.isdigit() or len(value) > 20:
        raise _unreadable(path, ValueError(repr(value[:40])))
    return int(value)


def _encode(fields: dict[str, object]) -> bytes:
    return json.dumps(fields).encode()


def _fields(path: str, value: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(value)
    except ValueError as error:
        raise _unreadable(path, error) from error
    if not isinstance(fields, dict):
        raise _unreadable(path, TypeError("not an object"))
    return fields


def _home(path: str, text: object) -> int:
    try:
        return parse_home(text)
    except ValueError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str, error: Exception) -> RegistryError:
    return RegistryError(f"{path} in ZooKeeper cannot be read ({error}): restore it, or upgrade txmq")
