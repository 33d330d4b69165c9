"""What the relay's core asks for, step by step, where the model does not look."""

from __future__ import annotations

from typing import Any

from txmq.outbox.page import OutboxRow, Waiting
from txmq.outbox.relay_core import (
    Answer,
    Claim,
    Connect,
    Lock,
    Locked,
    NewTxid,
    Outcome,
    Pause,
    Peek,
    Read,
    RelayCore,
    RelayRow,
    Send,
    Step,
    Told,
    Topics,
    Unlock,
    Why,
)

ROW = RelayRow("ab" * 16)


class Played:
    """A core, driven by hand."""

    def __init__(self, page_rows: int = 4) -> None:
        self.turns = RelayCore("me", page_rows).turns()
        self.step: Step = next(self.turns)

    def answer(self, kind: type[Any], value: object = None) -> Step:
        """The step is of this kind; answer it, and take the next one."""
        assert isinstance(self.step, kind), self.step
        self.step = self.turns.send(value)
        return self.step

    def begin(self, row: RelayRow = ROW, topics: tuple[str, ...] = ("a",)) -> Played:
        """Connected, with topics, and the lock taken again."""
        self.answer(Peek, row)
        self.answer(Connect, "home")
        self.answer(Lock, Locked(row, is_lease_over=False, is_page_due=False))
        self.answer(Unlock)
        self.answer(Topics, topics)
        self.answer(Lock, Locked(row, is_lease_over=False, is_page_due=False))
        return self


def _row(number: int, topic: str = "a", unit: int | None = None) -> OutboxRow:
    return OutboxRow(number, unit, topic, None, b"")


def test_first_claim_names_home_and_holder() -> None:
    played = Played().begin()
    played.answer(Read, Waiting([_row(3), _row(4), _row(6)]))
    claim = played.answer(NewTxid, "t1")
    assert claim == Claim(ROW._replace(home="home", claim="t1", ids=((3, 4), (6, 6)), holder="me"), (), ())
    sent = played.answer(Claim, True)
    assert isinstance(sent, Send)
    assert (sent.row.last, len(sent.rows)) == (None, 3)


def test_rows_of_a_taken_page_go_with_the_next_claim() -> None:
    played = Played().begin()
    played.answer(Read, Waiting([_row(3)]))
    claimed = played.answer(NewTxid, "t1")
    assert isinstance(claimed, Claim)
    played.answer(Claim, True)
    played.answer(Send, Answer.TAKEN)
    read = played.answer(Lock, Locked(claimed.row, is_lease_over=False, is_page_due=False))
    assert read == Read(((3, 3),), 4)
    claim = played.answer(Read, Waiting([]))
    assert claim == Claim(claimed.row._replace(last="t1", claim=None, ids=()), (), ())


def test_idle_relay_writes_nothing() -> None:
    row = ROW._replace(home="home", holder="me")
    played = Played().begin(row)
    assert played.answer(Read, Waiting([])) == Unlock()
    assert played.answer(Unlock) == Pause(Why.IDLE)


def test_page_that_is_due_is_sent_empty() -> None:
    row = ROW._replace(home="home", holder="me")
    played = Played().begin(row)
    played.answer(Read, Waiting([]))
    played.answer(Unlock)
    played.answer(Pause)
    played.answer(Lock, Locked(row, is_lease_over=False, is_page_due=True))
    played.answer(Read, Waiting([]))
    played.answer(NewTxid, "t1")
    sent = played.answer(Claim, True)
    assert isinstance(sent, Send)
    assert sent.rows == ()


def test_unit_larger_than_a_page_doubles_what_is_read() -> None:
    played = Played(page_rows=2).begin()
    assert played.answer(Read, Waiting([_row(1, unit=7), _row(2, unit=7)], cut={7})) == Read((), 4, 2 << 20)
    played.answer(Read, Waiting([_row(1, unit=7), _row(2, unit=7), _row(3, unit=7)]))
    claim = played.answer(NewTxid, "t1")
    assert isinstance(claim, Claim)
    assert claim.row.ids == ((1, 3),)


def test_topics_are_asked_anew_before_a_row_is_parked() -> None:
    played = Played().begin()
    rows = [_row(1, "new")]
    claim = played.answer(Read, Waiting(rows))
    assert claim == Claim(ROW._replace(home="home", holder="me"), (), tuple(rows)), "they have just been asked for"
    played = Played().begin(topics=("a", "b"))
    played.answer(Read, Waiting([_row(1)]))
    claimed = played.answer(NewTxid, "t1")
    assert isinstance(claimed, Claim)
    played.answer(Claim, True)
    played.answer(Send, Answer.TAKEN)
    played.answer(Lock, Locked(claimed.row, is_lease_over=False, is_page_due=False))
    assert played.answer(Read, Waiting(rows)) == Unlock()
    played.answer(Unlock)
    played.answer(Lock, Locked(claimed.row, is_lease_over=False, is_page_due=False))
    played.answer(Unlock)
    assert isinstance(played.step, Topics)


def test_unit_is_parked_only_when_it_was_refused_alone() -> None:
    played, rows = Played(page_rows=2).begin(), [_row(1), _row(2)]
    claimed: object = None
    for txid, sent in (("t1", rows), ("t2", rows[:1])):
        played.answer(Read, Waiting(rows))
        claimed = played.answer(NewTxid, txid)
        assert isinstance(claimed, Claim)
        assert claimed.bad == ()
        asked = played.answer(Claim, True)
        assert isinstance(asked, Send)
        assert list(asked.rows) == sent
        locked = Locked(claimed.row, is_lease_over=False, is_page_due=False)
        played.answer(Send, Answer.REFUSED)
        for kind, value in (
            (Lock, locked),
            (Unlock, None),
            (Outcome, Told.ROLLED_BACK),
            (Lock, locked),
            (Unlock, None),
        ):
            played.answer(kind, value)
        played.answer(Topics, ("a",))
        played.answer(Lock, locked)
    claim = played.answer(Read, Waiting(rows))
    assert isinstance(claim, Claim)
    assert list(claim.bad) == rows[:1]


def test_another_relay_with_a_lease_is_waited_for() -> None:
    row = ROW._replace(home="home", holder="other")
    played = Played()
    played.answer(Peek, row)
    played.answer(Connect, "home")
    assert played.answer(Lock, Locked(row, is_lease_over=False, is_page_due=False)) == Unlock()
    assert played.answer(Unlock) == Pause(Why.HELD)
