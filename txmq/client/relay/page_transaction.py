"""A relay's page on its way to the brokers: a transaction over homes, decided by one request that is sent once.

Compiled with the transactions that it inherits from (docs/compiled.md).

Invariants:
    * the request that decides a page is sent once, under the id of its claim;
    * a refused or unanswered prepare at another home leaves the page undecided: who sends it fences it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from txmq.client.transaction.homes import RoutedTransaction
from txmq.client.transaction.messages import MessageBuffer
from txmq.client.transport.reconnecting import ReconnectingConnection
from txmq.outbox.page import BYTES_PER_S
from txmq.outbox.relay_core import Told
from txmq.runtime.crashpoints import crash_point
from txmq.xa.two_phase.coordinator import BranchState

TIMEOUT_S: Final = 5.0


class PageTransaction(RoutedTransaction):
    """See the module's docstring.

    Args:
        anchor: the link of the home that decides.
        connection: the relay's own one to it, whose session has no other transactions.
    """

    def __init__(self, client: Any, anchor: Any, connection: ReconnectingConnection, session: Any) -> None:
        super().__init__(client, client.clock, TIMEOUT_S)
        self.home, self.commits, self._control = anchor, anchor.branch_commits, connection
        self._session, self._is_attached = session, True
        self.begin()

    def send(self, messages: MessageBuffer, stated: dict[str, str | int], on_part: Callable[[], None]) -> None:
        """Prepare, stream, decide.

        Args:
            stated: what the decision says of the outbox.
            on_part: called after each part that is sent ahead, to whichever home.

        Raises:
            TxmqError: refused, or not answered.
        """
        self.on_part = partial(_part_was_sent, on_part)
        self.deadline = self._clock.monotonic() + TIMEOUT_S + messages.size_bytes / BYTES_PER_S
        if not self._routes.is_lone:
            for home in self.owners(messages):
                if home is not self.home:
                    home.look()
        self.find_homes(messages)
        parts = self.take_parts(messages, keyed=False)
        homes = self.prepare_branches()
        crash_point("relay.page.prepared")
        if not self.fits_one_request(parts):
            super(RoutedTransaction, self).stream(parts)  # what is for other homes has gone there
            parts = []
        fields = stated | self._floor() | self._fields()
        if homes:
            fields["homes"] = ",".join(homes)
        answer = self._control.submit_transaction(f"commit {self.txid}", fields, self.encoded(parts), self.deadline)
        crash_point("relay.page.sent")
        answer.result()
        crash_point("relay.page.taken")

    def settle(self, told: Told) -> None:
        """Tell the other homes what became of it; what is not known for certain they find out by themselves."""
        if told is Told.COMMITTED:
            self.commit_branches()
        elif told is Told.ROLLED_BACK:
            self.roll_back_branches()
        for branch in self.branches:
            branch.leave()
            branch.close()

    def note_silence(self) -> None:
        """Homes that have not answered are away until they do."""
        for branch in self.branches:
            if branch.state is BranchState.PREPARING:
                home: Any = branch.home
                home.was_silent()

    def _floor(self) -> dict[str, int]:
        """All before it: a claim gives way to the next one only when its end is known, and told by the relay row."""
        return {"floor": self._counter - 1} if self._counter > 1 else {}


def _part_was_sent(on_part: Callable[[], None]) -> None:
    crash_point("relay.page.part_sent")
    on_part()
