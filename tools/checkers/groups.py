"""Whether a consumer group kept its promises: a second set of rules over the lines of a test run.

Theory of operation. Members of a group write what they were told (``view``), what they asked to be saved (``save``)
and what they dealt with (``handle``); the driver writes faults, how long it took until every partition had an owner,
and what was saved in the end. ``parse_group_history`` folds these lines, and the acknowledged sends of the producers,
into a ``GroupHistory``; ``check_group`` asks every rule. The rules know nothing of txmq's code:

    G1  unhandled       an offset was saved that passes an unprocessed message; or such a message at the end
    G1  handled-again   exactly-once only: a message was dealt with more than once
    G2  offset-fell     a saved offset went back, or a new owner was told less than was saved
    G3  fenced-save     a save was accepted of a generation although a newer one was known to be handed out
    G4  two-owners      one partition, one generation, two members
    G5  unowned         a partition had no owner for too long after the last change
    G5  lag-left        at the end, with every member at rest, the saved offset is not the partition's end
    G6  stopped         a partition that did not move, whose owner and broker were up, was not served for too long

Lines, besides those of ``history`` (of which ``send`` and ``nemesis`` are read here, too):

    f       ty      v
    view    ok      [topic, partition, generation, offset | null]: member ``p`` is to consume this; the first time only
    save    invoke  [topic, partition, generation, offset]            ok: [topic, partition] that were refused
    handle  ok      [topic, partition, generation, offset]: before it is acknowledged
    owned   ok      [seconds, bound] from the last change until each partition was a live member's
    lag     ok      [topic, partition, start, saved | null, end]
    nemesis invoke  ``who`` names the member that cannot work until ``ok``; without it, no member can

Rules of the writer: a save without its second line was accepted or not; ``handle`` is written before the message is
acknowledged. G1 to G5 are those of reference "History checker", a.4; G6 makes "partitions that did not move never
stopped" a measure: from a message's acknowledgement, or from the delivery before it, to its delivery.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tools.checkers.history import FINDINGS_PER_RULE_MAX, Verdict
from tools.checkers.index import Finding, at
from txmq.model import TopicPartition

Tenure = tuple[TopicPartition, int]  # a partition under one generation
GROUP_LINES = frozenset({"view", "save", "handle", "owned", "lag"})


class View(NamedTuple):
    """A member learnt that it has a partition."""

    learned_ns: int
    member: str
    slot: TopicPartition
    generation: int
    offset: int | None


@dataclass(slots=True)
class Save:
    """One partition of a request to save offsets. ``status``: ok, refused, or info if no answer came."""

    member: str
    slot: TopicPartition
    generation: int
    offset: int
    invoked_ns: int
    status: str = "info"
    completed_ns: int | None = None


class Handled(NamedTuple):
    """A message was dealt with."""

    handled_ns: int
    member: str
    slot: TopicPartition
    generation: int
    offset: int


@dataclass(slots=True)
class Outage:
    """A member (None: every member) could not work."""

    begun_ns: int
    who: str | None
    ended_ns: int | None = None


class Owned(NamedTuple):
    """How long it took until each partition had a live owner, and how long it may take."""

    name: str
    seconds: float
    bound: float


class Lag(NamedTuple):
    """A partition at the end."""

    slot: TopicPartition
    start: int
    saved: int | None
    end: int


@dataclass(slots=True)
class GroupHistory:
    """A run of one group. ``lag`` is None if the run did not get that far."""

    views: list[View] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    handled: list[Handled] = field(default_factory=list)
    outages: list[Outage] = field(default_factory=list)
    owned: list[Owned] = field(default_factory=list)
    acknowledged_ns: dict[tuple[TopicPartition, int], int] = field(default_factory=dict)
    lag: list[Lag] | None = None


@dataclass(frozen=True, slots=True)
class GroupRules:
    """What is promised.

    Attributes:
        exactly_once: each message is dealt with once: its offset is saved together with its effect.
        stopped_s_max: so long may a message wait in a partition that stays with its owner.
        stays: so often a tenure must have lived through a fault of another member, for the run to prove anything.
        refused: so many saves must have been refused.
    """

    exactly_once: bool = False
    stopped_s_max: float = 3.0
    stays: int = 0
    refused: int = 0


def parse_group_history(events: Iterable[dict[str, Any]]) -> GroupHistory:
    """Fold events, in the order of their times; those of other kinds are left out.

    Raises:
        KeyError: an end without its beginning: the test is wrong, not what it tests.
    """
    history = GroupHistory()
    open_saves: dict[str, list[Save]] = {}
    open_outages: dict[str, Outage] = {}
    for event in events:
        what, kind, time, values = event["f"], event["ty"], event["t"], event["v"]
        if what == "view":
            history.views += [View(time, event["p"], (t, p), generation, at) for t, p, generation, at in values]
        elif what == "handle":
            history.handled += [Handled(time, event["p"], (t, p), generation, at) for t, p, generation, at in values]
        elif what == "save" and kind == "invoke":
            open_saves[event["id"]] = [Save(event["p"], (t, p), gen, at, time) for t, p, gen, at in values]
            history.saves += open_saves[event["id"]]
        elif what == "save":
            _saved(open_saves[event["id"]], kind, time, {(topic, partition) for topic, partition in values})
        elif what == "nemesis" and kind == "invoke":
            open_outages[event["id"]] = Outage(time, event.get("who"))
            history.outages.append(open_outages[event["id"]])
        elif what == "nemesis":
            open_outages[event["id"]].ended_ns = time
        elif what == "owned":
            history.owned.append(Owned(event["id"], *values))
        elif what == "lag":
            history.lag = [Lag((topic, partition), *rest) for topic, partition, *rest in values]
        elif what == "send" and kind == "ok":
            for _, topic, _key, _value, partition, offset in values:
                history.acknowledged_ns[(topic, partition), offset] = time
    return history


def _saved(saves: list[Save], kind: str, time: int, refused: set[TopicPartition]) -> None:
    if kind == "ok":
        for save in saves:
            save.status, save.completed_ns = "refused" if save.slot in refused else "ok", time


def check_group(history: GroupHistory, rules: GroupRules = GroupRules()) -> Verdict:
    """Ask every rule.

    Returns:
        The verdict; at most ``FINDINGS_PER_RULE_MAX`` findings of each rule.
    """
    counts = _count(history)
    missing = tuple(
        f"{getattr(rules, name)} counted {name!r}, not {counts[name]}"
        for name in ("stays", "refused")
        if counts[name] < getattr(rules, name)
    )
    if history.lag is None:
        return Verdict("unknown", (), (*missing, "the final read 'lag'"), counts)
    findings: list[Finding] = []
    for rule in _RULES:
        findings += (found for found, _ in zip(rule(history, rules), range(FINDINGS_PER_RULE_MAX), strict=False))
    result = "invalid" if findings else "unknown" if missing else "valid"
    return Verdict(result, tuple(findings), missing, counts)


def _count(history: GroupHistory) -> dict[str, int]:
    begun = sorted(outage.begun_ns for outage in history.outages)
    tenures = _tenures(history)
    return {
        "handled": len(history.handled),
        "saved": sum(save.status == "ok" for save in history.saves),
        "refused": sum(save.status == "refused" for save in history.saves),
        "tenures": len(tenures),
        "waited_ms_max": int(1000 * max((waited_s for _, _, waited_s in _waits(history)), default=0.0)),
        "stays": sum(
            bisect_left(begun, held[-1].handled_ns) - bisect_left(begun, held[0].handled_ns)
            for held in tenures.values()
        ),
    }


def _tenures(history: GroupHistory) -> dict[Tenure, list[Handled]]:
    tenures: dict[Tenure, list[Handled]] = defaultdict(list)
    for handled in sorted(history.handled):
        tenures[handled.slot, handled.generation].append(handled)
    return tenures


# --- the rules -----------------------------------------------------------------------------------------------------


def _unhandled(history: GroupHistory, rules: GroupRules) -> Iterator[Finding]:
    """G1, while it ran and at the end."""
    by_slot: dict[TopicPartition, list[Handled]] = defaultdict(list)
    for handled in sorted(history.handled):
        by_slot[handled.slot].append(handled)
    saves: dict[TopicPartition, list[Save]] = defaultdict(list)
    for save in sorted(history.saves, key=lambda save: save.invoked_ns):
        saves[save.slot].append(save)
    for held in history.lag or ():
        yield from _saved_too_far(held.start, saves[held.slot], by_slot[held.slot])
        every = {handled.offset for handled in by_slot[held.slot]}
        for offset in range(held.start, held.end):
            if offset not in every:
                yield Finding("G1", "unhandled", f"{at(held.slot, offset)} was dealt with by nobody")
    if rules.exactly_once:
        yield from _handled_again(by_slot)


def _saved_too_far(start: int, saves: Iterable[Save], handled: list[Handled]) -> Iterator[Finding]:
    """Hold each save of a partition to where the messages dealt with ended, without a gap, when it was asked for."""
    done, frontier, position = set[int](), start, 0
    for save in saves:
        while position < len(handled) and handled[position].handled_ns <= save.invoked_ns:
            done.add(handled[position].offset)
            position += 1
        frontier = _frontier(done, frontier)
        if save.offset > frontier and save.status != "refused":
            text = f"{save.member} saved {at(save.slot, save.offset)}, and {frontier} was not dealt with"
            yield Finding("G1", "unhandled", text)


def _frontier(done: set[int], frontier: int) -> int:
    while frontier in done:
        done.discard(frontier)
        frontier += 1
    return frontier


def _handled_again(by_slot: dict[TopicPartition, list[Handled]]) -> Iterator[Finding]:
    for slot, handled in by_slot.items():
        first: dict[int, Handled] = {}
        for one in handled:
            other = first.setdefault(one.offset, one)
            if other is not one:
                text = f"{at(slot, one.offset)} by {other.member} and by {one.member}"
                yield Finding("G1", "handled-again", text)


def _fell(history: GroupHistory, _rules: GroupRules) -> Iterator[Finding]:
    """G2. Generations in their order; within one, its owner's requests in their order."""
    saved: dict[TopicPartition, list[tuple[int, int, int]]] = defaultdict(list)  # generation, time, offset
    for save in history.saves:
        if save.status == "ok":
            saved[save.slot].append((save.generation, save.invoked_ns, save.offset))
    for slot, saves in saved.items():
        greatest = 0
        for generation, _, offset in sorted(saves):
            if offset < greatest:
                text = f"{at(slot, offset)} under generation {generation}, behind {greatest}"
                yield Finding("G2", "offset-fell", text)
            greatest = max(greatest, offset)
    for view in history.views:
        before = [offset for generation, _, offset in saved[view.slot] if generation < view.generation]
        if before and (view.offset or 0) < max(before):
            text = f"{view.member} was told {at(view.slot, view.offset or 0)}, and {max(before)} was saved before"
            yield Finding("G2", "offset-fell", text)


