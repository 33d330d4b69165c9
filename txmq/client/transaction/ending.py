"""The three endings of a transaction block, in one shape: ``local_block``, ``last_resource.block``, ``xa.block``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from txmq.client.transaction.branch_commits import BranchCommits
from txmq.errors import RolledBackError, TransactionError, TransactionStateError
from txmq.model import Outcome
from txmq.xa.broker_port import Answer
from txmq.xa.database.hazard import Hazard


class Ending(NamedTuple):
    """How a block ended.

    Attributes:
        outcome: the transaction's, for the caller.
        in_broker: the outcome in the broker, as far as it is known; None if the ending is told of it later.
        error: to be raised in the caller.
        interrupt: KeyboardInterrupt and the like that came at the end of the block.
    """

    outcome: Outcome
    in_broker: Outcome | None
    error: TransactionError | None = None
    interrupt: BaseException | None = None


class BlockEnding(Protocol):
    """How a block ends; made when the block is entered."""

    @property
    def pending(self) -> tuple[str, ...]:
        """Where the decision has yet to arrive: "broker", names of XA resources, "home <id>"."""

    @property
    def has_begun(self) -> bool:
        """Whether ``end`` will see to the end by itself, whatever is raised; before that it may be called again."""

    def begin(self) -> None:
        """Begin in the broker and the databases.

        Raises:
            RolledBackError: the broker is away, or refuses.
            Exception: a database does not begin.
        """

    def connection(self, resource: Any) -> Any:
        """The database connection for the body of the block.

        Raises:
            TransactionStateError: the resource takes no part in the transaction.
        """

    def parts_streamed(self) -> None:
        """Note that a part of the messages is about to be sent ahead.

        Raises:
            RolledBackError: the homes of the messages cannot be reached.
        """

    def gather_results(self, deadline: float) -> None:
        """Wait for the answers of the homes that were told of the decision: they say where messages are.

        Args:
            deadline: monotonic time.

        Raises:
            HeuristicError: a home had given its messages up before.
        """

    def end(self, body_error: BaseException | None, failure: RolledBackError | None) -> Ending:
        """Commit, or undo everything.

        Args:
            body_error: the exception that left the body.
            failure: the refusal of a part that was sent ahead.

        Raises:
            BaseException: a local transaction's outcome is not known, or its end was interrupted.
        """


class BlockResolver(Protocol):
    """The client's resolver, as a block sees it."""

    def add(self, resource: Any) -> None:
        """Resolve for this resource, too."""

    def wake(self) -> None:
        """Look at once: a transaction was left in doubt."""

    def tell(self, commits: BranchCommits) -> None:
        """Tell a home of decisions, until it has answered."""

    def report(self, hazard: Hazard, on_reported: Callable[[], None]) -> None:
        """Report a hazard until the broker keeps it, then call ``on_reported``."""

    def completed(self, resource: Any, txid: str, answer: Answer) -> None:
        """Take the request of a ``complete``: when it is answered, the branch's marker may go."""

    def watch(self, resource: Any, txid: str, on_resolved: Callable[[], None]) -> None:
        """Call ``on_resolved`` when nothing of a transaction is in doubt in this resource any more."""


def no_part(resource: Any) -> TransactionStateError:
    """The error for a resource that the block does not name."""
    return TransactionStateError(f"{resource!r} takes no part in this transaction")
