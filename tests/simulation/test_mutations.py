"""The simulation drives the pipeline that ships: a mutation of its text is caught, each time, by a few seeds.

Each mutation replaces lines of ``txmq/broker/commit/pipeline.py``, which must be there as stated; the seeds run with
the module that results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.simulation.caught import seed_that_catches
from tools.images import node
from tools.simulation.loops import SimWorker
from tools.simulation.run import simulate
from tools.simulation.threads import required_task
from txmq.aio import Transaction
from txmq.broker.context import Context
from txmq.broker.verbs import get
from txmq.broker.verbs.access import access_changes
from txmq.broker.verbs.access.access_changes import journal
from txmq.redo import entries
from txmq.runtime import workers

SOURCE = Path(__file__).resolve().parents[2] / "txmq/broker/commit/pipeline.py"
SEEDS, HARMLESS = range(1, 21), range(1, 5)
LOOPS = range(21, 51)  # in half of them something runs on a loop
Edits = tuple[tuple[str, str], ...]

ANSWER_BEFORE_SYNC: Edits = (
    ("syncs = not self._answers_before_sync or group.needs_sync", "syncs = False"),
    ("return self._store.journal.durable_lsn", "return self._store.journal.next_lsn"),
)
CHECKPOINT_BEFORE_APPLY: Edits = (("first is not None and first.end_lsn <= pending.lsn", "False"),)
NO_SYNC_UNDER_LOAD: Edits = (
    (
        "self._sync_schedule.is_due(now, self._unstable[-1])",
        "(self._sync_schedule.is_due(now, self._unstable[-1]) and self._core.next_group() is None)",
    ),
)


def _mutated(edits: Edits) -> ModuleType:
    text = SOURCE.read_text()
    for there, instead in edits:
        assert text.count(there) == 1, f"not once in pipeline.py: {there}"
        text = text.replace(there, instead)
    module = ModuleType("txmq.broker.commit.pipeline_mutated")
    exec(compile(text, str(SOURCE), "exec"), module.__dict__)
    return module


@pytest.mark.parametrize(
    ("edits", "sync", "finding", "seed"),
    [
        pytest.param(ANSWER_BEFORE_SYNC, "always", "P1|holds messages that journal", 1, id="answer before sync"),
        pytest.param(
            CHECKPOINT_BEFORE_APPLY, "always", "P1|P2|P10|CorruptRecordError", 9, id="checkpoint before apply"
        ),
        pytest.param(NO_SYNC_UNDER_LOAD, "interval", "liveness: a group", 8, id="no sync under load"),
    ],
)
def test_mutated_pipeline_is_caught(
    monkeypatch: pytest.MonkeyPatch, edits: Edits, sync: str, finding: str, seed: int
) -> None:
    monkeypatch.setattr(node, "CommitPipeline", _mutated(edits).CommitPipeline)
    seed_that_catches(partial(simulate, sync=sync, endless=True), finding, first=[seed], then=SEEDS)


def _caught(finding: str, *, first: int, then: Iterable[int] = SEEDS, users: bool = False) -> None:
    seed_that_catches(partial(simulate, sync="always", users=users), finding, first=[first], then=then)


def test_read_that_does_not_wait_for_partition_files_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get, "_waits", lambda *_: False)
    _caught("was acknowledged, and then", first=3)


async def _unshielded_end(self: Transaction, _kind: object, error: BaseException | None, _trace: object) -> None:
    self.inner.leave_contexts()
    await self.host.run(lambda: self.inner.__exit__(None, error, None))


def test_end_of_a_block_that_cancellation_tears_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Transaction, "__aexit__", _unshielded_end)
    _caught("without its id", first=30, then=LOOPS)


def test_connection_without_a_thread_of_its_own_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def hand_over(_worker: object, work: Callable[[], Any]) -> Any:
        job = workers._Job(work)
        required_task().host.start("any", job.run)
        return job

    monkeypatch.setattr(SimWorker, "_hand_over", hand_over)
    _caught("a second statement", first=25, then=LOOPS)


def test_removal_of_a_user_that_no_journal_has_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(context: Context, kind: int, fields: dict[str, Any]) -> None:
        if kind == entries.USER_REMOVED:
            context.state.principals.fold(kind, fields)
        else:
            journal(context, kind, fields)

    monkeypatch.setattr(access_changes, "journal", forgetful)
    _caught("U1", first=14, users=True)


def test_segment_whose_beginning_no_record_tells_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "encode_clock", lambda _time_ms: b"")
    _caught("P10: the records make another state", first=1)


@pytest.mark.parametrize("sync", ["always", "interval", "never"])
def test_pipeline_that_ships_is_not(sync: str) -> None:
    assert [simulate(seed, sync=sync, endless=True).error for seed in HARMLESS] == [None] * len(HARMLESS)
