"""What is left of buffers that a socket took a part of."""

from __future__ import annotations

from txmq.runtime.ports import Buffer


def drop(buffers: list[Buffer], taken: int) -> None:
    """Remove the first ``taken`` bytes."""
    whole = 0
    for buffer in buffers:
        size = memoryview(buffer).nbytes
        if taken < size:
            if taken:
                buffers[whole] = memoryview(buffer).cast("B")[taken:]
            break
        taken -= size
        whole += 1
    del buffers[:whole]
