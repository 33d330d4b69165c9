"""Which transaction block, or branch of an external transaction manager, a call of ``producer.send`` joins.

Theory of operation. ``tx.send`` names its block and needs nothing of this. ``producer.send`` has to find it: a context
variable carries the block from where it was entered, as far as contexts are copied (asyncio's tasks, ``to_thread``). A
generator shares its caller's context and may go on in another one, so a block that is entered in a generator is also
found by that generator's frame on the stack. The innermost of both decides.

=====================================================  ================================================================
where ``producer.send`` is called while the block is   what becomes of it
open
=====================================================  ================================================================
in the ``with``, or in what that calls                 joins
in a task, or by ``to_thread``, begun in the block     joins
in the body of a generator that entered the block,     joins
  in whatever thread or context that goes on
in the ``with`` of a function made by ``contextlib``,  joins: the generator is that ``with``'s beginning and end
  or in the test of a pytest fixture, that entered it
by the caller of any other generator that is           goes alone: the block captures no other code's messages
  suspended inside the block
in a thread that was started by hand, or an endpoint   goes alone while it has nothing to do with the block
  of FastAPI whose synchronous dependency entered it
in a context, of either of the last two rows, that     refused by name: a ``TransactionStateError`` that says to use
  has used the block: ``tx.connection``, a statement,    ``tx.send``
  ``tx.send``, ``tx.ack``, ``tx.savepoint``
in a task or a copied context, begun where a           refused by name: it may be meant for the block, or not
  generator's block was open that is no ``with``'s
in what txmq itself calls by ``run_alone``: dead       goes alone, also on a generator's stack
  letters, copies in the retry topic
=====================================================  ================================================================

Invariants:
    * the end of a block needs no context: a block that is over counts for nothing wherever it is still carried, and is
      taken out where it ended;
    * a block that is over, and what its generator holds, is kept alive by no context.

A branch (``xa_resource``) is associated with the thread, or task, that called ``start``, until ``end``.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from sys import _getframe as frame_above
from types import FrameType
from typing import TYPE_CHECKING, Final, Protocol

from txmq.errors import TransactionStateError
from txmq.log.records import Headers
from txmq.model import SendResult
from txmq.runtime.caller import SEND_WATCHERS, is_alone

if TYPE_CHECKING:
    from txmq.client.transaction.xa_resource import ExternalBranch

# Compiled, a ``Final`` costs no look-up.
_GENERATORS: Final = 0x20 | 0x200  # CO_GENERATOR, CO_ASYNC_GENERATOR
_AWAITED: Final = 0x80 | 0x100 | 0x200  # CO_COROUTINE, CO_ITERABLE_COROUTINE, CO_ASYNC_GENERATOR
_SUSPENDABLE: Final = _GENERATORS | _AWAITED
# Modules that make a context manager of a generator: they call it up to its one yield, and then to its end.
_MAKE_CONTEXT_MANAGERS: Final = frozenset({"contextlib", "_pytest.fixtures"})


class Enclosing(Protocol):
    """A block or branch that messages join."""

    @property
    def client(self) -> object:
        """Whose producers' messages join."""

    def add(
        self, topic: str, partition: int, key: bytes | None, value: bytes | None, headers: Headers, timestamp_ms: int
    ) -> SendResult:
        """Append a message whose partition is chosen."""


class Entered:
    """A block that was entered, as contexts carry it.

    Attributes:
        transaction: None once the block is over.
        is_captive: its generator is no context manager: while that is suspended, no caller stands in the block.
        outer: what the context carried before; only a captive block can be open there.
    """

    __slots__ = ("_frames", "_token", "is_captive", "outer", "transaction")

    def __init__(
        self, transaction: Enclosing | None, outer: Entered | None, frames: list[FrameType], *, is_captive: bool
    ) -> None:
        self.transaction, self.outer, self.is_captive = transaction, outer, is_captive
        self._frames = frames
        self._token: Token[None] | None = _probe.set(None) if is_captive else None

    def is_of_this_context(self) -> bool:
        """Whether the block was entered in the very context of the caller, not in one that this is a copy of."""
        if self._token is None:
            return False
        try:
            _probe.reset(self._token)  # refused in every other context
        except ValueError:
            return False
        self._token = _probe.set(None)
        return True

    def end(self) -> None:
        """The block is over."""
        self.transaction = self._token = None
        for frame in self._frames:
            _holding.pop(frame, None)
        self._frames = []
        entered = _entered.get()
        if entered is not None and entered.transaction is None:
            _entered.set(None if entered.outer is None else _open(entered.outer))


_entered: Final[ContextVar[Entered | None]] = ContextVar("txmq_transaction", default=None)
# The block that a context outside of it has used.
_used: Final[ContextVar[Entered | None]] = ContextVar("txmq_transaction_used", default=None)
_probe: Final[ContextVar[None]] = ContextVar("txmq_transaction_probe", default=None)
_associated: Final[ContextVar[tuple[ExternalBranch, ...]]] = ContextVar("txmq_branches", default=())
_holding: Final[dict[FrameType, Entered]] = {}  # generators in which blocks of this process are open


