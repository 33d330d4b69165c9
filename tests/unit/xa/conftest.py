"""What tests of last resources begin with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from .support import LastResourceFixture, Quiet, quiet_resolver


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Quiet:
    """The resolver of every client, without its thread."""
    return quiet_resolver(monkeypatch)


@pytest.fixture
def world(tmp_path: Path, quiet: Quiet) -> Iterator[LastResourceFixture]:
    """A database, a broker and a client; files about two-phase commits have their own."""
    with closing(LastResourceFixture(tmp_path)) as made:
        yield made
