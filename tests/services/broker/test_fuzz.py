"""Strangers' first bytes for some seconds; ``python -m tools.fuzz`` goes on for longer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

import txmq
from tools.fuzz import __main__ as fuzzing
from tools.fuzz.strangers import Strangers
from txmq.testing.processes.broker import BrokerProcess

SECONDS = 3.0


def test_strangers_at_the_door_disturb_nobody_else(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    assert len(fuzzing.fuzz(tmp_path, seed, SECONDS)) == len(Strangers.kinds)


def test_broker_that_ends_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = fuzzing._look

    def killed(broker: BrokerProcess, witnesses: Sequence[txmq.Client]) -> None:
        broker.kill()
        looked(broker, witnesses)

    monkeypatch.setattr(fuzzing, "_look", killed)
    with pytest.raises(fuzzing.FuzzError, match="the broker ended with -9"):
        fuzzing.fuzz(tmp_path, 1, SECONDS)