def enter(transaction: Enclosing) -> Entered:
    """Let the callers stand in a block from now on, until ``Entered.end``."""
    frames, is_captive = _holders(frame_above())
    outer = _entered.get()
    entered = Entered(transaction, None if outer is None else _open(outer), frames, is_captive=is_captive)
    for frame in frames:
        _holding[frame] = entered
    _entered.set(entered)
    return entered


def current_transaction() -> Enclosing | None:
    """The transaction whose block the caller stands in, or None."""
    entered = _entered.get()
    if not _holding:
        return None if entered is None else entered.transaction
    return _innermost(entered)


def associate(branch: ExternalBranch) -> None:
    """Let what the caller's context sends join a branch."""
    _associated.set((*_associated.get(), branch))


def dissociate(branch: ExternalBranch) -> None:
    """Messages of the caller's context join the branch no more."""
    _associated.set(tuple(one for one in _associated.get() if one is not branch))


def is_associated(branch: ExternalBranch) -> bool:
    """Whether the caller's context is associated with a branch."""
    return branch in _associated.get()


def associated_branch(client: object) -> ExternalBranch | None:
    """The branch that messages of this client's producers join, or None."""
    for branch in _associated.get():
        if branch.client is client and not branch.is_ended:
            return branch
    return None


def enclosing(client: object) -> Enclosing | None:
    """The block or branch that a message of this client's producers joins, or None.

    Raises:
        TransactionStateError: the block is another client's; or the message may be meant for a block or not.
    """
    transaction = current_transaction()
    if transaction is None:
        if _used.get() is not None or _entered.get() is not None:
            refuse_stray()
        branch = associated_branch(client) if _associated.get() else None
        if branch is None and SEND_WATCHERS:
            for watcher in tuple(SEND_WATCHERS):
                watcher()
        return branch
    if transaction.client is not client:
        raise TransactionStateError("this block's transaction is of another client: its messages cannot join")
    return transaction


def refuse_enclosed(client: object, reason: str) -> None:
    """Refuse what can join neither block nor branch.

    Raises:
        TransactionStateError: the call stands in one, or may be meant for one.
    """
    if current_transaction() is not None or associated_branch(client) is not None:
        raise TransactionStateError(reason)
    refuse_stray()


def note_use(entered: Entered) -> None:
    """The block is used. Where the caller does not stand in it, what it sends without naming the block is refused."""
    if _entered.get() is entered and not _holding:  # the caller stands in it
        return
    if entered.transaction is not None and current_transaction() is not entered.transaction:
        _used.set(entered)


def refuse_stray() -> None:
    """Refuse a call that stands in no block, if it may be meant for one.

    Raises:
        TransactionStateError: it may.
    """
    used = _used.get()
    if used is not None:
        if used.transaction is not None:
            raise TransactionStateError(
                "this context has used a transaction block that was entered in another one, so that producer.send does "
                "not join it: use tx.send for a message of the block, and send others where the block is not used"
            )
        _used.set(None)
    entered = _entered.get()
    while entered is not None:
        if entered.transaction is not None and entered.is_captive and not entered.is_of_this_context():
            raise TransactionStateError(
                "this task was begun where a generator's transaction block was open, so that a message may be meant "
                "for it or not: use tx.send for one of the block"
            )
        entered = entered.outer


def _innermost(entered: Entered | None) -> Enclosing | None:
    if is_alone():
        return None
    frame: FrameType | None = frame_above()
    while frame is not None:
        found = _holding.get(frame)
        if found is not None:
            return found.transaction
        frame = frame.f_back
    while entered is not None and (entered.is_captive or entered.transaction is None):
        entered = entered.outer
    return None if entered is None else entered.transaction


def _open(entered: Entered | None) -> Entered | None:
    while entered is not None and entered.transaction is None:
        entered = entered.outer
    return entered


def _holders(frame: FrameType | None) -> tuple[list[FrameType], bool]:
    """The generators in whose hands a block is that is entered now, and whether the outermost holds it captive."""
    found: list[FrameType] = []
    while frame is not None:
        kind = frame.f_code.co_flags
        if kind & _SUSPENDABLE:
            caller = frame.f_back
            if kind & _GENERATORS and not kind & 0x100:
                found.append(frame)
                if caller is None or caller.f_globals.get("__name__") not in _MAKE_CONTEXT_MANAGERS:
                    return found, True
            if kind & _AWAITED and (caller is None or not caller.f_code.co_flags & _AWAITED):
                return found, False  # a task: what is beneath runs the loop, and has no part in it
        frame = frame.f_back
    return found, False
