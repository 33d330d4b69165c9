"""A relay's page on its way to the brokers: a transaction over homes, decided by one request that is sent once.

Compiled with the transactions that it inherits from (docs/compiled.md).

Invariants:
    * the request that decides a page is sent once, under the id of its claim;
    * a refused or unanswered prepare at another home leaves the page undecided: its sender fences it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from txmq.client.transaction.conversation import Fields
from txmq.client.transaction.homes import HomePart, TransactionHomes
from txmq.client.transaction.messages import MessageBuffer
from txmq.client.transport.reconnecting import ReconnectingConnection
from txmq.client.transport.session import ClientSession
from txmq.outbox.page import BYTES_PER_S
from txmq.outbox.relay_core import ClaimOutcome
from txmq.runtime.crashpoints import crash_point
from txmq.xa.two_phase.coordinator import BranchState

if TYPE_CHECKING:
    from txmq.client.client import Client
    from txmq.client.home_link import HomeLink

TIMEOUT_S: Final = 5.0


class PagePart(HomePart):
    """The part at the home that decides: of the relay's own session, which has no other transactions."""

    def __init__(
        self, client: Client, anchor: HomeLink, connection: ReconnectingConnection, session: ClientSession
    ) -> None:
        super().__init__(anchor, client.clock, TIMEOUT_S)
        self._control, self.session, self._is_attached = connection, session, True
        self.begin()

    def decide(self, outbox_fields: dict[str, str | int], others: Sequence[str]) -> None:
        """Send the decision, once.

        Args:
            outbox_fields: what it says of the outbox.
            others: the ids of the parts at other homes, which are prepared.

        Raises:
            TxmqError: refused, or not answered.
        """
        fields = {**outbox_fields}
        self._tell(fields)
        if others:
            fields["homes"] = ",".join(others)
        body = self.encoded(self.parts)
        answer = self._control.submit_transaction(f"commit {self.txid}", fields, body, self.deadline)
        crash_point("relay.page.sent")
        answer.result()
        crash_point("relay.page.taken")

    def _floor(self) -> Fields:
        """All before it: a claim gives way to the next one only when its end is known, and told by the relay row."""
        return {"floor": self._counter - 1} if self._counter > 1 else {}


class PageTransaction(TransactionHomes):
    """See the module's docstring.

    Args:
        anchor: the link of the home that decides.
        connection: the relay's own one to it, whose session has no other transactions.
    """

    def __init__(
        self, client: Client, anchor: HomeLink, connection: ReconnectingConnection, session: ClientSession
    ) -> None:
        self.page = PagePart(client, anchor, connection, session)
        super().__init__(client, client.clock, TIMEOUT_S, self.page)

    @property
    def txid(self) -> str:
        """The page's id."""
        return self.page.txid

    def send(self, messages: MessageBuffer, outbox_fields: dict[str, str | int], on_part: Callable[[], None]) -> None:
        """Prepare, stream, decide.

        Args:
            outbox_fields: what the decision says of the outbox.
            on_part: called after each part that is sent ahead, to whichever home.

        Raises:
            TxmqError: refused, or not answered.
        """
        page = self.page
        page.on_part = partial(_part_was_sent, on_part)
        page.deadline = self._clock.monotonic() + TIMEOUT_S + messages.size_bytes / BYTES_PER_S
        for home in self.owners(messages):
            if home is not page.home:
                home.look()
        self.find(messages)
        self.take(messages, keyed=False)
        others = self.prepare_others()
        crash_point("relay.page.prepared")
        if not page.fits_one_request(page.parts):
            page.send_ahead()  # what is for other homes has gone there
        page.decide(outbox_fields, others)

    def settle(self, told: ClaimOutcome) -> None:
        """Tell the other homes what became of it; what is not known for certain they find out by themselves."""
        if told is ClaimOutcome.COMMITTED:
            self.commit_others()
        elif told is ClaimOutcome.ROLLED_BACK:
            self.roll_back_others()
        for part in self.others:
            part.leave()
            part.close()

    def note_silence(self) -> None:
        """Homes that have not answered are away until they do."""
        for part in self.others:
            if part.state is BranchState.PREPARING:
                part.home.was_silent()


def _part_was_sent(on_part: Callable[[], None]) -> None:
    crash_point("relay.page.part_sent")
    on_part()
