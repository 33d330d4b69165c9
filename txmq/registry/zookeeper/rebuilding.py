"""A registry in ZooKeeper is made, or brought up to date, from what the journals of its homes know.

Theory of operation. No broker leads a home meanwhile. Every node is set to what is newer, the ensemble's or the
journals'; so it may be done again, and goes on where it ended. The cluster's node is made last in an empty ensemble:
brokers wait for it. The map's version rises above all that were heard of, so that every home takes the map over.

A home's state names its newest incarnation, so that a copy of its directory from before is refused; and stands under
the home's number as its name, until its broker brings its own.
"""

from __future__ import annotations

from functools import partial

from txmq.errors import HomeInUseError, HomeSupersededError
from txmq.registry.access import has_users
from txmq.registry.cluster_metadata import NOTHING_BROUGHT, Standing
from txmq.registry.rebuild_from_journals import Facts, Rebuilt, merged_topics
from txmq.registry.zookeeper import layout
from txmq.registry.zookeeper.access import AccessNodes, by_size
from txmq.registry.zookeeper.layout import AccessHead, HomeState, MapHead
from txmq.registry.zookeeper.retiring import RetiredNodes
from txmq.registry.zookeeper.session import ANY_VERSION, Create, NodeExistsError, Operation, SetValue


class Rebuilding(RetiredNodes, AccessNodes):
    """See the module's docstring."""

    def rebuild(self, made: Rebuilt) -> None:
        """Make the registry what ``made`` says, where it says something newer. May be repeated.

        Raises:
            ForeignClusterError: another cluster is there.
            HomeInUseError: a home is led: its broker must be stopped.
            HomeSupersededError: a home was led since its facts were made.
            RegistryError: topics contradict what is there; or users, where everybody could write them.
        """
        if has_users(made.access.records):
            self._require_closed_nodes()
        self._attempts.run(lambda: self._found_nodes(made))
        for facts in made.homes.values():
            self._attempts.run(partial(self._put_home, facts))
        self._attempts.run(lambda: self._put_topics(made))
        for (kind, name), home in made.anchors.items():
            self.anchor(kind, name, home)
        for home, reason in made.retired.items():
            self._attempts.run(partial(self._put_retired, home, reason))
        self._attempts.run(lambda: self._put_access(made))
        self._attempts.run(lambda: self._put_cluster(made))

    def _found_nodes(self, made: Rebuilt) -> None:
        found = self._find(self._paths.cluster)
        if found is not None:
            self._join(made.cluster, Standing.MEMBER, NOTHING_BROUGHT)
        for path, value in self._paths.fixed():
            try:
                self._session.create(path, value, is_public=path == self._paths.homes)
            except NodeExistsError:
                continue
        for home in self._homes():
            if home.address is not None:
                raise HomeInUseError(
                    f"home {home.home:016x} is led at {home.address}: stop all brokers first; of one that has died, "
                    "the ZooKeeper session is about to expire"
                )
        raised = [
            *self._raised(self._paths.last_id, made.last_topic_id),
            *self._raised(self._query_epochs(), made.last_query_epoch),
        ]
        if raised:
            self._session.transact(raised)

    def _put_home(self, facts: Facts) -> None:
        path = self._paths.state(facts.home)
        found = self._find(path)
        if found is None:
            state = HomeState(facts.epoch, facts.incarnations[-1], f"{facts.home:016x}")
            name = Create(self._paths.name(state.name), layout.encode_home(facts.home))
            self._session.transact([*self._draw_epoch(facts.home, None, state), name])
            return
        known = layout.decode_state(path, found.value)
        if known.retired:
            return
        if known.incarnation not in facts.incarnations:
            raise HomeSupersededError(
                f"home {facts.home:016x} has epoch {known.epoch}, drawn by a process that its facts do not know: make "
                "them anew of the directory that was led last"
            )
        state = known._replace(epoch=max(known.epoch, facts.epoch), incarnation=facts.incarnations[-1])
        self._session.transact([SetValue(path, layout.encode_state(state), found.stat.version)])

    def _put_topics(self, made: Rebuilt) -> None:
        value, stat = self._session.get(self._paths.topics)
        there = self._read_all(self._paths.topics, layout.decode_topic)
        deleted = {one.topic_id for one in self._read_all(self._paths.deleted, layout.decode_deleted)}
        known = {placed.topic.topic_id: placed for placed in there}
        for placed in merged_topics([*there, *(one for one in made.topics if one.topic.topic_id not in deleted)]):
            path = self._paths.topic(placed.topic.config.name)
            if placed.topic.topic_id not in known:
                self._session.create(path, layout.encode_topic(placed))
            elif placed != known[placed.topic.topic_id]:
                self._session.set_value(path, layout.encode_topic(placed), ANY_VERSION)
        version = max(layout.decode_map(self._paths.topics, value).version, made.version) + 1
        self._session.set_value(self._paths.topics, layout.encode_map(MapHead(version, ())), stat.version)

    def _put_retired(self, home: int, reason: str) -> None:
        """As the journals have it; of a home that had no state there is nothing but that."""
        path = self._paths.state(home)
        found = self._find(path)
        if found is None:
            state = HomeState(1, 0, f"{home:016x}", reason)
            self._session.transact(self._draw_epoch(home, None, state))
        elif not layout.decode_state(path, found.value).retired:
            self.retire_home(home, reason)

    def _put_access(self, made: Rebuilt) -> None:
        head, node_version = self._head()
        if node_version is not None and head.publisher is None and head.version >= made.access.version:
            return
        if head.publisher is None:
            publisher = min(made.homes)  # nobody reads what is not whole
            self._session.transact([self._head_set(head._replace(publisher=publisher), node_version)])
            head, node_version = self._head()
        for key in self._session.children(self._paths.access):
            if key not in made.access.records:
                self._session.delete(self._paths.access_record(key), ANY_VERSION)
        for some in by_size(self._set_records(made.access.records)):
            self._session.transact(some)
        version = max(head.version, made.access.version)
        self._session.transact([self._head_set(AccessHead(version, None, ()), node_version)])

    def _put_cluster(self, made: Rebuilt) -> None:
        path = self._paths.cluster
        value = layout.encode_cluster(made.cluster, has_users=has_users(self._session.children(self._paths.access)))
        found = self._find(path)
        operation: Operation = Create(path, value) if found is None else SetValue(path, value, found.stat.version)
        self._session.transact([operation])
