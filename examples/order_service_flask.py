"""An order service with Flask-SQLAlchemy on MariaDB: messages by the outbox.

::

    pip install '.[sqlalchemy,mysql]' flask-sqlalchemy gunicorn
    export ORDERS_DB='mysql+mysqldb://shop:...@127.0.0.1/shop'
    flask --app examples.order_service_flask init-db
    gunicorn --preload --workers 2 --threads 4 'examples.order_service_flask:create_app()' &
    curl --retry 5 --retry-connrefused -X PUT localhost:8000/orders/42 \\
        -H 'content-type: application/json' -d '{"customer": "ada", "articles": ["tea", "cup"]}'

The request commits its session; it needs no broker, and no client of one. ``txmq outbox run`` takes what was committed
to the broker (docs/how-to/flask.md).
"""

from __future__ import annotations

import os
from typing import Any

from flask import Flask, request
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import ForeignKey, String
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from werkzeug.exceptions import NotFound, UnprocessableEntity

from txmq.errors import OutboxFullError
from txmq.sqlalchemy import Outbox

Answer = tuple[dict[str, Any], int] | tuple[dict[str, Any], int, dict[str, str]]


class Base(DeclarativeBase):
    """The service's tables."""


class Customer(Base):
    """A customer; the row is the lock that keeps a customer's messages in order."""

    __tablename__ = "shop_customers"
    name: Mapped[str] = mapped_column(String(40), primary_key=True)
    orders: Mapped[int] = mapped_column(default=0)


class Article(Base):
    """What can be ordered."""

    __tablename__ = "shop_articles"
    name: Mapped[str] = mapped_column(String(40), primary_key=True)


class Order(Base):
    """A customer's ``nth`` order."""

    __tablename__ = "shop_orders"
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    customer: Mapped[str] = mapped_column(ForeignKey(Customer.name))
    nth: Mapped[int]


class Line(Base):
    """An article of an order."""

    __tablename__ = "shop_lines"
    number: Mapped[int] = mapped_column(ForeignKey(Order.number), primary_key=True)
    article: Mapped[str] = mapped_column(ForeignKey(Article.name), primary_key=True)


db = SQLAlchemy(metadata=Base.metadata)
outbox = Outbox(Base.metadata, "orders-db", codec="json")


def take(number: int, name: str, articles: list[str]) -> list[str]:
    """The order, and a line for each article that there is; the articles that there are not.

    Raises:
        IntegrityError: the order exists; nothing happened.
        HTTPException: there is no such customer, or none of the articles; nothing happened.
    """
    session = db.session
    customer = session.get(Customer, name, with_for_update=True)
    if customer is None:
        raise NotFound("no such customer")
    key, nth = name.encode(), customer.orders + 1
    customer.orders = nth
    session.add(Order(number=number, customer=name, nth=nth))
    outbox.send(session, "orders", {"order": number, "nth": nth}, key=key)
    session.flush()
    missing = []
    for article in articles:
        try:
            with session.begin_nested():  # a line that fails takes its message along
                session.add(Line(number=number, article=article))
                outbox.send(session, "orders", {"order": number, "article": article}, key=key)
        except IntegrityError:
            missing.append(article)
    if missing and missing == articles:
        raise UnprocessableEntity("no such article")
    session.commit()
    return missing


def prepare() -> None:
    """Create the tables, and what the shop begins with; harmless to repeat."""
    Base.metadata.create_all(db.engine)
    if db.session.get(Customer, "ada") is None:
        db.session.add_all(Customer(name=name) for name in ("ada", "ben", "cleo"))
        db.session.add_all(Article(name=name) for name in ("cup", "tea"))
        db.session.commit()


def create_app() -> Flask:
    """One application. It connects with its first request, so workers may be forked from it."""
    app = Flask(__name__)
    lock_wait = f"SET SESSION innodb_lock_wait_timeout = {int(os.environ.get('REQUEST_S', '10'))}"
    app.config["SQLALCHEMY_DATABASE_URI"] = os.environ["ORDERS_DB"]
    app.config["SQLALCHEMY_ENGINE_OPTIONS"] = {"pool_pre_ping": True, "connect_args": {"init_command": lock_wait}}
    db.init_app(app)
    app.cli.command("init-db")(prepare)

    @app.put("/orders/<int:number>")
    def put(number: int) -> Answer:
        order = request.get_json()
        return {"missing": take(number, order["customer"], order["articles"])}, 201

    @app.errorhandler(IntegrityError)
    def exists(_error: Exception) -> Answer:
        return {"error": "this order exists"}, 409

    @app.errorhandler(DBAPIError)
    @app.errorhandler(OutboxFullError)
    def again(_error: Exception) -> Answer:  # with the same number
        return {"error": "no order is taken now"}, 503, {"retry-after": "1"}

    return app
