"""The simulation drives the pipeline that ships: a mutation of its text is caught, each time, by a few seeds.

Each mutation replaces lines of ``txmq/broker/commit/pipeline.py``, which must be there as stated; the seeds run with
the module that results.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from tools.images import node
from tools.simulation.run import simulate
from txmq.broker.verbs import get, turns

SOURCE = Path(__file__).resolve().parents[2] / "txmq/broker/commit/pipeline.py"
SEEDS, HARMLESS = range(1, 21), range(1, 5)
Edits = tuple[tuple[str, str], ...]

ANSWER_BEFORE_SYNC: Edits = (
    ("syncs = not self._answers_before_sync or group.needs_sync", "syncs = False"),
    ("return self._store.journal.durable_lsn", "return self._store.journal.next_lsn"),
)
CHECKPOINT_BEFORE_APPLY: Edits = (("first is not None and first.end_lsn <= pending.lsn", "False"),)
NO_SYNC_UNDER_LOAD: Edits = (
    (
        "self._sync_due.is_due(now, self._unstable[-1])",
        "(self._sync_due.is_due(now, self._unstable[-1]) and self._core.next_group() is None)",
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
    ("edits", "sync", "finding"),
    [
        pytest.param(ANSWER_BEFORE_SYNC, "always", "P1", id="answer before sync"),
        pytest.param(CHECKPOINT_BEFORE_APPLY, "always", "P1|P2|P10|CorruptRecordError", id="checkpoint before apply"),
        pytest.param(NO_SYNC_UNDER_LOAD, "interval", "liveness: a group", id="no sync under load"),
    ],
)
def test_mutated_pipeline_is_caught(monkeypatch: pytest.MonkeyPatch, edits: Edits, sync: str, finding: str) -> None:
    monkeypatch.setattr(node, "CommitPipeline", _mutated(edits).CommitPipeline)
    errors = (simulate(seed, sync=sync, endless=True).error or "" for seed in SEEDS)
    assert any(re.search(finding, error) for error in errors), f"{len(SEEDS)} seeds found nothing"


def test_read_that_does_not_wait_for_partition_files_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get, "_waits", lambda *_: False)
    errors = (simulate(seed, sync="always").error or "" for seed in SEEDS)
    assert any("was acknowledged, and then" in error for error in errors), f"{len(SEEDS)} seeds found nothing"


def test_outbox_row_that_overtakes_prepared_ones_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "must_queue", lambda *_: False)
    errors = (simulate(seed, sync="always").error or "" for seed in SEEDS)
    assert any("P7" in error for error in errors), f"{len(SEEDS)} seeds found nothing"


@pytest.mark.parametrize("sync", ["always", "interval", "never"])
def test_pipeline_that_ships_is_not(sync: str) -> None:
    assert [simulate(seed, sync=sync, endless=True).error for seed in HARMLESS] == [None] * len(HARMLESS)
