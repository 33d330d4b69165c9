"""Methods of ``txmq`` as coroutines: the same names, parameters and documentation, and one text for both."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial, wraps
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from txmq.runtime.strands import Host

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", covariant=True)


class Facade(Generic[S]):
    """What an event loop sees of an object of ``txmq``.

    Attributes:
        inner: that object; used in strands of the host only.
        host: runs them.
    """

    def __init__(self, inner: S, host: Host) -> None:
        self.inner, self.host = inner, host


def twin(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[Facade[S], P], Coroutine[Any, Any, R]]:
    """The coroutine that runs a method in a strand, as the object's own class has it."""
    name = method.__name__

    @wraps(method)
    async def run(self: Facade[S], /, *args: P.args, **named: P.kwargs) -> R:
        own: Callable[P, R] = getattr(self.inner, name)
        return await self.host.run(partial(own, *args, **named))

    return run
