"""An older copy of a broker's data directory is put back."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from txmq.testing.processes.broker import BrokerProcess


@contextmanager
def older_copy(broker: BrokerProcess) -> Iterator[None]:
    """What the block does happens in a directory that is replaced at its end by a copy of what was there before."""
    broker.stop()
    copy = broker.data_dir.with_name("copy")
    shutil.copytree(broker.data_dir, copy)
    broker.start()
    yield
    broker.kill()
    shutil.rmtree(broker.data_dir)
    copy.rename(broker.data_dir)
