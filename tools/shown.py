"""Objects of ``txmq.aio`` that look like those of ``txmq``: what is awaited there is called here.

So one text states what both do: tests of services call a loop in another thread (``tests/services/loop_client.py``),
programs of the simulation a strand of the same loop (``tools/simulation/loop_programs.py``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, Protocol


class Caller(Protocol):
    """Where an object of ``txmq.aio`` is used."""

    def call(self, work: Callable[[], Any]) -> Any:
        """Call ``work`` there, await what it returns if that can be, and show the result."""

    def given(self, name: str, argument: Any) -> Any:
        """An argument as ``txmq.aio`` is to see it."""


def is_shown(found: object) -> bool:
    """Whether it has to look like its counterpart."""
    return type(found).__module__.startswith("txmq.aio") or hasattr(found, "__aiter__") or hasattr(found, "__aenter__")


class Shown:
    """An object of ``txmq.aio`` as one of ``txmq``."""

    def __init__(self, original: Any, loop: Caller) -> None:
        self.original, self._loop = original, loop

    def __getattr__(self, name: str) -> Any:
        found = self._loop.call(lambda: getattr(self.original, name))
        return self._called(found) if inspect.isroutine(found) else found

    def in_loop(self, work: Callable[[], Any]) -> Any:
        """Call ``work`` where the original is used."""
        return self._loop.call(work)

    def _called(self, found: Callable[..., Any]) -> Callable[..., Any]:
        names = _parameters(found)

        def call(*arguments: Any, **named: Any) -> Any:
            given = [self._loop.given(name, argument) for name, argument in zip(names, arguments, strict=False)]
            given += arguments[len(given) :]
            named = {name: self._loop.given(name, argument) for name, argument in named.items()}
            return self._loop.call(lambda: found(*given, **named))

        return call

    def __enter__(self) -> Any:
        return self._loop.call(self.original.__aenter__)

    def __exit__(self, *error: object) -> Any:
        return self._loop.call(lambda: self.original.__aexit__(*error))

    def __iter__(self) -> Iterator[Any]:
        iterator = self.original.__aiter__()
        try:
            while True:
                yield self._loop.call(iterator.__anext__)
        except StopAsyncIteration:
            pass


def _parameters(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except ValueError:
        return []
