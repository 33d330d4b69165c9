"""What users of Django do: commit, roll back, hooks, savepoints, requests, and tests of their own."""

# ruff: noqa: PT027  Django's own cases

from __future__ import annotations

from typing import Any

from django.db import DatabaseError, IntegrityError, close_old_connections, connection, transaction
from django.test import TestCase, TransactionTestCase

import txmq
from examples.django_last_resource import together
from tests.examples.django_shop.models import Order
from tests.examples.django_shop.views import TOPIC, client, orders_db, producer


def sent(since: int = 0) -> list[str]:
    """The messages that can be read."""
    return [(message.value or b"").decode() for message in client().browse(TOPIC)][since:]


def rows() -> list[str]:
    """The orders as another connection sees them."""
    other = connection.copy()
    try:
        with other.cursor() as cursor:
            cursor.execute("SELECT customer FROM django_shop_order ORDER BY id")
            return [customer for (customer,) in cursor.fetchall()]
    finally:
        other.close()


class Shop:
    """What all cases share."""

    def setUp(self) -> None:
        self.before = len(sent())
        self.hooks: list[str] = []

    def order(self, customer: str, tx: Any) -> None:
        """A row, a message, and a hook."""
        Order.objects.create(customer=customer)
        tx.send(TOPIC, customer.encode())
        transaction.on_commit(lambda: self.hooks.append(customer))

    def found(self) -> tuple[list[str], list[str], list[str]]:
        """Rows, messages, hooks that ran; Django's connection must be as it was before."""
        assert connection.get_autocommit()
        assert not connection.in_atomic_block
        assert not connection.needs_rollback
        assert not connection.run_on_commit
        return rows(), sent(self.before), self.hooks


