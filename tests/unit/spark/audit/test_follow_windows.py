"""Which offsets and rows an audit reads for a window, and how far one that goes on has come. No Spark, no broker."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from txmq.errors import ConfigError
from txmq.log.history import Lives, LogHistory
from txmq.model import PartitionRange
from txmq.spark.audit.follow import STATE_FILE, Follower, Progress
from txmq.spark.audit.rows import Rows
from txmq.spark.audit.spec import AuditSpec, Kind, RowTime, parse_terms
from txmq.spark.audit.topic import TopicAudit, Wanted

FIRST, SECOND, THIRD = (f"{number:016x}" for number in (1, 2, 3))
NOW_MS, SETTLE_MS = 10_000_000, 30_000
TIMED = AuditSpec("orders", parse_terms(["id = key"]), row_time=RowTime("created"), settle_ms=SETTLE_MS)
UNTIMED = replace(TIMED, row_time=None)


@dataclass
class Log:
    """A topic whose message at offset n was made at n seconds."""

    held: dict[int, tuple[int, int]] = field(default_factory=lambda: {0: (0, 10_000), 1: (0, 9_000)})

    lives: Lives = ((FIRST, 0),)
    topic_id: int = 7

    @property
    def topics(self) -> Any:
        return SimpleNamespace(
            watermarks=lambda name: [{"partition": p, "start": s, "end": e} for p, (s, e) in self.held.items()]
        )

    def log_of(self, topic: str, partition: int) -> tuple[PartitionRange, LogHistory]:
        return PartitionRange(topic, partition, *self.held[partition]), LogHistory(self.topic_id, self.lives)

    def offset_for(self, topic: str, partition: int, timestamp_ms: int) -> int:
        start, end = self.held[partition]
        return min(max(start, -(-timestamp_ms // 1000)), end)

    def fetch(self, topic: str, *, partition: int, offset: int, max_bytes: int) -> list[Any]:
        return [SimpleNamespace(timestamp_ms=offset * 1000)]


def job(log: Log, spec: AuditSpec = TIMED, now_ms: int = NOW_MS) -> TopicAudit:
    none: Any = None
    source: Any = log
    clock: Any = SimpleNamespace(now_ms=lambda: now_ms)
    return TopicAudit(none, source, "txmq://h:1", Rows(none, "sqlite:///x", "orders", None), spec, clock=clock)


def test_everything_is_read_and_only_older_than_the_margin_judged() -> None:
    plan = job(Log()).plan(Wanted())
    assert dict(plan.ranges) == {0: (0, 10_000), 1: (0, 9_000)}
    assert (plan.window.from_ms, plan.window.to_ms, plan.window.is_live) == (None, NOW_MS - SETTLE_MS, True)
    assert (plan.rows_from_ms, plan.rows_to_ms) == (None, None)


def test_window_in_time_is_read_with_margin_on_both_sides() -> None:
    plan = job(Log()).plan(Wanted(from_ms=1_000_000, to_ms=2_000_000))
    assert dict(plan.ranges) == {0: (970, 2_030), 1: (970, 2_030)}
    assert (plan.window.from_ms, plan.window.to_ms, plan.window.is_live) == (1_000_000, 2_000_000, False)
    assert (plan.rows_from_ms, plan.rows_to_ms) == (970_000, 2_030_000)


def test_window_that_cannot_be_judged_or_lacks_times_is_refused() -> None:
    with pytest.raises(ConfigError, match="must end 30 s ago or earlier"):
        job(Log()).plan(Wanted(to_ms=NOW_MS - SETTLE_MS + 1))
    with pytest.raises(ConfigError, match="needs the column with the rows' times"):
        job(Log(), UNTIMED).plan(Wanted(from_ms=5))
    with pytest.raises(ConfigError, match="ends before it begins"):
        Wanted(from_ms=5, to_ms=5)
    with pytest.raises(ConfigError, match="not by both"):
        Wanted(from_ms=5, from_offsets={0: 1})


def test_what_retention_removed_is_not_audited_and_that_is_said() -> None:
    cut = Log({0: (100, 10_000), 1: (300, 9_000)})
    plan = job(cut).plan(Wanted(from_ms=200_000))
    assert plan.window.from_ms == 300_000 + SETTLE_MS  # not before the first message of any partition, with the margin
    assert dict(plan.ranges) == {0: (300, 10_000), 1: (300, 9_000)}
    assert len(plan.notes) == 1
    untimed = job(cut, UNTIMED).plan(Wanted())
    assert "retention has removed" in untimed.unmade[Kind.MISSING]
    assert job(Log(), UNTIMED).plan(Wanted()).unmade == {}


def test_window_of_offsets_judges_only_rows_certainly_inside() -> None:
    wanted = Wanted(from_offsets={0: 100, 1: 200}, to_offsets={0: 500, 1: 600})
    plan = job(Log()).plan(wanted)
    assert dict(plan.ranges) == {0: (100, 500), 1: (200, 600)}
    assert (plan.window.from_ms, plan.window.to_ms) == (200_000 + SETTLE_MS, 499_000 - SETTLE_MS)
    assert plan.window.offsets == {0: 100, 1: 200}
    assert Kind.MISSING in job(Log(), UNTIMED).plan(wanted).unmade
    assert job(Log(), UNTIMED).plan(Wanted(from_offsets={0: 0})).unmade == {}
    with pytest.raises(ConfigError, match="it holds 0 to 10000"):
        job(Log()).plan(Wanted(to_offsets={0: 10_001}))
    with pytest.raises(ConfigError, match="no partition 7"):
        job(Log()).plan(Wanted(to_offsets={7: 1}))


LOGS = {number: LogHistory(7, ((FIRST, 0),)).text for number in (0, 1)}


def follower(log: Log, directory: Path, spec: AuditSpec = TIMED, now_ms: int = NOW_MS) -> Follower:
    return Follower(job(log, spec, now_ms), directory)


def test_round_begins_where_the_last_one_ended(tmp_path: Path) -> None:
    progress = Progress("orders", "orders", 9_000_000, 9_000_000, {0: 9_100, 1: 9_000}, LOGS, {})
    (tmp_path / STATE_FILE).write_text(progress.to_json())
    log = Log({0: (0, 10_000), 1: (0, 9_500), 2: (0, 3)})  # partition 2 is new
    follow = follower(log, tmp_path)
    assert follow.progress == progress
    plan = follow._plan()
    assert plan is not None
    assert (plan.window.from_ms, plan.window.to_ms) == (9_000_000, NOW_MS - SETTLE_MS)
    assert plan.window.offsets == {0: 9_100, 1: 9_000, 2: 0}
    assert dict(plan.ranges) == {0: (8_970, 10_000), 1: (8_970, 9_500), 2: (0, 3)}  # partners a margin further back
    assert plan.rows_from_ms == 9_000_000 - SETTLE_MS
    assert follower(log, tmp_path, now_ms=9_000_000 + SETTLE_MS)._plan() is None  # nothing is old enough


def test_audit_that_dies_in_its_first_round_begins_there_again(tmp_path: Path) -> None:
    first = follower(Log(), tmp_path)
    assert first.progress.to_ms == NOW_MS - SETTLE_MS
    late = follower(Log(), tmp_path, now_ms=2 * NOW_MS)
    assert late.progress == first.progress


def test_rounds_follow_each_other_without_hole_and_reach_to_margin(tmp_path: Path) -> None:
    """So a row is judged the margin and an interval after its commit, at the latest: 40 s with the defaults."""
    covered = NOW_MS - SETTLE_MS
    for now_ms in range(NOW_MS, NOW_MS + 60_000, 10_000):
        follow = follower(Log(), tmp_path, now_ms=now_ms)  # as if each round were another process
        plan = follow._plan()
        if now_ms == NOW_MS:
            assert plan is None
            continue
        assert plan is not None
        assert (plan.window.from_ms, plan.window.to_ms) == (covered, now_ms - SETTLE_MS)
        covered = now_ms - SETTLE_MS
        follow._save(replace(follow.progress, to_ms=covered, ends={p: end for p, (_, end) in plan.ranges.items()}))


def test_rows_are_looked_at_once_more_against_all_messages(tmp_path: Path) -> None:
    progress = Progress("orders", "orders", 9_000_000, 4_000_000, {}, LOGS, {0: 3_970, 1: 3_970})
    (tmp_path / STATE_FILE).write_text(progress.to_json())
    log = Log({0: (3_970, 10_000), 1: (0, 9_500), 2: (0, 3)})
    follow = Follower(job(log), tmp_path, late_ms=2_500_000)
    plan = follow._plan_again()
    assert plan is not None
    assert (plan.window.from_ms, plan.window.to_ms) == (4_000_000, 6_500_000)
    assert dict(plan.ranges) == {0: (3_970, 10_000), 1: (3_970, 9_500), 2: (0, 3)}
    assert plan.window.offsets == {0: 10_000, 1: 9_500, 2: 3}  # no message is judged again
    assert (plan.rows_from_ms, plan.rows_to_ms) == (4_000_000 - SETTLE_MS, 6_500_000 + SETTLE_MS)
    assert Follower(job(log), tmp_path, late_ms=2_500_001)._plan_again() is None  # not yet
    log.held[0] = (3_971, 10_000)
    with pytest.raises(ConfigError, match=r"retention removed offsets 3970 to 3970 of partition 0 before the rows"):
        follow._plan_again()


def test_messages_removed_or_replaced_before_the_audit_are_reported(tmp_path: Path) -> None:
    (tmp_path / STATE_FILE).write_text(Progress("orders", "orders", 9_000_000, 0, {0: 50, 1: 0}, LOGS, {}).to_json())
    with pytest.raises(ConfigError, match="retention removed offsets 50 to 99 of partition 0"):
        follower(Log({0: (100, 10_000)}), tmp_path)._plan()
    with pytest.raises(ConfigError, match="ends at 40, before 50"):
        follower(Log({0: (0, 40)}), tmp_path)._plan()


@pytest.mark.parametrize(
    ("lives", "topic_id", "refusal"),
    [
        (((FIRST, 0), (SECOND, 9_000), (THIRD, 9_100)), 7, None),  # a restart after what was audited
        (((FIRST, 0), (SECOND, 9_000), (THIRD, 9_099)), 7, "audited up to offset 9100, and is the same log up to 9099"),
        (((FIRST, 0), (THIRD, 8_000)), 7, "an older copy of the broker's data was put back.* up to 8000"),
        (((THIRD, 0),), 7, "is the same log up to 0"),
        (((FIRST, 0), (SECOND, 9_000)), 8, "topic orders was deleted and made anew"),
    ],
)
def test_log_that_was_put_back_or_made_anew_is_refused(
    lives: Lives, topic_id: int, refusal: str | None, tmp_path: Path
) -> None:
    read = LogHistory(7, ((FIRST, 0), (SECOND, 9_000))).text
    progress = Progress("orders", "orders", 9_000_000, 0, {0: 9_100}, {0: read}, {})
    (tmp_path / STATE_FILE).write_text(progress.to_json())
    follow = follower(Log({0: (0, 10_000)}, lives, topic_id), tmp_path)
    if refusal is None:
        assert follow._plan() is not None
    else:
        with pytest.raises(ConfigError, match=refusal):
            follow._plan()


def test_state_of_another_audit_or_damaged_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / STATE_FILE).write_text(Progress("payments", "orders", 5, 5, {0: 0}, {}, {}).to_json())
    with pytest.raises(ConfigError, match="give another directory"):
        follower(Log(), tmp_path)
    for text in ("", "{}", '{"topic": 1', '{"topic": "orders", "table": "orders", "to_ms": null, "ends": {}}'):
        (tmp_path / STATE_FILE).write_text(text)
        with pytest.raises(ConfigError, match="is damaged"):
            follower(Log(), tmp_path)
    with pytest.raises(ConfigError, match="rows' times"):
        follower(Log(), tmp_path / "new", UNTIMED)
