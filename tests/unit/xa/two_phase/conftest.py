"""What tests of two-phase commits begin with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from txmq.client.transaction import block as module

from ..xa_support import Notes, XAFixture


@pytest.fixture
def notes(world: XAFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notes]:
    """In place of the resolver of every client of a file's ``world``."""
    found = Notes(world.home)
    monkeypatch.setattr(module, "resolver_of", lambda _client: found)
    yield found
    found.resolver.close()
