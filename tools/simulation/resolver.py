"""The simulated resolver: settles what is prepared, by the table of ``xa/last_resource/in_doubt_outcome.py``."""

from __future__ import annotations

import json
from collections.abc import Generator

from txmq.state_machine import next_step
from txmq.xa.last_resource import in_doubt_outcome

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
        database, found = self.shared.database, in_doubt_outcome.Found.INSERTED
        step = in_doubt_outcome.Step.INSERT
        while step not in (
            in_doubt_outcome.Step.RESOLVED,
            in_doubt_outcome.Step.UNDECIDED,
            in_doubt_outcome.Step.CONTRADICTED,
        ):
            yield self.world.rng.uniform(0.0, 0.01)
            if step is in_doubt_outcome.Step.INSERT:
                found = {
                    "inserted": in_doubt_outcome.Found.INSERTED, "duplicate": in_doubt_outcome.Found.DUPLICATE,
                    "locked": in_doubt_outcome.Found.FAILED,
                }[database.insert_rolled_back(txid)]  # fmt: skip
                if found is in_doubt_outcome.Found.FAILED:
                    self.world.meet("marker locked")
            elif step is in_doubt_outcome.Step.READ:
                found = {
                    "committed": in_doubt_outcome.Found.COMMITTED, "rolled-back": in_doubt_outcome.Found.ROLLED_BACK,
                    None: in_doubt_outcome.Found.FAILED,
                }[database.markers.get(txid)]  # fmt: skip
            else:
                found = yield from self._tell(step, txid)
            step = next_step(in_doubt_outcome.TRANSITIONS, step, found)

    def _tell(self, step: in_doubt_outcome.Step, txid: str) -> Generator[float | bytes, Reply, in_doubt_outcome.Found]:
        is_commit, body = (
            step is in_doubt_outcome.Step.REPORT_COMMIT,
            b"" if step is in_doubt_outcome.Step.REPORT_COMMIT else None,
        )
        reply = yield from self.ask("commit" if is_commit else "rollback", txid, body=body)
        if reply is None or reply[0] >= 500:
            return in_doubt_outcome.Found.FAILED
        if reply[0] != 200:
            return in_doubt_outcome.Found.CONTRADICTED
        self.world.meet("resolver committed" if is_commit else "resolver rolled back")
        if is_commit:
            self.shared.database.markers.pop(txid, None)
        return in_doubt_outcome.Found.REPORTED
