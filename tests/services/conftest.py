"""A test that leaves a socket or a file open fails by itself, and not a later one in its place."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

import txmq

from .loop_client import Connect, connected_by_loop


def pytest_collection_finish() -> None:
    """Let each ``gc.collect`` pass over what was imported: a millisecond instead of ninety."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def what_is_left_open_fails_this_test() -> Iterator[None]:
    """What stands in a cycle warns when it is collected."""
    yield
    gc.collect()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A fixture's parameter that is marked ``threads`` is none for a loop."""
    items[:] = [item for item in items if not (_api(item) == "loop" and item.get_closest_marker("threads"))]


def _api(item: pytest.Item) -> str | None:
    return item.callspec.params.get("connect") if hasattr(item, "callspec") else None


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for ``connect`` is held by both APIs, unless it is marked ``threads``.

    Last of all: otherwise what stands first in a test's id is a matter of what else is collected, and one that failed
    is not found when it is run alone.
    """
    if "connect" in metafunc.fixturenames:
        is_of_threads = metafunc.definition.get_closest_marker("threads") is not None
        metafunc.parametrize("connect", ["threads"] if is_of_threads else ["threads", "loop"], indirect=True)


@pytest.fixture
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """``txmq.connect``, or ``txmq.aio.connect`` that is called in the same way."""
    if request.param == "threads":
        yield txmq.connect
    else:
        with connected_by_loop() as of_loop:
            yield of_loop
