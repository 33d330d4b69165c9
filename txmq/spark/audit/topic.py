"""An audit of a live topic: chooses the parts of log and table to read, and asks the broker meanwhile.

Theory of operation. The two sides move while they are read, and an audit must not take movement for damage:

    * the log's ends are taken first, then the table is read: a visible message has its row already (P4 of
      docs/promises.md), so every message that is read may be held to have one;
    * rows are held to have a message only when they are older than the margin (``settle_ms``). If no column says how
      old they are, the audit waits for the margin after it has read the table, reads what came meanwhile, and only then
      calls a row without message missing;
    * a window in time is read with the margin on both sides. What lies in the margin is a partner, never a finding;
    * what retention has removed cannot be audited. With a time of the rows the window begins after it; without,
      missing messages cannot be told from removed ones, and that check is not made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any

from txmq.client.client import Client
from txmq.errors import ConfigError, PartialResultError
from txmq.model import TransactionKind
from txmq.runtime.clocks import OSClock
from txmq.runtime.ports import Clock
from txmq.spark.audit.audit import AuditResult, InDoubt, Surroundings, audit
from txmq.spark.audit.findings import Ranges
from txmq.spark.audit.match import Window
from txmq.spark.audit.rows import Rows
from txmq.spark.audit.spec import AuditSpec, Kind, MessageField
from txmq.spark.datasource import TxmqDataSource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_PEEK_BYTES = 4096
_HEADER_FIELDS = (MessageField.HEADER,)
Notes = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The window that was asked for: by times in ms since 1970, or by offsets of each partition; None: all there is."""

    from_ms: int | None = None
    to_ms: int | None = None
    from_offsets: Mapping[int, int] | None = None
    to_offsets: Mapping[int, int] | None = None

    def __post_init__(self) -> None:
        if (self.from_ms is not None or self.to_ms is not None) and (self.from_offsets or self.to_offsets):
            raise ConfigError("a window is given by times or by offsets, not by both")
        if self.from_ms is not None and self.to_ms is not None and self.from_ms >= self.to_ms:
            raise ConfigError("the window ends before it begins")

    @property
    def is_by_offsets(self) -> bool:
        """Whether offsets were given."""
        return self.from_offsets is not None or self.to_offsets is not None