def _fenced(history: GroupHistory, _rules: GroupRules) -> Iterator[Finding]:
    """G3. A member knows a generation that it received, or under which it saved."""
    known: dict[TopicPartition, list[tuple[int, int]]] = defaultdict(list)  # time, generation
    for view in history.views:
        known[view.slot].append((view.learned_ns, view.generation))
    for save in history.saves:
        if save.status == "ok" and save.completed_ns is not None:
            known[save.slot].append((save.completed_ns, save.generation))
    newest = {slot: _running_greatest(sorted(times)) for slot, times in known.items()}
    for save in history.saves:
        times = newest.get(save.slot)
        if save.status != "ok" or times is None:
            continue
        before = bisect_left(times, (save.invoked_ns, -1))
        if before and times[before - 1][1] > save.generation:
            text = f"{save.member} saved {at(save.slot, save.offset)} under {save.generation}"
            yield Finding("G3", "fenced-save", f"{text}, and {times[before - 1][1]} was known")


def _running_greatest(times: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found, greatest = [], 0
    for time, generation in times:
        greatest = max(greatest, generation)
        found.append((time, greatest))
    return found


def _two_owners(history: GroupHistory, _rules: GroupRules) -> Iterator[Finding]:
    owners: dict[Tenure, str] = {}
    owned = [(view.slot, view.generation, view.member) for view in history.views]
    owned += [(save.slot, save.generation, save.member) for save in history.saves if save.status == "ok"]
    owned += [(one.slot, one.generation, one.member) for one in history.handled]
    for slot, generation, member in owned:
        other = owners.setdefault((slot, generation), member)
        if other != member:
            text = f"{slot[0]}/{slot[1]} under {generation} is {other}'s and {member}'s"
            yield Finding("G4", "two-owners", text)


def _unowned(history: GroupHistory, _rules: GroupRules) -> Iterator[Finding]:
    for owned in history.owned:
        if owned.seconds > owned.bound:
            text = f"{owned.name}: {owned.seconds:.2f} s until each had an owner, at most {owned.bound} s"
            yield Finding("G5", "unowned", text)
    for held in history.lag or ():
        if held.end > held.start and held.saved != held.end:
            yield Finding("G5", "lag-left", f"{held.slot[0]}/{held.slot[1]}: {held.saved} saved, {held.end} the end")


def _stopped(history: GroupHistory, rules: GroupRules) -> Iterator[Finding]:
    for handled, generation, waited_s in _waits(history):
        if waited_s > rules.stopped_s_max:
            text = f"{at(handled.slot, handled.offset)} waited {waited_s:.2f} s at {handled.member} under {generation}"
            yield Finding("G6", "stopped", text)


def _waits(history: GroupHistory) -> Iterator[tuple[Handled, int, float]]:
    """Messages of partitions that stay with an owner that works, and how long each waited there."""
    for (slot, generation), tenure in _tenures(history).items():
        before = tenure[0]
        for handled in tenure[1:]:
            acknowledged_ns = history.acknowledged_ns.get((slot, handled.offset))
            since, before = max(acknowledged_ns or 0, before.handled_ns), handled
            # Otherwise the time since when it waited is unknown.
            if acknowledged_ns is not None and not _is_excused(history, handled, since):
                yield handled, generation, (handled.handled_ns - since) / 1e9


def _is_excused(history: GroupHistory, handled: Handled, since: int) -> bool:
    return any(
        outage.who in (None, handled.member)
        and outage.begun_ns <= handled.handled_ns
        and (outage.ended_ns is None or outage.ended_ns >= since)
        for outage in history.outages
    )


_RULES: tuple[Callable[[GroupHistory, GroupRules], Iterator[Finding]], ...] = (
    _unhandled, _fell, _fenced, _two_owners, _unowned, _stopped,
)  # fmt: skip
