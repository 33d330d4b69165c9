"""The broker under load: its settings, and what it takes, as its own ``stats`` and the system say."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import txmq
from tools.soak.bounds import Measure
from txmq.testing.processes.broker import BrokerProcess

CHECKPOINT_INTERVAL_BYTES: Final = 32 << 20
OPEN_FILES_MAX: Final = 64  # fewer than there are partitions: files are closed and opened again
SETTINGS: Final[dict[str, object]] = {
    "checkpoint_interval_bytes": CHECKPOINT_INTERVAL_BYTES, "open_files_max": OPEN_FILES_MAX,
    "retention_check_interval_ms": 1000,
}  # fmt: skip
STALL_WINDOW_S: Final = 60.0
_MIB: Final = 1 << 20
_THREADS: Final = 12  # loop, writer, files, helper, two readers, and what the interpreter and uvloop add
_CONNECTIONS: Final = 64

JOURNAL, MEMORY, FILES, THREADS, STALL = (
    "journal since checkpoint", "resident memory", "open files", "threads", "longest stall of the loop",
)  # fmt: skip


def measures(memory_mib_max: float, stall_ms_max: float) -> list[Measure]:
    """What is judged. A checkpoint is taken each 32 MiB; while it is written, the journal goes on."""
    return [
        Measure(JOURNAL, "MiB", 8 * CHECKPOINT_INTERVAL_BYTES / _MIB, 0.5, CHECKPOINT_INTERVAL_BYTES / _MIB, max),
        Measure(MEMORY, "MiB", memory_mib_max, 0.1, 32),
        Measure(FILES, "", OPEN_FILES_MAX + _CONNECTIONS + 32, 0.1, 8),
        Measure(THREADS, "", _THREADS, 0, 1),
        Measure(STALL, "ms", stall_ms_max, 0.5, stall_ms_max / 4, max, STALL_WINDOW_S),
    ]


def sample(broker: BrokerProcess, client: txmq.Client, second: float) -> dict[str, float]:
    """One row: the measures, and counts for people."""
    figures = dict(line.split(" ", 1) for line in client.stats().splitlines())
    process = Path(f"/proc/{broker.pid}")
    status = dict(line.split(":", 1) for line in (process / "status").read_text("ascii").splitlines())
    return {
        "second": round(second, 1),
        JOURNAL: round(float(figures["journal_bytes_since_checkpoint"]) / _MIB, 1),
        MEMORY: round(float(status["VmRSS"].split()[0]) / 1024, 1),
        FILES: sum(1 for _ in (process / "fd").iterdir()),
        THREADS: float(status["Threads"]),
        STALL: float(figures["loop_stall_own_ms_max"]),
        "with waits for a processor": float(figures["loop_stall_ms_max"]),
        "messages": float(figures["messages"]),
        "sessions": float(figures["sessions"]),
        "syncs": float(figures["syncs"]),
    }
