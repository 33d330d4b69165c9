"""What an operator of MetaQ looks for in ZooKeeper: nodes derived from the map, which no program of txmq reads.

```
<chroot>/txmq/brokers/ids/<name>/master           txmq://HOST:PORT
<chroot>/txmq/brokers/topics-pub/<topic>/<name>-m  {"numParts": n, "broker": "<name>-m"}   unless it accepts no messages
<chroot>/txmq/brokers/topics-sub/<topic>/<name>-m  the same   unless it is not read
```

Each leader writes its own nodes, which are ephemeral; ``n`` is the number of partitions that its home has. A topic's
node above them is removed by the leader that removes the last one, or by the next leader that announces itself.
"""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from typing import Final

from txmq.registry.port import Leadership, TopicMap
from txmq.registry.zookeeper.nodes import Nodes
from txmq.registry.zookeeper.session import (
    ANY_VERSION,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    Session,
)

CHANGES_MAX: Final = 200  # in one call: the registry's other work comes in between


class MetaqView(Nodes):
    """See the module's docstring. For one thread."""

    def __init__(self, session: Session, chroot: str = "") -> None:
        super().__init__(session, chroot)
        self._shown: dict[str, bytes] = {}
        self._shown_in = 0  # the session that they end with

    def show(self, leadership: Leadership, topics: TopicMap) -> bool:
        """See ``Registry``."""
        return self._attempts.run(lambda: self._show(leadership, topics))

    def _show(self, leadership: Leadership, topics: TopicMap) -> bool:
        if self._session.number != self._shown_in:
            self._shown, self._shown_in = {}, self._session.number
            self._remove_left_behind({placed.topic.config.name for placed in topics.topics})
        wanted = self._wanted(leadership, topics)
        gone = [path for path in self._shown if path not in wanted]
        changed = [path for path, value in wanted.items() if self._shown.get(path) != value]
        for path in [*gone, *changed][:CHANGES_MAX]:
            self._replace(path, wanted.get(path))
        return len(gone) + len(changed) <= CHANGES_MAX

    def _wanted(self, leadership: Leadership, topics: TopicMap) -> dict[str, bytes]:
        home, name, address = leadership.candidate[:3]
        wanted = {self._paths.master(name): f"txmq://{address}".encode()}
        for placed in topics.topics:
            own = Counter(placed.homes)[home]
            if not own:
                continue
            config, value = placed.topic.config, json.dumps({"numParts": own, "broker": f"{name}-m"}).encode()
            views = ((self._paths.publishing, config.accept_publish), (self._paths.subscribing, config.accept_read))
            for parent, accepts in views:
                if accepts:
                    wanted[f"{parent}/{config.name}/{name}-m"] = value
        return wanted

    def _replace(self, path: str, value: bytes | None) -> None:
        """Make a node anew, whatever former session it is of; or remove it, and the topic's node if it was the last."""
        with suppress(NoNodeError):
            self._session.delete(path, ANY_VERSION)
        self._shown.pop(path, None)
        if value is None:
            self._remove_if_empty(path.rpartition("/")[0])
            return
        try:
            self._session.create(path, value, is_ephemeral=True)
        except NoNodeError:
            self._make_parents(path)
            self._session.create(path, value, is_ephemeral=True)
        self._shown[path] = value

    def _make_parents(self, path: str) -> None:
        topic = path.rpartition("/")[0]
        for parent in (topic.rpartition("/")[0], topic):
            with suppress(NodeExistsError):
                self._session.create(parent, b"")

    def _remove_left_behind(self, names: set[str]) -> None:
        """Remove the nodes of topics whose leaders died before they were deleted."""
        for parent in (self._paths.publishing, self._paths.subscribing):
            with suppress(NoNodeError):
                for name in self._session.children(parent):
                    if name not in names:
                        self._remove_if_empty(f"{parent}/{name}")

    def _remove_if_empty(self, path: str) -> None:
        with suppress(NoNodeError, NotEmptyError):
            self._session.delete(path, ANY_VERSION)
