"""An audit that goes on: one window after the other, none left out and none twice, through restarts.

Theory of operation. Each round audits the rows committed since the last round's end, up to the margin before now, and
the messages behind the offsets where the last round ended. Partners are looked for a margin further back. So a row
without message is found one margin and one round after its commit; a message without row in the round after it
appeared.

``follow.json`` says how far rows and messages were audited. It is there before the first round, and replaced, whole,
after a round's findings are on disk and were told: a process that dies in between repeats the round and tells its
findings again; none is lost.

Invariants:
    * rows lie in exactly one round by their time, messages by their offset;
    * what the broker holds back (transactions in doubt) is told once;
    * offsets count in the logs that are named beside them: in a copy that was put back they are of other messages.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from txmq.errors import ConfigError, StorageError
from txmq.log.history import parsed
from txmq.runtime.crashpoints import crash_point
from txmq.runtime.private_files import make_private_directory, open_private
from txmq.spark.audit.audit import AuditResult
from txmq.spark.audit.match import Window
from txmq.spark.audit.spec import Kind
from txmq.spark.audit.topic import Plan, TopicAudit

STATE_FILE = "follow.json"
REPORTED_MAX = 1_000  # findings of each kind in a round; the dataset has them all
Finding = dict[str, object]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a topic was audited: rows committed before ``to_ms``, messages before ``ends``."""

    topic: str
    table: str
    to_ms: int
    ends: Mapping[int, int]
    logs: Mapping[int, str]  # histories (``txmq.log.history``) of the logs that ``ends`` count in
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
            ends = {int(partition): int(end) for partition, end in fields["ends"].items()}
            logs = {int(partition): parsed(text).text for partition, text in fields["logs"].items()}
            reported = tuple(str(txid) for txid in fields["in_doubt"])
            return cls(str(fields["topic"]), str(fields["table"]), int(fields["to_ms"]), ends, logs, reported)
        except (ValueError, KeyError, TypeError, AttributeError, StorageError) as error:
            raise ConfigError(f"{STATE_FILE} is damaged ({error!r}); give another directory to begin anew") from None


@dataclass(slots=True)
class Follower:
    """Audits on and on; ``round`` is one window.

    Attributes:
        job: its spec names ``row_time``.
        directory: for ``follow.json`` and the dataset of findings.
        from_ms: where the first round begins; None: at its margin before now.
        tell: told each round's findings, before the round counts as done.
    """

    job: TopicAudit
    directory: Path
    from_ms: int | None = None
    tell: Callable[[Finding], None] = field(default=lambda finding: None)
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
        self._keep(result, plan)
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
        return Progress(spec.topic, self.job.rows.name, from_ms, ends, logs)

    def _found(self, result: AuditResult) -> Iterable[Finding]:
        for kind, count in result.counts.items():
            if count:
                yield from (
                    {"kind": kind.value} | _known(line) for line in result.sample(kind, min(count, REPORTED_MAX))
                )

    def _keep(self, result: AuditResult, plan: Plan) -> None:
        path = self.directory / "findings" / f"from={plan.window.from_ms}"  # the same when it is repeated
        if result.has_findings or path.exists():  # what a round that died has found may be excused by now
            result.findings.write.mode("overwrite").parquet(str(path.absolute()))

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
