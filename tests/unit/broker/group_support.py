"""What the tests of consumer groups share: one member, what operators see, and time that passes."""

from __future__ import annotations

import json
from typing import Any

from tools.images.node import Answer, Node
from txmq.broker.state.deadlines import TICK_MS

GROUP = "billing"
A0, A1, B0 = ["a", 0], ["a", 1], ["b", 0]


class Consumer:
    """One member, on a connection of its own; keeps what it may consume as generations by partition."""

    def __init__(self, made: Node, name: str, **words: Any) -> None:
        self.made, self.name, self.client = made, name, made.connect()
        self.words = {"member": name, "topics": "a,b", **words}
        self.view: dict[str, Any] = {}

    def join(self, *claims: list[Any]) -> Consumer:
        """Join, or come back."""
        self._see(self.ask("join", list(claims), **self.words))
        return self

    def heartbeat(self, *released: list[Any]) -> Consumer:
        """One heartbeat."""
        self._see(self.ask("heartbeat", list(released), member=self.name))
        return self

    def save(self, slot: list[Any], generation: int, offset: int, deferred: str | None = None) -> Any:
        """Save one offset; what was refused."""
        answer = self.ask("save", [[*slot, generation, offset, deferred]], member=self.name)
        return json.loads(answer.body)["refused"]

    def ask(self, action: str, rows: list[Any], **words: Any) -> Answer:
        """One request of the verb."""
        return self.client.ask("group", action, GROUP, extensions=words, body=json.dumps(rows).encode())

    def _see(self, answer: Answer) -> None:
        assert answer.code == 200, answer
        self.view = json.loads(answer.body)

    @property
    def held(self) -> list[list[Any]]:
        """The partitions it may consume."""
        return [row[:2] for row in self.view["assigned"]]

    @property
    def revoked(self) -> list[list[Any]]:
        """The partitions it must release."""
        found: list[list[Any]] = self.view["revoked"]
        return found

    def generation(self, topic: str, partition: int) -> int:
        """Of a partition it has."""
        return next(int(row[2]) for row in self.view["assigned"] if row[:2] == [topic, partition])


def after(made: Node, count: int) -> int:
    """The generation that is handed out as the ``count``-th one since a broker's newest start, which was no first."""
    return made.state.saved.generation_floor + count


def describe(made: Node, **words: Any) -> dict[str, Any]:
    """What operators see."""
    found: dict[str, Any] = json.loads(made.connect().ask("group", "describe", GROUP, extensions=words, body=b"").body)
    return found


def pass_time(made: Node, seconds: float) -> None:
    """The broker's timer runs."""
    for _ in range(round(seconds * 1000 / TICK_MS)):
        made.clock.advance(TICK_MS / 1000)
        made.core.tick(made.clock.now_ms())
    made.core.tick(made.clock.now_ms())  # what time had passed by the last one is judged by this one
    made.pump()
