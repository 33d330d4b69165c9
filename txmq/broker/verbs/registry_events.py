"""What the registry tells the broker: that it leads its home, that topics or homes changed, the answer to an ask.

The registry's topics become the home's: differences between its map and the state are journaled and folded.

Invariants:
    * what is absent from the map deletes no messages. A topic is deleted here if the map has its tombstone with this
      home in it; or if it is absent, and no partition of it is here;
    * the registry is told that a topic is dropped when the deletion is durable;
    * a map that is older than one before, or that gives a known id or partition away, changes nothing: an operator is
      told.
"""

from __future__ import annotations

from collections.abc import Sequence

from txmq.broker.cluster.cluster_view import ClusterView, RegistryState
from txmq.broker.cluster.registry_asks import DropTopic, Result
from txmq.broker.context import Context
from txmq.broker.verbs import branch_resolving
from txmq.broker.verbs.access import access_changes
from txmq.broker.verbs.get import refuse_polls
from txmq.broker.verbs.topic import delete_topic
from txmq.errors import TxmqError
from txmq.log.partition import Partition
from txmq.redo import entries
from txmq.registry.cluster_metadata import Access, HomeEntry, PlacedTopic, TopicMap


def led(context: Context) -> None:
    """The registry gave the home an epoch, which is journaled (``Recovered.lead``)."""
    context.state.order.queue_together()
    view = context.joined_cluster()
    view.state, view.since_ms = RegistryState.CONNECTED, context.now_ms
    view.map_version = max((placed.version for placed in context.state.placed.values()), default=0)


def access_changed(context: Context, access: Access | None, *, is_anew: bool = False) -> None:
    """Users, grants or quotas changed, or may have; before this home serves anybody, all are compared (``is_anew``)."""
    if access is not None:
        access_changes.take_over(context, context.joined_cluster(), access, is_anew=is_anew)


def changed(context: Context, topic_map: TopicMap, homes: Sequence[HomeEntry]) -> None:
    """Topics or homes changed, or may have."""
    view = context.joined_cluster()
    for home in view.set_homes(homes):
        branch_resolving.led_anew(context, home)
    _note_retired(context, homes)
    take_over(context, view, topic_map)


def _note_retired(context: Context, homes: Sequence[HomeEntry]) -> None:
    """An operator has given homes up: that is journaled here, and groups anchored there choose anew."""
    retired = context.state.registration.retired
    for home in homes:
        if home.retired and home.home not in retired:
            fields = {"home": f"{home.home:016x}", "reason": home.retired}
            context.group_with_room().add_entry(entries.json_entry(entries.HOME_RETIRED, fields))
            context.group.needs_sync = True
            retired[home.home] = home.retired
            context.pending_groups.lost_anchor(home.home)


def answered(context: Context, number: int, result: Result) -> None:
    """An ask was carried out; what came with the answer is taken over first."""
    if not isinstance(result, TxmqError):
        access_changed(context, result.access)
        if result.topic_map is not None:
            changed(context, result.topic_map, result.homes)
    context.joined_cluster().answered(number, result)


def registry_state(context: Context, state: RegistryState) -> None:
    """The session with the registry is another one, or lost."""
    view = context.joined_cluster()
    if state is not view.state:
        view.state, view.since_ms = state, context.now_ms
    if state is not RegistryState.CONNECTED:
        lost, view.when_lost = list(view.when_lost.values()), {}
        for tell in lost:
            tell()


def take_over(context: Context, view: ClusterView, topic_map: TopicMap) -> None:
    """Make the state what the map says."""
    if topic_map.version < view.map_version:
        if view.older_version != topic_map.version:
            view.older_version = topic_map.version
            _alarm(
                context, f"its map has version {topic_map.version}, and had {view.map_version}: it is not taken over"
            )
        return
    removed: list[Partition] = []
    for deleted in topic_map.deleted:
        if context.state.home in deleted.homes:
            removed += _drop(context, view, deleted.topic_id)
    if topic_map.version != view.map_version or not view.is_taken_over:
        _forget_absent(context, topic_map)
        view.is_taken_over = _put_all(context, view, topic_map)
        view.map_version = topic_map.version
    for partition in removed:
        refuse_polls(context, partition)


def _forget_absent(context: Context, topic_map: TopicMap) -> None:
    """The end of a topic that no home of which is this one may have been missed; there is nothing here to lose."""
    state = context.state
    present = {placed.topic.topic_id for placed in topic_map.topics}
    for topic_id in [topic.topic_id for topic in state.topics if topic.topic_id not in present]:
        if not state.partitions_of[topic_id]:
            delete_topic(context, topic_id)


def _put_all(context: Context, view: ClusterView, topic_map: TopicMap) -> bool:
    """Create and alter what the map has, as far as that contradicts nothing here; whether all of it is."""
    refused = {}
    for placed in topic_map.topics:
        known = context.state.placed.get(placed.topic.topic_id)
        if known is not None and known.version >= placed.version:
            continue
        reason = _refusal(context, placed)
        if reason:
            refused[placed.topic.topic_id] = reason
        else:
            _put(context, placed)
    for topic_id in refused.keys() - view.refused.keys():
        _alarm(context, refused[topic_id])
    view.refused = refused
    return not refused


def _put(context: Context, placed: PlacedTopic) -> None:
    context.group_with_room().add_entry(entries.json_entry(entries.TOPIC, placed.to_json()))
    context.state.place_topic(placed)


def _drop(context: Context, view: ClusterView, topic_id: int) -> list[Partition]:
    removed: list[Partition] = []
    if topic_id in view.dropping:
        return removed
    if context.state.topics.with_id(topic_id) is not None:
        removed = delete_topic(context, topic_id)
        context.group.needs_sync = True

    if view.is_full:
        return removed  # the next map has the tombstone still

    def dropped(_result: Result) -> None:
        view.dropping.discard(topic_id)  # if it failed, the next map has the topic still, and it is asked again

    view.dropping.add(topic_id)
    view.ask(lambda number: DropTopic(number, topic_id), dropped, context.newest_undurable())
    return removed


def _refusal(context: Context, placed: PlacedTopic) -> str:
    """Why the topic is not taken over: the registry would take messages from this home. Empty if it is."""
    state, (topic_id, config) = context.state, (placed.topic.topic_id, placed.topic.config)
    named = state.topics.find(config.name)
    if named is not None and named.topic_id != topic_id:
        return f"topic {config.name!r} has id {topic_id} in the registry, and {named.topic_id} with messages here"
    known = state.topics.with_id(topic_id)
    if known is not None and known.config.name != config.name:
        return f"topic {topic_id} is {config.name!r} in the registry, and {known.config.name!r} here"
    for number in state.partitions_of.get(topic_id, ()):
        if number >= len(placed.homes) or placed.homes[number] != state.home:
            return f"partition {number} of topic {config.name!r} is here, and another home's in the registry"
    return ""


def _alarm(context: Context, text: str) -> None:
    context.alarms.append({"event": "the registry contradicts the journal", "reason": text})
