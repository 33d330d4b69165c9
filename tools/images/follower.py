"""One state at one lsn: a copy of the state that follows the journal beside the broker, record by record.

A broker changes its state first and writes the record then. So a fact that is in no record, a clock that is read twice
or an order that comes from use makes two states: the one that answers, and the one that a restart or a replica has.
The follower folds the records and nothing else, and must come to what a checkpoint holds, byte for byte.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cached_property
from math import inf
from typing import Any

from tools.simulated.disk import SimDisk
from txmq.broker.commit.prepared_payloads import PayloadFiles
from txmq.broker.commit.redo import Redo, RedoEffects, restore
from txmq.broker.state.state import State
from txmq.model import Lsn
from txmq.redo import checkpoint
from txmq.redo.recovery import Cursor, Walk

_SHOWN_MAX = 5


def encoded(state: State) -> bytes:
    """What a checkpoint of this state holds: one JSON text."""
    return json.dumps(state.snapshot(), separators=(",", ":")).encode()


class _EndReachedError(Exception):
    """The next record is beyond the place to compare at."""


class Follower:
    """One copy, from the checkpoint that a broker started with on (lsn 0: from the journal's first record).

    Attributes:
        anew_at: where the broker was told to count generations anew (``Node.count_generations_anew``).
    """

    def __init__(self, disk: SimDisk, node_id: int, checkpoint_lsn: Lsn) -> None:
        self._disk, self._node_id = disk, node_id
        self._from_lsn = checkpoint_lsn
        self._cursor = Cursor(0, 0)
        self.anew_at = inf

    def compare(self, lsn: Lsn, held: bytes) -> None:
        """Fold the records up to a place in the journal, which is not before the last one.

        Args:
            held: the state that the broker has there, as a checkpoint holds it.

        Raises:
            AssertionError: the records make another one.
        """
        self._fold(lsn)
        folded = encoded(self.state)
        assert folded == held, "P10: the records make another state than the broker has: " + "; ".join(
            differences(json.loads(folded), json.loads(held), "")[:_SHOWN_MAX] or ["in order alone"]
        )

    @cached_property
    def state(self) -> State:
        """As of the last place."""
        state = State(home=self._node_id)
        if self._from_lsn:
            begun = checkpoint.read(self._disk, self._from_lsn, node_id=None)
            restore(state, begun, PayloadFiles(self._disk))
            self._cursor = Cursor(begun.lsn, begun.chain, begun.epoch)
        return state

    def _fold(self, end: Lsn) -> None:
        redo = Redo(self.state, RedoEffects(self.state))
        walk = Walk(self._disk, replace(self._cursor), node_id=None, writable=False)

        def take(lsn: Lsn, _record_end: Lsn, payload: bytes | memoryview) -> None:
            if lsn >= end:
                raise _EndReachedError
            self._count_generations(lsn)
            redo.record(payload)
            self._cursor = replace(walk.cursor)

        try:
            walk.run(take)
        except _EndReachedError:
            pass
        finally:
            walk.close()
        self._count_generations(end)

    def _count_generations(self, lsn: Lsn) -> None:
        if lsn >= self.anew_at:
            self.state.saved.generation_floor, self.anew_at = 0, inf


def differences(folded: Any, held: Any, where: str = "") -> list[str]:
    """Where two JSON values differ."""
    if isinstance(folded, dict) and isinstance(held, dict):
        names = sorted({*folded, *held})
        return [found for name in names for found in differences(folded.get(name), held.get(name), f"{where}.{name}")]
    if isinstance(folded, list) and isinstance(held, list) and len(folded) == len(held):
        pairs = enumerate(zip(folded, held, strict=True))
        return [found for number, pair in pairs for found in differences(*pair, f"{where}[{number}]")]
    return [] if folded == held else [f"{where}: folded {folded!r:.80}, held {held!r:.80}"]
