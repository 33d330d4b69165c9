"""The simulated resolver: settles what is prepared, by the table of ``xa/last_resource/in_doubt_outcome.py``."""

from __future__ import annotations

import json
from collections.abc import Generator

from txmq.state_machine import next_step
from txmq.xa.last_resource.in_doubt_outcome import TRANSITIONS, Found, Step

from .broker import Broker
from .client import UUID, Process, Reply, Steps
from .users import settler


class Resolver(Process):
    """Settles whatever is prepared, its owner alive or not, by the table of ``xa/last_resource/in_doubt_outcome``."""

    def open_link(self, broker: Broker | None = None) -> bool:
        """As a user of its own."""
        return self.open_link_as(settler(self.shared), broker)

    def main(self) -> Steps:
        """For ever."""

        while True:
            yield self.world.rng.uniform(0.05, 0.4)
            if (self.link is None or self.link.is_lost) and not self.open_link():
                continue
            reply = yield from self.ask("recover", extensions={"uuid": UUID})
            if reply is None or reply[0] != 200:
                continue
            for item in json.loads(reply[1])["transactions"]:
                if not item["owner_connected"] or self.shared.stopping or self.world.chance(0.3):
                    yield from self._resolve(item["txid"])

    def _resolve(self, txid: str) -> Steps:
        database, found = self.shared.database, Found.INSERTED
        step = Step.INSERT
        while step not in (Step.RESOLVED, Step.UNDECIDED, Step.CONTRADICTED):
            yield self.world.rng.uniform(0.0, 0.01)
            if step is Step.INSERT:
                found = {
                    "inserted": Found.INSERTED, "duplicate": Found.DUPLICATE,
                    "locked": Found.FAILED,
                }[database.insert_rolled_back(txid)]  # fmt: skip
                if found is Found.FAILED:
                    self.world.meet("marker locked")
            elif step is Step.READ:
                found = {
                    "committed": Found.COMMITTED, "rolled-back": Found.ROLLED_BACK,
                    None: Found.FAILED,
                }[database.markers.get(txid)]  # fmt: skip
            else:
                found = yield from self._tell(step, txid)
            step = next_step(TRANSITIONS, step, found)

    def _tell(self, step: Step, txid: str) -> Generator[float | bytes, Reply, Found]:
        is_commit = step is Step.REPORT_COMMIT
        body = b"" if is_commit else None
        reply = yield from self.ask("commit" if is_commit else "rollback", txid, body=body)
        if reply is None or reply[0] >= 500:
            return Found.FAILED
        if reply[0] != 200:
            return Found.CONTRADICTED
        self.world.meet("resolver committed" if is_commit else "resolver rolled back")
        if is_commit:
            self.shared.database.markers.pop(txid, None)
        return Found.REPORTED
