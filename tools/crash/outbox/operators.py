"""What an operator does to the outboxes of a campaign: ``txmq outbox``, as its page says."""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from tools.crash.faults import await_death
from tools.crash.outbox.databases import Place
from tools.crash.outbox.directory import OutboxCampaignDirectory
from tools.crash.processes import CampaignError, Child
from tools.crash.reader import text_of
from txmq.testing.processes import fork_server

COMMAND_S = 60.0
_UNITS_A_COMMAND = 500


class Ends(NamedTuple):
    """What the relay row says of pages: the last one that is known to be committed, and the one on its way."""

    last: str | None
    claim: str | None


class OutboxOperator:
    """An operator of one outbox.

    Args:
        config: of the relays that belong to it.
        place: its database.
        points_hit: counts the deaths of commands.
    """

    def __init__(
        self, world: OutboxCampaignDirectory, config: str, outbox: str, place: Place, points_hit: Counter[str]
    ) -> None:
        self._world, self._config, self.outbox, self.place = world, config, outbox, place
        self._points_hit = points_hit

    # --- commands ----------------------------------------------------------------------------------------------------

    def is_stopped(self) -> bool:
        """Whether ``status`` says so, and ends with 1."""
        done = fork_server.run(self._python("status", "--json"), timeout=COMMAND_S)
        found = {one["outbox"]: one["state"] for one in json.loads(done.stdout or b"[]")}
        return found.get(self.outbox) == "stopped" and done.returncode == 1

    def act(self, *words: str) -> dict[str, Any]:
        """A command on this outbox; what it says.

        Raises:
            CampaignError: it is refused.
        """
        done = fork_server.run(self._python(*words, "--outbox", self.outbox, "--json"), timeout=COMMAND_S)
        if done.returncode != 0:
            raise CampaignError(f"txmq outbox {' '.join(words[:3])}: {done.stderr.decode()[-2000:]}")
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def die_in(self, point: str, *words: str) -> None:
        """The same command, which dies at a crash point."""
        child = Child("operator", self._world.directory, lambda _: self._words(*words, "--outbox", self.outbox))
        child.start(point)
        await_death(child, point)
        self._points_hit[point.partition(":")[0]] += 1

    def _python(self, *words: str) -> list[str]:
        return [sys.executable, "-m", *self._words(*words)]

    def _words(self, *words: str) -> list[str]:
        return ["txmq.cli.main", "outbox", *words, "--config", str(self._world.config(self._config))]

    # --- the page: adopt, compare, drop, release ---------------------------------------------------------------------

    def adopt(self, which: str, dies_at: str = "") -> dict[str, Any]:
        """``adopt``; of a command that dies, once more."""
        if dies_at.startswith(("operator.settled", "operator.adopted")):
            self.die_in(dies_at, "adopt", which, "--yes")
        return self.act("adopt", which, "--yes")

    def sort_out(self, sent: Collection[str], dies_at: str = "") -> int:
        """Drop each parked unit that the broker has, and release the rest; how many rows were dropped.

        Raises:
            CampaignError: the broker has a unit in part.
        """
        parked = self.parked()
        torn = {unit: values for unit, values in parked.items() if 0 < sum(one in sent for one in values) < len(values)}
        if torn:
            raise CampaignError(f"the broker has parked units of {self.outbox} in part: {torn}")
        units = [str(unit) for unit, values in parked.items() if values[0] in sent]
        dropped = self._drop(units, dies_at if dies_at.startswith("operator.dropped") else "")
        if len(units) < len(parked):
            if dies_at.startswith("operator.released"):
                self.die_in(dies_at, "release", "--all")
            self.act("release", "--all")
        return dropped

    def drop_all(self) -> None:
        """Drop all that is parked: the original sends it."""
        self._drop([str(unit) for unit in self.parked()], "")

    def _drop(self, units: list[str], dies_at: str) -> int:
        dropped = 0
        while units:
            some, units = units[:_UNITS_A_COMMAND], units[_UNITS_A_COMMAND:]
            if dies_at:
                self.die_in(dies_at, "drop", "--yes", *some)
                dies_at = ""
            dropped += int(self.act("drop", "--yes", *some)["dropped"])
        return dropped

    # --- looks -------------------------------------------------------------------------------------------------------

    def parked(self) -> dict[int, list[str]]:
        """The values of parked messages, by unit."""
        found: dict[int, list[str]] = defaultdict(list)
        rows = self.place.ask("SELECT COALESCE(unit, id), value FROM txmq_outbox_parked ORDER BY id")
        for unit, value in rows:
            found[int(unit)].append(text_of(bytes(value)))
        return found

    def waiting(self) -> set[str]:
        """The values of messages that wait or are parked."""
        rows = self.place.ask("SELECT value FROM txmq_outbox UNION ALL SELECT value FROM txmq_outbox_parked")
        return {text_of(bytes(value)) for (value,) in rows}

    def ends(self) -> Ends:
        """See ``Ends``."""
        ((last, claim),) = self.place.ask("SELECT last, claim FROM txmq_outbox_relay")
        return Ends(last, claim)

    def is_beyond(self, ends: Ends) -> bool:
        """Whether the line has gone on since then: the newest page is neither of those."""
        last = self.ends().last
        return last is not None and last not in ends

    def is_level(self) -> Callable[[], bool]:
        """A condition: nothing waits any more of what waits now."""
        ((highest,),) = self.place.ask("SELECT MAX(id) FROM txmq_outbox")

        def found() -> bool:
            ((count,),) = self.place.ask("SELECT COUNT(*) FROM txmq_outbox WHERE id <= ?", (highest or 0,))
            return not count

        return found
