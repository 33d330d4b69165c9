"""What to look at, of a finding: the operations, places and faults that its text names, and the files with more."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from tools.checkers.events import History, Operation

_FAULTS_MAX = 3  # an operation that did not end overlaps all later ones
_OPERATION = re.compile(r"\b[\w.]+-\d+[A-Z]\b")
_PLACE = re.compile(r"\b([\w-]+)/(\d+)@\d+")
_FAULT = re.compile(r"\bfault-(\d+)\b")


class Clues:
    """Of one campaign, which is over.

    Args:
        histories: the folder of the processes' files.
        broker_of: of a partition.
        faults: their texts, from number 1 on.
    """

    def __init__(
        self, histories: Path, history: History, broker_of: Mapping[tuple[str, int], int], faults: Sequence[str]
    ) -> None:
        self._histories, self._history, self._broker_of, self._faults = histories, history, broker_of, faults
        begins = [operation.invoked_ns for operation in history.operations.values()]
        self._begin_ns = min(begins, default=0)

    def of(self, text: str) -> list[str]:
        """A line for each thing that the finding names."""
        operations = [name for name in dict.fromkeys(_OPERATION.findall(text)) if name in self._history.operations]
        found = [self._operation(self._history.operations[name]) for name in operations]
        found += dict.fromkeys(self._places(text))
        return found + [f"fault {number}: {self._fault(int(number))}" for number in dict.fromkeys(_FAULT.findall(text))]

    def _operation(self, operation: Operation) -> str:
        ended = (
            f"to {self._since(operation.completed_ns)} s" if operation.completed_ns is not None else "s on, not ended"
        )
        during = ", ".join(str(number) for number in islice(self._faults_during(operation), _FAULTS_MAX)) or "none"
        return (
            f"{operation.id}: txid {operation.txid}, {operation.status}, from {self._since(operation.invoked_ns)} "
            f"{ended}, faults meanwhile: {during}; {self._files(operation.process)}"
        )

    def _since(self, at_ns: int) -> str:
        return f"{(at_ns - self._begin_ns) / 1e9:.3f}"

    def _faults_during(self, operation: Operation) -> Iterator[int]:
        for name, fault in self._history.faults.items():
            is_later = operation.completed_ns is not None and fault.begun_ns > operation.completed_ns
            is_earlier = fault.ended_ns is not None and fault.ended_ns < operation.invoked_ns
            if not is_later and not is_earlier:
                yield int(name.rpartition("-")[2])

    def _files(self, process: str) -> str:
        """The history of a process that may have gone on under further names, and its log."""
        name = process
        while name and not (self._histories / f"{name}.jsonl").exists():
            name = name.rpartition(".")[0]
        return f"{self._histories.name}/{name}.jsonl, {process.partition('.')[0]}.log"

    def _places(self, text: str) -> Iterator[str]:
        for topic, partition in _PLACE.findall(text):
            broker = self._broker_of.get((topic, int(partition)))
            if broker is not None:
                yield (
                    f"{topic}/{partition}: at broker {broker}; brokers/broker-{broker}.log, "
                    f"txmq journal dump --data brokers/broker-{broker}"
                )

    def _fault(self, number: int) -> str:
        return self._faults[number - 1] if number <= len(self._faults) else "not played"
