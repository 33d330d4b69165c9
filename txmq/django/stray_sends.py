"""Warns once where ``producer.send`` is called in ``atomic()``: its message stays when the transaction rolls back."""

from __future__ import annotations

import warnings
from typing import Any

from django.db import connections

from txmq.runtime.caller import SEND_WATCHERS

_FRAMES = 4  # up to the caller of ``producer.send``


def warn_once() -> None:
    """Look at this thread's connections; called for each message that joins no transaction of txmq's."""
    for connection in connections.all(initialized_only=True):
        if _is_in_atomic(connection):
            SEND_WATCHERS.remove(warn_once)
            warnings.warn(
                f"producer.send() in atomic() of database {connection.alias!r}: its message is sent at once, and stays "
                "if the transaction rolls back; txmq.django.send() writes one that is sent when it commits",
                RuntimeWarning,
                stacklevel=_FRAMES,
            )
            return


def _is_in_atomic(connection: Any) -> bool:
    """Whether a block is open that is not the one of a TestCase."""
    return any(not getattr(block, "_from_testcase", False) for block in connection.atomic_blocks)