@dataclass(frozen=True, slots=True)
class Plan:
    """The parts that are read: offsets of each partition, rows committed in [rows_from_ms, rows_to_ms)."""

    window: Window
    ranges: Ranges
    rows_from_ms: int | None = None
    rows_to_ms: int | None = None
    unmade: Mapping[Kind, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def ignore(_text: str) -> None:
    """Report nothing."""


@dataclass(frozen=True, slots=True)
class TopicAudit:
    """One topic held against one table.

    Attributes:
        bootstrap: the broker's address as the executors reach it.
        say: told what is done, a line at a time.
    """

    spark: SparkSession
    client: Client
    bootstrap: str
    rows: Rows
    spec: AuditSpec
    say: Notes = ignore
    clock: Clock = field(default_factory=OSClock)

    def run(self, wanted: Wanted | None = None) -> AuditResult:
        """Audit a window.

        Raises:
            ConfigError: such a window cannot be audited; says why.
            UnknownTopicError: as its name says.
        """
        plan = self.plan(wanted or Wanted())
        for note in plan.notes:
            self.say(note)
        return self.audit(plan)

    def audit(self, plan: Plan) -> AuditResult:
        """Read what is planned, and compare."""
        held = sum(end - start for start, end in plan.ranges.values())
        self.say(f"reading {held:,} offsets of {self.spec.topic} and the table {self.rows.name}")
        messages = self.messages(self.spec.topic, plan.ranges)
        rows = self.rows.between(self.spec, plan.rows_from_ms, plan.rows_to_ms)
        is_all = plan.rows_from_ms is None and plan.rows_to_ms is None
        together = {topic: self._companion(topic, plan) for topic in self.spec.together}
        around = Surroundings(
            ranges=plan.ranges,
            older_rows=None if is_all else lambda ids: self.rows.with_row(self.spec, ids),
            later_messages=(lambda: self._later(plan)) if self._is_live(plan) else None,
            in_doubt=self.in_doubt,
            came_since=(lambda: self._since({self.spec.topic: plan.ranges, **together}))
            if self._is_live(plan)
            else None,
            together={topic: self.messages(topic, ranges) for topic, ranges in together.items()},
            unmade=plan.unmade,
        )
        return audit(messages, rows, self.spec, plan.window, around)

    # --- the window --------------------------------------------------------------------------------------------------

    def plan(self, wanted: Wanted) -> Plan:
        """Choose the offsets and rows of a window. Raises as ``run``."""
        if self.spec.latest and (wanted.to_ms is not None or wanted.is_by_offsets):
            raise ConfigError("with the newest messages (--latest) a window ends now: leave --to and offsets out")
        now_ms = self.clock.now_ms()
        held = self.held(self.spec.topic)
        if wanted.is_by_offsets:
            return self._plan_by_offsets(wanted, held, now_ms)
        return self._plan_by_times(wanted, held, now_ms)

    def _plan_by_times(self, wanted: Wanted, held: Ranges, now_ms: int) -> Plan:
        settle, has_time = self.spec.settle_ms, self.spec.row_time is not None
        if not has_time and (wanted.from_ms is not None or wanted.to_ms is not None):
            raise ConfigError("a window in time needs the column with the rows' times (--row-time)")
        if wanted.to_ms is not None and wanted.to_ms > now_ms - settle:
            raise ConfigError(
                f"the window must end {settle / 1000:g} s ago or earlier: what is newer may be on its way"
            )
        if not has_time:
            is_cut = any(start for start, _ in held.values())
            why = "retention has removed messages, and no column says which rows are as old"
            return Plan(Window(is_live=True), held, unmade={Kind.MISSING: why} if is_cut else {})
        from_ms, notes = self._first_ms(wanted.from_ms, held), []
        if from_ms is not None and from_ms != wanted.from_ms:
            notes.append(f"retention has removed what is older: the audit begins at {from_ms} ms")
        if wanted.to_ms is None:
            window = Window(from_ms, now_ms - settle, is_live=True)
            return Plan(window, self._from(from_ms, held), _minus(from_ms, settle), None, notes=tuple(notes))
        ends = {p: self.client.offset_for(self.spec.topic, p, wanted.to_ms + settle) for p in held}
        ranges = {p: (start, max(start, min(end, ends[p]))) for p, (start, end) in self._from(from_ms, held).items()}
        return Plan(
            Window(from_ms, wanted.to_ms), ranges, _minus(from_ms, settle), wanted.to_ms + settle, notes=tuple(notes)
        )

    def _plan_by_offsets(self, wanted: Wanted, held: Ranges, now_ms: int) -> Plan:
        ranges = {p: self._within(p, wanted, span) for p, span in held.items()}
        unknown = (set(wanted.from_offsets or ()) | set(wanted.to_offsets or ())) - set(held)
        if unknown:
            raise ConfigError(f"topic {self.spec.topic} has no partition {min(unknown)}")
        is_live = all(ranges[p][1] == held[p][1] for p in held)
        is_whole = is_live and all(start == 0 for start, _ in ranges.values())
        starts = {p: start for p, (start, _) in ranges.items()}
        if self.spec.row_time is None:
            why = "the offsets are not the whole log, and no column says which rows belong to them"
            window = Window(offsets=starts, is_live=is_live)
            return Plan(window, ranges, unmade={} if is_whole else {Kind.MISSING: why})
        first = [self._time_at(p, start) for p, (start, end) in ranges.items() if 0 < start < end]
        last = [self._time_at(p, end - 1) for p, (start, end) in ranges.items() if start < end < held[p][1]]
        from_ms = max(first) + self.spec.settle_ms if first else None
        to_ms = min([now_ms, *last]) - self.spec.settle_ms
        window = Window(from_ms, max(to_ms, from_ms or 0), offsets=starts, is_live=is_live)
        return Plan(window, ranges)

    @staticmethod
    def _within(partition: int, wanted: Wanted, held: tuple[int, int]) -> tuple[int, int]:
        start = (wanted.from_offsets or {}).get(partition, held[0])
        end = (wanted.to_offsets or {}).get(partition, held[1])
        if not held[0] <= start <= end <= held[1]:
            raise ConfigError(f"offsets {start} to {end} of partition {partition}: it holds {held[0]} to {held[1]}")
        return start, end

    def _first_ms(self, from_ms: int | None, held: Ranges) -> int | None:
        """The beginning of the window: not before what retention has left, in every partition, with the margin."""
        cut = [self._time_at(p, start) + self.spec.settle_ms for p, (start, end) in held.items() if 0 < start < end]
        emptied = [self.clock.now_ms() for start, end in held.values() if 0 < start == end]
        known = [*cut, *emptied, *([] if from_ms is None else [from_ms])]
        return max(known) if known else None

    def _from(self, from_ms: int | None, held: Ranges) -> dict[int, tuple[int, int]]:
        if from_ms is None:
            return dict(held)
        before = from_ms - self.spec.settle_ms
        starts = {p: self.client.offset_for(self.spec.topic, p, before) for p in held}
        return {p: (min(max(start, starts[p]), end), end) for p, (start, end) in held.items()}

    # --- the broker --------------------------------------------------------------------------------------------------

    def held(self, topic: str) -> dict[int, tuple[int, int]]:
        """The range of each partition now: first offset, and the one after the last."""
        return {item["partition"]: (item["start"], item["end"]) for item in self.client.topics.watermarks(topic)}

    def messages(self, topic: str, ranges: Ranges) -> DataFrame:
        """These offsets, as the source reads them."""
        self.spark.dataSource.register(TxmqDataSource)  # an editable installation is not found by its name
        reader = self.spark.read.format("txmq").option("bootstrap", self.bootstrap).option("topic", topic)
        for name, side in (("startingOffsets", 0), ("endingOffsets", 1)):
            reader = reader.option(name, json.dumps({topic: {str(p): span[side] for p, span in ranges.items()}}))
        sources = [term.source for term in (*self.spec.match, *self.spec.compare)]
        sources += [self.spec.transaction_size] if self.spec.transaction_size else []
        needs_headers = any(source.field in _HEADER_FIELDS for source in sources)
        return reader.option("includeHeaders", str(needs_headers).lower()).load()

    def in_doubt(self) -> list[InDoubt]:
        """The transactions in doubt that have messages in the topic, and those of which a home was given up."""
        rows = self.pending()
        for row in self._listed("heuristic"):
            lost = [fact for fact in row["heuristics"] if "branch" in fact]
            if lost and (self._concerns(row) or not row["parts"]):
                rows.append(_given_up(row, lost))
        # Of one that is in doubt at several homes the part that has waited longest.
        return [*{doubt.txid: doubt for doubt in sorted(rows, key=lambda doubt: doubt.age_ms)}.values()]

    def pending(self) -> list[InDoubt]:
        """The transactions in doubt that have messages in the topic."""
        return [_in_doubt(row) for row in self._listed("in-doubt") if self._concerns(row)]

    def _listed(self, state: str) -> Sequence[Mapping[str, Any]]:
        """What the homes list; one that is away may hold nothing of the topics."""
        try:
            return self.client.transactions.list(state)
        except PartialResultError as error:
            for topic in self._topics:
                self.held(topic)  # raises if it does
            return error.found

    @property
    def _topics(self) -> set[str]:
        return {self.spec.topic, *self.spec.together}

    def _concerns(self, row: Mapping[str, Any]) -> bool:
        topics = self._topics
        return any(part["topic"] in topics for part in row.get("parts", ()))

    def _later(self, plan: Plan) -> DataFrame:
        if self.spec.row_time is None:
            self.say(f"rows without message: waiting {self.spec.settle_ms / 1000:g} s for what may be on its way")
            self.clock.sleep(self.spec.settle_ms / 1000)
        ends = self.held(self.spec.topic)
        return self.messages(self.spec.topic, {p: (end, ends[p][1]) for p, (_, end) in plan.ranges.items()})

    def _is_live(self, plan: Plan) -> bool:
        return plan.window.is_live

    def _since(self, read: Mapping[str, Ranges]) -> DataFrame:
        """The transactions of what was appended to topics after these ranges."""
        came = []
        for topic, ranges in read.items():
            ends = self.held(topic)
            came.append(self.messages(topic, {p: (end, max(end, ends[p][1])) for p, (_, end) in ranges.items()}))
        txids = [frame.select("txid").filter("txid is not null") for frame in came]
        return reduce(lambda left, right: left.unionByName(right), txids)

    def _companion(self, topic: str, plan: Plan) -> Ranges:
        held = self.held(topic)
        settle = 2 * self.spec.settle_ms
        if plan.window.from_ms is not None:
            before = plan.window.from_ms - settle
            held = {p: (min(self.client.offset_for(topic, p, before), end), end) for p, (_, end) in held.items()}
        return held

    def _time_at(self, partition: int, offset: int) -> int:
        """The time of the message at an offset, ms."""
        found = self.client.fetch(self.spec.topic, partition=partition, offset=offset, max_bytes=_PEEK_BYTES)
        return found[0].timestamp_ms


def _minus(ms: int | None, settle_ms: int) -> int | None:
    return None if ms is None else ms - settle_ms


def _in_doubt(row: Mapping[str, Any]) -> InDoubt:
    count = sum(int(part["count"]) for part in row["parts"])
    resource = f", resource {row['resource']}" if row.get("resource") else ""
    txid = str(row.get("of") or row["txid"])  # of a part at another home, the one that its messages carry
    waits = f"{row['state']} for {row['age_ms'] / 1000:.0f} s ({row['kind']}{resource})"
    text = f"{waits}, {count} messages: txmq tx show {row['txid']}"
    return InDoubt(txid, int(row["prepared_ms"] or 0), int(row["age_ms"]), text)


def _given_up(row: Mapping[str, Any], lost: Sequence[Mapping[str, Any]]) -> InDoubt:
    said = "; ".join(f"home {fact['resource']} was given up ({fact['reason']})" for fact in lost)
    txid = str(lost[0]["branch"] if row["kind"] == TransactionKind.BRANCH.value else row["txid"])
    text = f"{said}, with its messages there: txmq tx show {row['txid']}"
    return InDoubt(txid, int(row["prepared_ms"]), int(row["age_ms"]), text)
