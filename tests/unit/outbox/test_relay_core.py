"""What the relay's core asks for, step by step, where the model does not look."""

from __future__ import annotations

from typing import Any

from txmq.outbox.page import REFUSED, UNKNOWN_TOPIC, OutboxRow, Waiting
from txmq.outbox.relay_core import (
    Answer,
    Away,
    Claim,
    ClaimOutcome,
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
    Topics,
    Unlock,
    Why,
)

ROW = RelayRow("ab" * 16)


def locked(row: RelayRow, *, is_due: bool = False) -> Locked:
    """Under the lock, with a lease that is in force."""
    return Locked(row, is_lease_over=False, is_page_due=is_due)


class Played:
    """A core, driven by hand."""

    def __init__(self, page_rows: int = 4) -> None:
        self.turns = RelayCore("me", page_rows).turns()
        self.step: Step = next(self.turns)

    def answer(self, kind: type[Any], value: object = None) -> Step:
        """The step is of this kind; answer it, and take the next one. No home is away."""
        assert isinstance(self.step, kind), self.step
        self.step = self.turns.send(value)
        if isinstance(self.step, Away):
            self.step = self.turns.send({})
        return self.step

    def claimed(self) -> RelayRow:
        """The claim is committed."""
        claim = self.step
        assert isinstance(claim, Claim)
        self.answer(Claim, True)
        return claim.row

    def settled(self, row: RelayRow, told: ClaimOutcome = ClaimOutcome.ROLLED_BACK) -> None:
        """The claim was not taken, and its outcome is asked for."""
        for kind, value in ((Lock, locked(row)), (Unlock, None), (Outcome, told)):
            self.answer(kind, value)

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
    assert claim == Claim(ROW._replace(home="home", claim="t1", ids=((3, 4), (6, 6)), holder="me"), ())
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
    assert claim == Claim(claimed.row._replace(last="t1", claim=None, ids=()), ())


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
    parked = ((rows[0], UNKNOWN_TOPIC),)
    assert claim == Claim(ROW._replace(home="home", holder="me"), parked), "they have just been asked for"
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


def refused_alone(played: Played, rows: list[OutboxRow]) -> RelayRow:
    """The page was halved until its first row was alone, and refused."""
    row = ROW
    for number in range(1 + len(rows) // 2):
        played.answer(Read, Waiting(rows))
        played.answer(NewTxid, f"t{number}")
        row = played.claimed()
        played.answer(Send, Answer.REFUSED)
        played.settled(row)
        played.answer(Lock, locked(row))
        played.answer(Unlock)
        played.answer(Topics, ("a",))
        played.answer(Lock, locked(row))
    return row


def test_unit_is_parked_when_a_page_without_it_is_taken() -> None:
    played, rows = Played(page_rows=2).begin(), [_row(1), _row(2)]
    refused_alone(played, rows)
    played.answer(Read, Waiting(rows))
    played.answer(NewTxid, "empty")
    row = played.claimed()
    assert isinstance(played.step, Send)
    assert played.step.rows == ()
    played.answer(Send, Answer.TAKEN)
    played.answer(Lock, locked(row))
    claim = played.answer(Read, Waiting(rows))
    assert isinstance(claim, Claim)
    assert claim.parked == ((rows[0], REFUSED),)


def test_nothing_is_parked_while_an_empty_page_is_refused_too() -> None:
    played, rows = Played(page_rows=2).begin(), [_row(1), _row(2)]
    refused_alone(played, rows)
    for number in range(3):
        played.answer(Read, Waiting(rows))
        played.answer(NewTxid, f"empty {number}")
        row = played.claimed()
        assert played.answer(Send, Answer.REFUSED) == Pause(Why.BROKER)
        played.answer(Pause)
        played.settled(row)
        played.answer(Lock, locked(row))


def test_topic_that_has_changed_is_not_asked_at_once() -> None:
    played = Played().begin()
    played.answer(Read, Waiting([_row(1)]))
    played.answer(NewTxid, "t1")
    played.claimed()
    assert played.answer(Send, Answer.STALE) == Pause(Why.BROKER)


def test_home_that_another_relay_chose_is_gone_to() -> None:
    row = ROW._replace(home="another", last="t0", holder="other")
    played = Played()
    played.answer(Peek, ROW)
    played.answer(Connect, "home")
    played.answer(Lock, Locked(row, is_lease_over=True, is_page_due=True))
    played.answer(Unlock)
    assert played.answer(Peek, row) == Connect("another")


def test_line_waits_if_too_much_is_parked() -> None:
    row = ROW._replace(home="home", holder="me")
    played = Played().begin(row)
    assert played.answer(Read, Waiting([_row(1, "gone")], room=0)) == Unlock()
    assert played.answer(Unlock) == Pause(Why.FULL)


def test_page_is_larger_while_reading_is_slow() -> None:
    played, row, limits = Played(page_rows=2).begin(), ROW, list[int]()
    for is_slow in (True, True, True, True, False, False):
        assert isinstance(played.step, Read)
        limits.append(played.step.rows_max)
        played.answer(Read, Waiting([_row(1)], is_slow=is_slow))
        played.answer(NewTxid, f"t{len(limits)}")
        row = played.claimed()
        played.answer(Send, Answer.TAKEN)
        played.answer(Lock, locked(row))
    assert limits == [2, 4, 8, 8, 8, 2]


def test_topics_are_asked_for_again_when_they_are_old() -> None:
    row = ROW._replace(home="home", holder="me")
    played = Played().begin(row)
    played.answer(Read, Waiting([]))
    played.answer(Unlock)
    played.answer(Pause)
    played.answer(Lock, locked(row)._replace(are_topics_old=True))
    played.answer(Unlock)
    assert isinstance(played.step, Topics)


def test_another_relay_with_a_lease_is_waited_for() -> None:
    row = ROW._replace(home="home", holder="other")
    played = Played()
    played.answer(Peek, row)
    played.answer(Connect, "home")
    assert played.answer(Lock, Locked(row, is_lease_over=False, is_page_due=False)) == Unlock()
    assert played.answer(Unlock) == Pause(Why.HELD)
