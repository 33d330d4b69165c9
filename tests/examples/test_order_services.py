"""The order services keep rows and messages equal: requests that fail, time out, are repeated; and kills of all parts.

Django with ATOMIC_REQUESTS, FastAPI with AsyncSession on asyncpg, Flask-SQLAlchemy on MariaDB by gunicorn's forked
workers, and psycopg alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.examples.order_services import SERVICES, Customers, OrderService, running
from txmq.testing.processes.mariadb import MariaDB
from txmq.testing.processes.postgresql import PostgreSQL


@pytest.fixture(scope="module", params=sorted(SERVICES))
def service(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, mariadb: MariaDB, postgresql: PostgreSQL
) -> Iterator[OrderService]:
    with running(request.param, tmp_path_factory.mktemp(request.param), mariadb, postgresql) as started:
        yield started


def test_requests_that_fail_leave_neither_rows_nor_messages(service: OrderService) -> None:
    assert [service.put(number) for number in (1, 1, 2)] == [201, 409, 201]
    assert service.put(3, "nobody") == 404
    assert service.put(4, articles=["none"]) == 422
    with service.locked("ada"):
        assert service.ask(5).status_code == 503  # waits for the row longer than it may
        assert service.put(6, "ben") == 201
    assert service.put(5) == 201
    assert service.compare() == {1, 2, 5, 6}


def test_orders_are_told_once_in_order_through_kills(service: OrderService) -> None:
    with Customers(service, first=1000) as customers:
        customers.go_on()
        service.place.broker.kill()
        customers.go_on()  # no order needs the broker
        service.place.broker.start()
        customers.go_on()
        service.server.kill()
        service.server.start()
        customers.go_on()
        if service.relay is not None:
            service.relay.kill()
            customers.go_on()
            service.relay.start()
        service.web.kill()
        service.start_web()
        service.end_the_lease()
        customers.go_on()
    assert customers.wrong == []
    assert customers.accepted <= service.compare()
