"""A session's messages commit with its rows, and go with what is rolled back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, MetaData, create_engine, event, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from tests.sqlalchemy_programs import Base, Order, Program, outbox, sqlite_engine
from txmq.errors import ConfigError, TransactionStateError
from txmq.outbox.outbox import UNIT_ROWS_MAX
from txmq.sqlalchemy import Outbox
from txmq.sqlalchemy import outbox as module

SEEDS = 400
INSERT = "INSERT INTO txmq_outbox"


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = sqlite_engine()
    Base.metadata.create_all(made)
    yield made
    made.dispose()


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    with Session(engine) as made:
        yield made


def values(session: Session) -> list[bytes]:
    return list(session.scalars(select(outbox.messages.c.value).order_by(outbox.messages.c.id)))


def statements_of(engine: Engine) -> list[str]:
    found = list[str]()
    event.listen(engine, "before_cursor_execute", lambda *given: found.append(" ".join(given[2].split()[:3])))
    event.listen(engine, "commit", lambda _: found.append("COMMIT"))
    return found


def send(session: Session, *sent: bytes) -> None:
    for value in sent:
        outbox.send(session, "orders", value)


def test_rows_are_messages_after_random_programs() -> None:
    told = 0
    for seed in range(SEEDS):
        engine = sqlite_engine()
        Base.metadata.create_all(engine)
        program = Program(seed, engine)
        try:
            program.run()
            told += program.check()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        finally:
            engine.dispose()
    assert told > SEEDS


def test_messages_are_one_insert_after_the_flush(engine: Engine, session: Session) -> None:
    statements = statements_of(engine)
    send(session, b"1")
    session.add(Order(id=1))
    send(session, b"2")
    session.commit()
    found = [statement for statement in statements if statement.startswith(("INSERT", "COMMIT"))]
    assert found == ["INSERT INTO orders", INSERT, "COMMIT"]
    assert values(session) == [b"1", b"2"]
    assert len(set(session.scalars(select(outbox.messages.c.unit)))) == 1


def test_sending_asks_the_database_nothing(engine: Engine, session: Session) -> None:
    statements = statements_of(engine)
    send(session, b"1")
    assert statements == []
    session.rollback()
    assert values(session) == []


def test_messages_of_a_unit_come_in_statements_of_200(engine: Engine, session: Session) -> None:
    statements = statements_of(engine)
    send(session, *(b"%d" % number for number in range(450)))
    session.commit()
    assert statements.count(INSERT) == 3
    assert values(session) == [b"%d" % number for number in range(450)]


def test_session_that_sends_nothing_is_not_flushed_early(session: Session) -> None:
    new = list[int]()
    event.listen(session, "before_commit", lambda session: new.append(len(session.new)))
    session.add(Order(id=1))
    session.commit()
    assert new == [1]


def test_savepoint_that_is_rolled_back_drops_its_messages(session: Session) -> None:
    send(session, b"1")
    savepoint = session.begin_nested()
    send(session, b"2")
    with session.begin_nested():
        send(session, b"3")
    savepoint.rollback()
    send(session, b"4")
    session.commit()
    assert values(session) == [b"1", b"4"]


def test_failed_flush_in_a_savepoint_drops_its_messages(session: Session) -> None:
    session.add(Order(id=1))
    session.flush()
    session.expunge_all()

    def fail() -> None:
        with session.begin_nested():
            send(session, b"lost")
            session.add(Order(id=1))

    with pytest.raises(IntegrityError):
        fail()
    send(session, b"kept")
    session.commit()
    assert values(session) == [b"kept"]


def test_transaction_commits_with_a_savepoint_open(session: Session) -> None:
    transaction = session.begin()
    send(session, b"1")
    session.begin_nested()
    send(session, b"2")
    session.begin_nested()
    send(session, b"3")
    transaction.commit()
    assert values(session) == [b"1", b"2", b"3"]


def test_savepoint_commits_with_an_inner_one_open(session: Session) -> None:
    savepoint = session.begin_nested()
    session.begin_nested()
    send(session, b"1")
    savepoint.commit()
    assert values(session) == []
    session.rollback()
    assert values(session) == []


def test_message_of_a_later_listener_is_written(session: Session) -> None:
    event.listen(session, "before_commit", lambda session: send(session, b"late"))
    session.commit()
    assert values(session) == [b"late"]


def test_message_of_a_listener_to_the_last_flush_is_written(session: Session) -> None:
    def change(session: Session) -> None:
        session.add(Order(id=2))

    event.listen(session, "before_commit", change)
    event.listen(session, "after_flush", lambda session, _: send(session, b"%d" % len(session.new)))
    session.add(Order(id=1))
    send(session, b"sent")
    session.commit()
    assert values(session) == [b"sent", b"1", b"1"]
    assert len(set(session.scalars(select(outbox.messages.c.unit)))) == 1


def test_savepoint_within_a_flush_keeps_its_messages(session: Session) -> None:
    def tell(session: Session, _context: Any) -> None:
        with session.begin_nested():
            send(session, b"1")

    event.listen(session, "after_flush", tell)
    session.add(Order(id=1))
    session.flush()
    session.commit()
    assert values(session) == [b"1"]


def test_commit_that_failed_and_is_repeated_writes_once(engine: Engine, session: Session) -> None:
    failures = [KeyError()]

    def fail(_session: Session) -> None:
        if failures:
            raise failures.pop()

    event.listen(session, "before_commit", fail)
    send(session, b"1")
    with pytest.raises(KeyError):
        session.commit()
    statements = statements_of(engine)
    send(session, b"2")
    assert statements == []
    session.commit()
    assert values(session) == [b"1", b"2"]
    assert len(set(session.scalars(select(outbox.messages.c.unit)))) == 1


@pytest.mark.parametrize("when", ["after_commit", "after_rollback"])
def test_transaction_that_has_ended_takes_no_message(session: Session, when: str) -> None:
    refused = list[Exception]()

    def late(session: Session) -> None:
        with pytest.raises(TransactionStateError, match="has ended") as told:
            send(session, b"late")
        refused.append(told.value)

    event.listen(session, when, late)
    session.add(Order(id=1))
    session.flush()
    session.commit() if when == "after_commit" else session.rollback()
    assert len(refused) == 1


def test_transaction_with_a_failed_flush_takes_no_message(session: Session) -> None:
    session.add(Order(id=1))
    session.commit()
    session.expunge_all()
    session.add(Order(id=1))
    with pytest.raises(IntegrityError):
        session.flush()
    with pytest.raises(TransactionStateError, match=r"call rollback\(\)"):
        send(session, b"1")
    session.rollback()
    send(session, b"2")
    session.commit()
    assert values(session) == [b"2"]


def test_message_that_was_left_out_is_told(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_is_committing", lambda _session: False)  # as if SQLAlchemy told no more
    transaction = session.begin()
    session.begin_nested()
    send(session, b"1")
    with pytest.raises(TransactionStateError, match="without 1 messages"):
        transaction.commit()


def test_transaction_has_at_most_10000_messages(session: Session) -> None:
    send(session, *[b""] * (UNIT_ROWS_MAX - 1))
    session.begin_nested()
    send(session, b"")
    with pytest.raises(ConfigError, match="more than the 10000 of a unit"):
        send(session, b"")
    session.rollback()


def test_transaction_over_the_bytes_of_a_unit_is_refused(session: Session) -> None:
    small = Outbox(MetaData(), unit_bytes_max=9)
    small.send(session, "orders", b"1234", b"k")
    session.begin_nested()
    small.send(session, "orders", b"1234")
    with pytest.raises(ConfigError, match="10 bytes of messages are more than the 9 of a unit"):
        small.send(session, "orders", b"1")
    session.rollback()
    small.send(session, "orders", b"123456789")


def test_nothing_is_kept_after_a_transaction(session: Session) -> None:
    for end in (session.commit, session.rollback, session.close):
        send(session, b"1")
        end()
        assert session.info == {}


def test_session_in_an_outer_transaction_goes_with_it(engine: Engine) -> None:
    with engine.connect() as connection:
        for mode in ("create_savepoint", "rollback_only"):
            outer = connection.begin()
            with Session(connection, join_transaction_mode=mode) as session:
                send(session, b"1")
                session.commit()
                assert values(session) == [b"1"]
            outer.rollback()
        assert connection.execute(select(outbox.messages)).all() == []


def test_message_goes_by_the_engine_that_is_named() -> None:
    engines = [sqlite_engine(), sqlite_engine()]
    for engine in engines:
        Base.metadata.create_all(engine)
    with Session(binds={Order: engines[0]}) as session:
        with pytest.raises(ConfigError, match="bind=engine"):
            send(session, b"1")
        session.add(Order(id=1))
        outbox.send(session, "orders", b"1", bind=engines[0])
        outbox.send(session, "orders", b"2", bind=engines[1])
        session.commit()
    for engine, value in zip(engines, (b"1", b"2"), strict=True):
        with Session(engine) as session:
            assert values(session) == [value]
        engine.dispose()


def test_session_without_an_engine_is_refused() -> None:
    with Session() as session, pytest.raises(ConfigError, match="has no engine"):
        send(session, b"1")


def test_engine_in_autocommit_is_refused_by_the_commit() -> None:
    engine = create_engine("sqlite://", isolation_level="AUTOCOMMIT")
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        send(session, b"1")
        with pytest.raises(TransactionStateError, match="AUTOCOMMIT"):
            session.commit()
        session.rollback()
        assert values(session) == []
    engine.dispose()


def test_session_without_autobegin_must_begin_first(engine: Engine) -> None:
    with Session(engine, autobegin=False) as session:
        with pytest.raises(TransactionStateError, match="autobegin"):
            send(session, b"1")
        with session.begin():
            send(session, b"1")
        with session.begin():
            assert values(session) == [b"1"]


def test_commit_wakes_the_relays_and_a_rollback_does_not(session: Session) -> None:
    woken = list[str]()

    def wake() -> None:
        woken.append("woken")

    outbox.add_relay(wake)
    try:
        send(session, b"1")
        session.rollback()
        with session.begin_nested():
            send(session, b"2")
        assert woken == []
        session.commit()
        assert woken == ["woken"]
    finally:
        outbox.remove_relay(wake)
