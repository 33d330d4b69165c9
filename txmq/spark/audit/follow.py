"""An audit that goes on: one window after the other, none left out and none twice, through restarts.

Theory of operation. Each round audits the rows committed since the last round's end, up to the margin before now, and
the messages after the offsets where the last round ended. Partners are looked for a margin further back. So a row
without message is found one margin and one round after its commit; a message without row in the round after it
appeared.

A row may be committed long after its time, by a transaction that was open meanwhile: its round has not seen it. So
rows are looked at once more when they are ``late_ms`` old, many rounds' rows at once, and held against all messages
since. What is found then and was not found before is told.

``follow.json`` says how far rows and messages were audited. It is there before the first round, and replaced, whole,
after a round's findings are on disk and were told: a process that dies in between repeats the round and tells its
findings again; none is lost.

Invariants:
    * rows lie in exactly one round by their time, and in one second look; messages in one round by their offset;
    * what the broker holds back (transactions in doubt) is told once;
    * offsets count in the logs that are named with them: in a copy that was put back they are of other messages.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from txmq.errors import ConfigError, StorageError
from txmq.log.history import parsed
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.private_files import make_private_directory, open_private
from txmq.spark.audit.audit import AuditResult
from txmq.spark.audit.findings import SCHEMA
from txmq.spark.audit.match import Window
from txmq.spark.audit.spec import Kind
from txmq.spark.audit.topic import Plan, TopicAudit

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

STATE_FILE = "follow.json"
REPORTED_MAX = 1_000  # findings of each kind in a round; the dataset has them all
LATE_MS = 3_600_000
_KEPT = f"{SCHEMA}, `from` long, look string"
_SAME = ("kind", "identity", "topic", "txid")  # of one finding, whenever it is found
Finding = dict[str, object]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a topic was audited: rows committed before ``to_ms``, messages before ``ends``.

    Attributes:
        again_to_ms: rows committed before were looked at twice.
        again_from: where the messages begin that the next rows' second look needs.
    """

    topic: str
    table: str
    to_ms: int
    again_to_ms: int
    ends: Mapping[int, int]
    logs: Mapping[int, str]  # histories (``txmq.log.history``) of the logs that ``ends`` count in
    again_from: Mapping[int, int]
    in_doubt: tuple[str, ...] = ()  # told already

    def to_json(self) -> str:
        """As the file holds it."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Progress:
        """Read the file.

        Raises:
            ConfigError: it is damaged.
        """
        try:
            fields = json.loads(text)
            ends, again = ({int(p): int(end) for p, end in fields[name].items()} for name in ("ends", "again_from"))
            logs = {int(partition): parsed(text).text for partition, text in fields["logs"].items()}
            reported = tuple(str(txid) for txid in fields["in_doubt"])
            times = int(fields["to_ms"]), int(fields["again_to_ms"])
            return cls(str(fields["topic"]), str(fields["table"]), *times, ends, logs, again, reported)
        except (ValueError, KeyError, TypeError, AttributeError, StorageError) as error:
            raise ConfigError(f"{STATE_FILE} is damaged ({error!r}); give another directory to begin anew") from None


@dataclass(slots=True)
class Follower:
    """Audits on and on; ``round`` is one window, ``look_again`` comes after it.

    Attributes:
        job: its spec names ``row_time``.
        directory: for ``follow.json`` and the dataset of findings.
        from_ms: where the first round begins; None: at its margin before now.
        tell: told each round's findings, before the round counts as done.
        late_ms: how old rows are when they are looked at once more.
    """

    job: TopicAudit
    directory: Path
    from_ms: int | None = None
    tell: Callable[[Finding], None] = field(default=lambda finding: None)
    late_ms: int = LATE_MS
    progress: Progress = field(init=False)
    _logs: Mapping[int, str] = field(init=False, default_factory=dict)  # of the round that is planned

    def __post_init__(self) -> None:
        if self.job.spec.row_time is None:
            raise ConfigError("an audit that goes on needs the column with the rows' times (--row-time)")
        if self.job.spec.latest:
            raise ConfigError("an audit that goes on judges each message once: leave --latest out")
        make_private_directory(self.directory)
        found = self._load()
        if found is None:
            self._save(self._begin())  # one that dies in its first round begins there again, however late
        else:
            self.progress = found

    def round(self) -> AuditResult | None:
        """Audit what came since the last round; None: nothing is old enough yet.

        Raises:
            ConfigError: the topic was replaced, an older copy of its log was put back, or retention removed messages
                before they were audited.
            whatever Spark, the broker or the database raise: the round did not happen, and may be repeated.
        """
        plan = self._plan()
        if plan is None:
            return None
        result = self.job.audit(plan)
        self._keep(result.findings, plan, "first", is_empty=not result.has_findings)
        crash_point("audit.round.kept")
        hanging = []
        for line in self._found(result):
            if line["kind"] == Kind.IN_DOUBT.value:
                hanging.append(str(line["txid"]))
            if line["kind"] != Kind.IN_DOUBT.value or line["txid"] not in self.progress.in_doubt:
                self.tell(line)
        crash_point("audit.round.told")
        to_ms = plan.window.to_ms or self.progress.to_ms
        ends = {partition: end for partition, (_, end) in plan.ranges.items()}
        self._save(replace(self.progress, to_ms=to_ms, ends=ends, logs=self._logs, in_doubt=tuple(hanging)))
        crash_point("audit.round.saved")
        # The pairs of this round are on the executors' disks, and would stay there.
        self.job.spark.catalog.clearCache()
        return result

    def look_again(self) -> int | None:
        """Look at the rows once more that have become old enough; how much is new, None if no rows are due.

        Raises as ``round``; what ``round`` has done stays.
        """
        plan = self._plan_again()
        if plan is None:
            return None
        found = self._not_kept(self.job.audit(plan).findings, plan).persist()
        lines = [row.asDict() for row in found.limit(REPORTED_MAX).collect()]
        self._keep(found, plan, "second", is_empty=not lines)
        for line in lines:
            self.tell({"kind": line["kind"]} | _known(line))
        to_ms = plan.window.to_ms or self.progress.again_to_ms
        held, _ = self._held()
        self._save(replace(self.progress, again_to_ms=to_ms, again_from=self._first_offsets(held, to_ms)))
        self.job.spark.catalog.clearCache()
        return len(lines)

    def _plan_again(self) -> Plan | None:
        """Rows, and all messages since a margin before them; no message is judged, for each was."""
        spec, done = self.job.spec, self.progress
        to_ms = done.to_ms - self.late_ms
        if to_ms < done.again_to_ms + self.late_ms:
            return None
        held, _ = self._held()
        ranges = {}
        for partition, (start, end) in held.items():
            first = done.again_from.get(partition, 0)
            if first < start:
                raise ConfigError(
                    f"retention removed offsets {first} to {start - 1} of partition {partition} before the rows of "
                    "that time were looked at once more: give a shorter --late, and another directory"
                )
            ranges[partition] = (first, end)
        window = Window(done.again_to_ms, to_ms, offsets={p: end for p, (_, end) in held.items()}, is_live=True)
        return Plan(window, ranges, rows_from_ms=done.again_to_ms - spec.settle_ms, rows_to_ms=to_ms + spec.settle_ms)

    def _first_offsets(self, held: Mapping[int, tuple[int, int]], ms: int) -> dict[int, int]:
        """Where the messages begin that may belong to rows committed from then on."""
        topic, before = self.job.spec.topic, ms - self.job.spec.settle_ms
        found = {partition: self.job.client.offset_for(topic, partition, before) for partition in held}
        return {partition: min(max(start, found[partition]), end) for partition, (start, end) in held.items()}

    def _not_kept(self, found: DataFrame, plan: Plan) -> DataFrame:
        """Without what stands in the dataset already, and what the broker holds back, which rounds tell."""
        found = found.filter(F.col("kind") != Kind.IN_DOUBT.value)
        path = self.directory / "findings"
        if not path.exists():
            return found
        mine = (F.col("from") == plan.window.from_ms) & (F.col("look") == "second")  # of one that died
        kept = self.job.spark.read.schema(_KEPT).parquet(str(path.absolute())).filter(~mine)
        same = reduce(lambda left, right: left & right, (found[one].eqNullSafe(kept[one]) for one in _SAME))
        return found.join(kept, same, "left_anti")

    def _plan(self) -> Plan | None:
        spec, done = self.job.spec, self.progress
        to_ms = self.job.clock.now_ms() - spec.settle_ms
        if to_ms <= done.to_ms:
            return None
        held, self._logs = self._held()
        before = done.to_ms - spec.settle_ms
        ranges = {}
        for partition, (start, end) in held.items():
            audited = done.ends.get(partition, 0)
            self._require_same_log(partition, audited)
            if audited > end:
                raise ConfigError(f"partition {partition} ends at {end}, before {audited}: is this another topic?")
            if audited < start:
                raise ConfigError(
                    f"retention removed offsets {audited} to {start - 1} of partition {partition} unaudited"
                )
            first = min(audited, max(start, self.job.client.offset_for(spec.topic, partition, before)))
            ranges[partition] = (first, end)
        starts = {partition: done.ends.get(partition, 0) for partition in held}
        window = Window(done.to_ms, to_ms, offsets=starts, is_live=True)
        return Plan(window, ranges, rows_from_ms=before)

    def _held(self) -> tuple[dict[int, tuple[int, int]], dict[int, str]]:
        """The range of each partition now, and the history of its log."""
        held, logs = {}, {}
        for partition in self.job.held(self.job.spec.topic):
            found, log = self.job.client.log_of(self.job.spec.topic, partition)
            held[partition], logs[partition] = (found.start, found.end), log.text
        return held, logs

    def _require_same_log(self, partition: int, audited: int) -> None:
        known, now = self.progress.logs.get(partition), self._logs[partition]
        if known is None or known == now:
            return
        shared = parsed(known).shared_with(parsed(now), audited)
        if shared is None:
            raise ConfigError(
                f"topic {self.job.spec.topic} was deleted and made anew since the last round: give another directory"
            )
        if shared < audited:
            raise ConfigError(
                f"an older copy of the broker's data was put back: partition {partition} was audited up to offset "
                f"{audited}, and is the same log up to {shared}: give another directory, and --from before the copy"
            )

    def _begin(self) -> Progress:
        spec = self.job.spec
        from_ms = self.from_ms if self.from_ms is not None else self.job.clock.now_ms() - spec.settle_ms
        held, logs = self._held()
        ends = {p: max(start, self.job.client.offset_for(spec.topic, p, from_ms)) for p, (start, _) in held.items()}
        again_from = self._first_offsets(held, from_ms)
        return Progress(spec.topic, self.job.rows.name, from_ms, from_ms, ends, logs, again_from)

    def _found(self, result: AuditResult) -> Iterable[Finding]:
        for kind, count in result.counts.items():
            if count:
                yield from (
                    {"kind": kind.value} | _known(line) for line in result.sample(kind, min(count, REPORTED_MAX))
                )

    def _keep(self, findings: DataFrame, plan: Plan, look: str, *, is_empty: bool) -> None:
        path = self.directory / "findings" / f"from={plan.window.from_ms}" / f"look={look}"  # the same when repeated
        if not is_empty or path.exists():  # what a round that died has found may be excused by now
            findings.write.mode("overwrite").parquet(str(path.absolute()))

    def _load(self) -> Progress | None:
        path = self.directory / STATE_FILE
        if not path.exists():
            return None
        found = Progress.from_json(path.read_text("utf-8"))
        if (found.topic, found.table) != (self.job.spec.topic, self.job.rows.name):
            raise ConfigError(
                f"{path} is of topic {found.topic} and table {found.table}; give another directory for this audit"
            )
        return found

    def _save(self, progress: Progress) -> None:
        path = self.directory / STATE_FILE
        unfinished = path.with_suffix(".new")
        with open_private(unfinished, "w") as file:
            file.write(progress.to_json())
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        self.progress = progress


def _known(line: Mapping[str, object]) -> Finding:
    return {name: value for name, value in line.items() if value is not None and name != "kind"}
