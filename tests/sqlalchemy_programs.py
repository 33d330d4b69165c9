"""Random programs of one session: orders with a message each, savepoints, failures; in the end rows == messages."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from sqlalchemy import Engine, create_engine, event, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, SessionTransaction, mapped_column

from txmq.sqlalchemy import Outbox

STEPS_MAX = 5
DEPTH_MAX = 3


class Base(DeclarativeBase):
    """The application's tables."""


class Order(Base):
    """An order. A listener sends the message of one that ``tells_itself``."""

    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    tells_itself: Mapped[bool] = mapped_column(default=False)


outbox = Outbox(Base.metadata, "orders-db")


def sqlite_engine(url: str = "sqlite://", **options: Any) -> Engine:
    """An engine on which savepoints work: SQLAlchemy's own recipe, "pysqlite: Serializable isolation / Savepoints"."""
    engine = create_engine(url, **options)

    @event.listens_for(engine, "connect")
    def _connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def _begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN")

    return engine


class Undo(Exception):
    """What an application raises in a block."""


class Program:
    """One seed's."""

    def __init__(self, seed: int, engine: Engine, first_id: int = 1) -> None:
        self.random, self.engine, self.next_id = random.Random(seed), engine, first_id
        self.transaction, self.transaction_of = 0, dict[int, int]()
        self.late = 0
        self.fails_late = False

    def run(self, transactions: int = 4) -> None:
        """Several transactions in one session."""
        with Session(self.engine) as session:
            event.listen(session, "after_flush", self._after_flush)
            event.listen(session, "before_commit", self._before_commit)
            for _ in range(transactions):
                self.transaction += 1
                self._transaction(session)

    def check(self) -> int:
        """Rows == messages, and a transaction is a unit. Returns how many."""
        with Session(self.engine) as session:
            rows = session.scalars(select(Order.id).order_by(Order.id)).all()
            found = session.execute(select(outbox.messages.c.value, outbox.messages.c.unit)).all()
        assert sorted(int(value) for value, _ in found) == rows
        units = {(self.transaction_of[int(value)], unit) for value, unit in found}
        assert len(units) == len({unit for _, unit in units}) == len({number for number, _ in units})
        return len(rows)

    # --- one transaction ---------------------------------------------------------------------------------------------

    def _transaction(self, session: Session) -> None:
        root = session.begin()
        try:
            self._body(session, 0)
            self._end(session, root)
        except (Undo, IntegrityError):
            session.rollback()

    def _end(self, session: Session, root: SessionTransaction) -> None:
        self.late, self.fails_late = self.random.choice((0, 0, 1, 2)), self.random.random() < 0.1
        ends: list[Callable[[], None]] = [session.commit, session.commit, root.commit, session.rollback, session.close]
        end = self.random.choice(ends)
        try:
            end()
        except Undo:  # of a listener, after the messages were written
            self._order(session)
            session.commit()

    def _body(self, session: Session, depth: int) -> None:
        for _ in range(self.random.randrange(STEPS_MAX)):
            step = self.random.choice((self._order, self._order, self._flush, self._duplicate, self._savepoint))
            if step == self._savepoint:
                if depth < DEPTH_MAX:
                    self._savepoint(session, depth + 1)
            elif step != self._duplicate or self.random.random() < (0.5 if depth else 0.1):
                step(session)  # type: ignore[call-arg]

    def _savepoint(self, session: Session, depth: int) -> None:
        way = self.random.choice(("block", "block", "raise", "commit", "rollback", "open"))
        if way in ("block", "raise"):
            try:
                with session.begin_nested():
                    self._body(session, depth)
                    if way == "raise":
                        raise Undo
            except (Undo, IntegrityError):
                pass
            return
        savepoint = session.begin_nested()
        try:
            self._body(session, depth)
        except IntegrityError:
            savepoint.rollback()
            return
        if way != "open":
            savepoint.commit() if way == "commit" else savepoint.rollback()

    def _order(self, session: Session) -> None:
        number = self._new()
        if self.random.random() < 0.3:
            session.add(Order(id=number, tells_itself=True))
            return
        row_first = self.random.random() < 0.5
        if row_first:
            session.add(Order(id=number))
        outbox.send(session, "orders", b"%d" % number)
        if not row_first:
            session.add(Order(id=number))

    def _duplicate(self, session: Session) -> None:
        session.flush()
        taken = session.scalars(select(Order.id)).first()
        if taken is None:
            return
        session.expunge_all()
        session.add(Order(id=taken))
        outbox.send(session, "orders", b"0")
        session.flush()

    def _flush(self, session: Session) -> None:
        session.flush()

    def _new(self) -> int:
        number = self.next_id
        self.next_id += 1
        self.transaction_of[number] = self.transaction
        return number

    # --- listeners ---------------------------------------------------------------------------------------------------

    def _after_flush(self, session: Session, _context: Any) -> None:
        for order in session.new:
            if isinstance(order, Order) and order.tells_itself:
                outbox.send(session, "orders", b"%d" % order.id)

    def _before_commit(self, session: Session) -> None:
        """Of the application, called after txmq's own."""
        if session.in_nested_transaction():
            return
        if self.fails_late:
            self.fails_late = False
            raise Undo
        while self.late:
            self.late -= 1
            if self.random.random() < 0.5:
                with session.begin_nested():
                    self._order(session)
            else:
                self._order(session)
