"""The registry's topics become the home's: differences between its map and the state are journaled and folded.

Invariants:
    * what is absent from the map deletes no messages. A topic is deleted here if the map has its tombstone with this
      home in it; or if it is absent, and no partition of it is here;
    * the registry is told that a topic is dropped when the deletion is durable;
    * a map that is older than one before, or that gives a known id or partition away, changes nothing: an operator is
      told.
"""

from __future__ import annotations

from txmq.broker.cluster.cluster_view import ClusterView
from txmq.broker.cluster.registry_asks import DropTopic, Result
from txmq.broker.context import Context
from txmq.broker.verbs.get import refuse_polls
from txmq.log.partition import Partition
from txmq.redo import entries
from txmq.registry.cluster_metadata import PlacedTopic, TopicMap


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


def delete_topic(context: Context, topic_id: int) -> list[Partition]:
    """Journal and fold the end of a topic; its partitions here."""
    context.group_with_room().add_entry(entries.encode_topic_deleted(topic_id))
    removed = context.state.delete_topic(topic_id)
    for partition in removed:
        context.group.open_runs.pop(partition, None)
    context.group.deleted.extend(removed)
    return removed


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
