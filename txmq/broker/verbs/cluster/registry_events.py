"""What the registry tells the broker: that it leads its home, that topics or homes changed, the answer to an ask."""

from __future__ import annotations

from collections.abc import Sequence

from txmq.broker.cluster.cluster_view import ClusterView, RegistryState
from txmq.broker.cluster.registry_asks import Result
from txmq.broker.context import Context
from txmq.broker.verbs.access import access_changes as users
from txmq.broker.verbs.branches import resolving
from txmq.broker.verbs.cluster.topic_map import take_over
from txmq.errors import BrokerError, InvariantError, RegistryAwayError, TxmqError, UnavailableError
from txmq.redo import entries
from txmq.registry.access import Access
from txmq.registry.cluster_metadata import HomeEntry, Leadership, TopicMap


def view_of(context: Context) -> ClusterView:
    """The view of a broker with a registry."""
    if context.cluster is None:
        raise InvariantError("this broker has no registry")
    return context.cluster


def led(context: Context, leadership: Leadership) -> None:
    """The registry gave the home an epoch: journal it."""
    state, epoch, incarnation = context.state, leadership.epoch, f"{leadership.candidate.incarnation:032x}"
    if epoch <= state.epoch:
        raise InvariantError(f"the registry gave out epoch {epoch}, and the journal has {state.epoch}")
    fields = {"cluster": f"{context.identity.cluster:016x}", "epoch": epoch, "incarnation": incarnation}
    context.group.add_entry(entries.json_entry(entries.REGISTERED, fields))
    context.group.needs_sync = True
    state.registered(epoch, incarnation)
    state.order.queue_together()
    view = view_of(context)
    view.state, view.since_ms = RegistryState.CONNECTED, context.now_ms
    view.map_version = max((placed.version for placed in state.placed.values()), default=0)


def access_changed(context: Context, access: Access | None, *, is_anew: bool = False) -> None:
    """Users, grants or quotas changed, or may have; before this home serves anybody, all are compared (``is_anew``)."""
    if access is not None:
        users.take_over(context, view_of(context), access, is_anew=is_anew)


def changed(context: Context, topic_map: TopicMap, homes: Sequence[HomeEntry]) -> None:
    """Topics or homes changed, or may have."""
    view = view_of(context)
    for home in view.set_homes(homes):
        resolving.led_anew(context, home)
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
    view_of(context).answered(number, result)


def registry_state(context: Context, state: RegistryState) -> None:
    """The session with the registry is another one, or lost."""
    view = view_of(context)
    if state is not view.state:
        view.state, view.since_ms = state, context.now_ms
    if state is not RegistryState.CONNECTED:
        lost, view.when_lost = list(view.when_lost.values()), {}
        for tell in lost:
            tell()


def as_answer(error: TxmqError) -> BrokerError:
    """The registry's error, as the broker answers it."""
    if isinstance(error, BrokerError):
        return error
    if isinstance(error, RegistryAwayError):
        return UnavailableError(f"the registry does not answer: whether it was done is not known ({error})")
    return UnavailableError(str(error))