class CommitCase(Shop, TransactionTestCase):  # type: ignore[misc]  # Django has no types
    """Blocks that really commit."""

    def setUp(self) -> None:
        orders_db.install(client())
        super().setUp()

    def test_block_commits_row_and_message_then_runs_its_hooks(self) -> None:
        seen: list[Any] = []
        with together(producer(), orders_db) as tx:
            self.order("ada", tx)
            transaction.on_commit(lambda: seen.append((connection.get_autocommit(), rows(), tx.outcome)))
            assert rows() == []
            assert self.hooks == []
        assert self.found() == (["ada"], ["ada"], ["ada"])
        assert seen == [(True, ["ada"], txmq.Outcome.COMMITTED)]

    def test_hooks_of_a_rolled_back_block_never_run(self) -> None:
        with self.assertRaisesMessage(ValueError, "planned"), together(producer(), orders_db) as tx:
            self.order("ada", tx)
            raise ValueError("planned")
        assert self.found() == ([], [], [])
        with transaction.atomic():
            transaction.on_commit(lambda: self.hooks.append("plain"))
        with together(producer(), orders_db) as tx:
            self.order("bob", tx)
        assert self.found() == (["bob"], ["bob"], ["plain", "bob"])

    def test_hooks_of_a_committed_block_run_once(self) -> None:
        for customer in ("ada", "bob"):
            with together(producer(), orders_db) as tx:
                self.order(customer, tx)
        with transaction.atomic():
            Order.objects.create(customer="plain")
        assert self.found() == (["ada", "bob", "plain"], ["ada", "bob"], ["ada", "bob"])

    def test_refusal_of_the_broker_rolls_back_in_django(self) -> None:
        client().topics.create("gone")
        producer().send("gone", b"so that its producer knows it")
        with self.assertRaises(txmq.RolledBackError), together(producer(), orders_db) as tx:
            self.order("ada", tx)
            tx.send("gone", b"refused when it is prepared")
            client().topics.delete("gone")
        assert self.found() == ([], [], [])

    def test_failed_savepoint_takes_its_rows_and_hooks_with_it(self) -> None:
        with together(producer(), orders_db) as tx:
            self.order("ada", tx)
            with self.assertRaises(IntegrityError), transaction.atomic():
                transaction.on_commit(lambda: self.hooks.append("lost"))
                Order.objects.create(customer="ada")
            with transaction.atomic():
                self.order("bob", tx)
        assert self.found() == (["ada", "bob"], ["ada", "bob"], ["ada", "bob"])

    def test_set_rollback_undoes_the_block_without_an_error(self) -> None:
        with together(producer(), orders_db) as tx:
            self.order("ada", tx)
            transaction.set_rollback(True)
        assert tx.outcome is txmq.Outcome.ROLLED_BACK
        assert self.found() == ([], [], [])

    def test_failure_that_was_caught_outside_of_savepoint_undoes_block(self) -> None:
        with together(producer(), orders_db) as tx:
            self.order("ada", tx)
            with self.assertRaises(IntegrityError), transaction.atomic(savepoint=False):
                Order.objects.create(customer="ada")
        assert tx.outcome is txmq.Outcome.ROLLED_BACK
        assert self.found() == ([], [], [])

    def test_inside_of_another_transaction_it_is_refused_before_anything_happens(self) -> None:
        with (
            self.assertRaisesMessage(RuntimeError, "durable"),
            transaction.atomic(),
            together(producer(), orders_db) as tx,
        ):
            self.order("ada", tx)
        assert self.found() == ([], [], [])

    def test_lost_connection_undoes_block_and_next_one_has_another(self) -> None:
        with self.assertRaises(DatabaseError), together(producer(), orders_db) as tx:
            self.order("ada", tx)
            connection.connection.close()  # as if the server had gone
            self.order("bob", tx)
        with together(producer(), orders_db) as tx:
            self.order("cleo", tx)
        assert self.found() == (["cleo"], ["cleo"], ["cleo"])

    def test_connections_past_their_age_are_closed_between_blocks(self) -> None:
        for customer in ("ada", "bob"):
            with together(producer(), orders_db) as tx:
                self.order(customer, tx)
            close_old_connections()  # as at the end of each request
            assert connection.connection is None
        assert self.found() == (["ada", "bob"], ["ada", "bob"], ["ada", "bob"])

    def test_a_request_under_atomic_requests_is_one_act(self) -> None:
        self.client.raise_request_exception = False
        assert self.client.post("/take/ada").content == b"committed"
        assert self.client.post("/fail/bob").status_code == 500
        assert self.client.post("/inside/cleo").status_code == 500  # a block inside of the request's transaction
        assert self.client.post("/take/ada").status_code == 500  # a duplicate
        assert self.client.post("/take/dora").content == b"committed"
        assert (rows(), sent(self.before)) == (["ada", "dora"], ["ada", "dora"])


class IsolatedCase(Shop, TestCase):  # type: ignore[misc]  # Django has no types
    """Blocks in a TestCase: its rows are its own, and gone after it."""

    def test_one_order(self) -> None:
        with self.captureOnCommitCallbacks(execute=True) as callbacks, together(producer(), orders_db) as tx:
            self.order("ada", tx)
        assert (Order.objects.count(), sent(self.before)) == (1, ["ada"])
        assert (len(callbacks), self.hooks, rows()) == (1, ["ada"], [])

    def test_order_sent_again(self) -> None:
        assert Order.objects.count() == 0
        assert self.client.post("/take/ada").status_code == 200
        assert (Order.objects.count(), sent(self.before), rows()) == (1, ["ada"], [])

    def test_block_that_fails_leaves_rest_of_test_alone(self) -> None:
        Order.objects.create(customer="before")
        with self.assertRaisesMessage(ValueError, "planned"), together(producer(), orders_db) as tx:
            self.order("ada", tx)
            raise ValueError("planned")
        with together(producer(), orders_db) as tx:
            self.order("bob", tx)
            transaction.set_rollback(True)
        assert list(Order.objects.values_list("customer", flat=True)) == ["before"]
        assert (sent(self.before), self.hooks) == ([], [])
