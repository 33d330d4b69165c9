"""What users of ``txmq.django`` do; run by Django's test runner on each database."""

# ruff: noqa: PT027, PT009  Django's own cases

from __future__ import annotations

import io
import random
import warnings
from typing import Any
from unittest import mock

from django.contrib.auth.models import Permission, User
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.db import IntegrityError, connection, connections, transaction
from django.db.migrations.recorder import MigrationRecorder
from django.db.transaction import TransactionManagementError
from django.test import TestCase, TransactionTestCase, override_settings

import txmq
from tests.services.django_app.shop.models import Order
from tests.services.django_app.shop.views import TOPIC, order
from txmq.client.consumer.offsets.offset_store import OffsetPosition
from txmq.client.relay.relay import Relay
from txmq.client.transaction.current import enclosing
from txmq.django import apps, checks, offset_store, outbox, relay, send
from txmq.django.models import Parked
from txmq.django.outbox import connector
from txmq.django.testing import sent
from txmq.errors import ConfigError, FencedError, OutboxFullError, TransactionStateError
from txmq.outbox.outbox import Outbox
from txmq.runtime.caller import SEND_WATCHERS
from txmq.xa.database.dbapi import run

SLOT = ("orders", 0)


def messages(using: str = "default") -> list[str]:
    """What was sent, as another connection sees it."""
    other = connector(using)()
    try:
        found, _ = run(other, "SELECT value FROM txmq_outbox ORDER BY id")
        return [bytes(value).decode() for (value,) in found]
    finally:
        other.close()


def orders(using: str = "default") -> list[str]:
    """The rows, as another connection sees them."""
    other = connector(using)()
    try:
        return [str(customer) for (customer,) in run(other, "SELECT customer FROM shop_order ORDER BY id")[0]]
    finally:
        other.close()


class CommitCase(TransactionTestCase):  # type: ignore[misc]  # Django has no types
    """Transactions that really commit."""

    databases = ("default", "archive")

    def both(self, expected: list[str], using: str = "default") -> None:
        """Rows and messages."""
        self.assertEqual((orders(using), messages(using)), (expected, expected))

    def test_message_is_there_with_the_commit_of_its_row(self) -> None:
        with transaction.atomic():
            order("ada")
            self.both([])
        self.both(["ada"])
        with self.assertRaisesMessage(ValueError, "planned"), transaction.atomic():
            order("ben")
            raise ValueError("planned")
        self.both(["ada"])

    def test_savepoint_takes_its_messages_with_it(self) -> None:
        with transaction.atomic():
            order("ada")
            with self.assertRaises(IntegrityError), transaction.atomic():
                order("ben")
                order("ada")
            with transaction.atomic():
                order("cleo")
        self.both(["ada", "cleo"])

    def test_messages_of_a_transaction_are_one_unit(self) -> None:
        for names in (("ada", "ben"), ("cleo", "dora")):
            with transaction.atomic():
                with transaction.atomic():
                    order(names[0])
                order(names[1])
        units = [row.unit for row in sent()]
        self.assertEqual(units[0], units[1])
        self.assertEqual(units[2], units[3])
        self.assertNotEqual(units[0], units[2])
        self.assertNotIn(None, units)

    def test_unit_that_began_in_a_lost_savepoint_is_another(self) -> None:
        with transaction.atomic():
            with self.assertRaises(ValueError), transaction.atomic():
                order("ada")
                raise ValueError
            order("ben")
            with transaction.atomic():
                order("cleo")
        self.both(["ben", "cleo"])
        self.assertEqual(len({row.unit for row in sent()}), 1)
        self.assertEqual(connection.run_on_commit, [])

    def test_outside_of_atomic_it_is_refused_and_nothing_written(self) -> None:
        with self.assertRaisesMessage(TransactionStateError, "outside of atomic()"):
            send(TOPIC, b"alone")
        with transaction.atomic("archive"), self.assertRaisesMessage(TransactionStateError, "using='default'"):
            send(TOPIC, b"alone")
        connection.set_autocommit(False)
        try:
            with self.assertRaises(TransactionStateError):
                send(TOPIC, b"alone")
            connection.rollback()
        finally:
            connection.set_autocommit(True)
        self.both([])

    def test_transactions_that_a_project_commits_itself_share_no_unit(self) -> None:
        connection.set_autocommit(False)
        try:
            for customer in ("ada", "ben"):
                with transaction.atomic():
                    order(customer)
                connection.commit()
        finally:
            connection.set_autocommit(True)
        self.both(["ada", "ben"])
        self.assertEqual([row.unit for row in sent()], [None, None])

    def test_each_database_has_its_own_outbox(self) -> None:
        with self.assertRaises(ValueError), transaction.atomic(), transaction.atomic("archive"):
            order("ada")
            order("ada", "archive")
            raise ValueError
        with transaction.atomic():
            order("ben")
            with transaction.atomic("archive"):
                order("cleo", "archive")
        self.both(["ben"])
        self.both(["cleo"], "archive")

    def test_durable_block_commits_and_refuses_to_be_nested(self) -> None:
        with transaction.atomic(durable=True):
            order("ada")
        with self.assertRaises(RuntimeError), transaction.atomic():
            order("ben")
            with transaction.atomic(durable=True):
                order("cleo")
        self.both(["ada"])

    def test_requests_are_one_act(self) -> None:
        self.client.raise_request_exception = False
        asked = ("take/ada", "fail/ben", "take/ada", "take-back/cleo", "perhaps/ada")
        self.assertEqual([self.client.get(f"/{path}").status_code for path in asked], [200, 500, 500, 200, 200])
        self.both(["ada"])
        self.assertEqual(self.client.get("/perhaps/dora").content, b"taken")
        self.assertEqual((orders(), messages()), (["ada", "dora"], ["ada", "never", "dora"]))

    def test_statement_that_failed_refuses_what_follows(self) -> None:
        with transaction.atomic():
            order("ada")
        with transaction.atomic():
            with self.assertRaises(IntegrityError), transaction.atomic(savepoint=False):
                order("ada")
            outbox.outbox_of("default")._looked = float("-inf")
            with self.assertRaises(TransactionManagementError):
                send(TOPIC, b"never")
        self.both(["ada"])

    def test_random_savepoints_leave_as_many_rows_as_messages(self) -> None:
        chance = random.Random(34)
        for number in range(60):
            self._session(chance, f"{number}", 3)
        self.assertEqual(orders(), messages())
        self.assertGreater(len(orders()), 60)
        units: dict[bytes, set[int | None]] = {}
        for row in sent():
            units.setdefault(row.value.partition(b".")[0], set()).add(row.unit)
        self.assertEqual({len(of_one) for of_one in units.values()}, {1})
        self.assertEqual(len(set.union(*units.values())), len(units))

    def _session(self, chance: random.Random, name: str, depth: int) -> None:
        try:
            with transaction.atomic(savepoint=chance.random() < 0.8):
                for number in range(chance.randrange(4)):
                    order(f"{name}.{number}")
                    if depth:
                        self._session(chance, f"{name}.{number}", depth - 1)
                if chance.random() < 0.3:
                    raise ValueError
        except (ValueError, TransactionManagementError):
            if connection.in_atomic_block and connection.needs_rollback:
                raise TransactionManagementError from None

    def test_commits_wake_the_relays_of_their_database(self) -> None:
        with (
            mock.patch.object(Relay, "wake", autospec=True, side_effect=Relay.wake) as woken,
            txmq.connect("txmq://127.0.0.1:1", lazy=True) as client,
            relay(client),
        ):
            with transaction.atomic():
                order("ada")
                order("ben")
                self.assertEqual(woken.call_count, 0)
            self.assertEqual(woken.call_count, 1)
            with transaction.atomic("archive"):
                order("cleo", "archive")
            with transaction.atomic():
                order("dora")
                transaction.set_rollback(True)
            self.assertEqual(woken.call_count, 1)

    @override_settings(TXMQ={"ROWS_MAX": 2})  # type: ignore[untyped-decorator]
    def test_full_outbox_refuses_more(self) -> None:
        with transaction.atomic():
            for customer in ("ada", "ben", "cleo"):
                order(customer)
        outbox.outbox_of("default")._looked = float("-inf")
        with self.assertRaises(OutboxFullError), transaction.atomic():
            order("dora")
        self.both(["ada", "ben", "cleo"])

    @override_settings(TXMQ={"UNIT_BYTES_MAX": 8})  # type: ignore[untyped-decorator]
    def test_unit_over_the_bytes_is_refused_savepoints_counted_out(self) -> None:
        with transaction.atomic():
            send(TOPIC, b"ada")
            with self.assertRaises(ValueError), transaction.atomic():
                send(TOPIC, b"lost")
                raise ValueError
            send(TOPIC, b"ben", b"k")
            with self.assertRaisesMessage(ConfigError, "9 bytes of messages are more than the 8 of a unit"):
                send(TOPIC, b"12")
        self.assertEqual(messages(), ["ada", "ben"])

    @override_settings(TXMQ={"DURABILITY": "weak"})  # type: ignore[untyped-decorator]
    def test_project_may_accept_a_database_that_loses_commits(self) -> None:
        with txmq.connect("txmq://127.0.0.1:1", lazy=True) as client, relay(client) as running:
            self.assertEqual(running._database._durability, "weak")
        with mock.patch.object(checks, "_weakness", return_value="it forgets"):
            self.assertEqual(checks.check_durability(["default"]), [])
            with override_settings(TXMQ={}):
                self.assertEqual(len(checks.check_durability(["default"])), 1)

    def test_admin_releases_and_drops_whole_units_for_who_may(self) -> None:
        clerk = User.objects.create_user("clerk", is_staff=True)
        clerk.user_permissions.add(Permission.objects.get(codename="view_parked"))
        for unit in ("ab", "cd", "ef"):
            with transaction.atomic():
                for letter in unit:
                    send(TOPIC, letter.encode())
        rows = {row.value.decode(): row.id for row in sent()}
        with connection.cursor() as cursor:
            cursor.execute("INSERT INTO txmq_outbox_parked SELECT o.*, 'refused', 0 FROM txmq_outbox o")
            cursor.execute("DELETE FROM txmq_outbox")

        def post(action: str, *letters: str, **more: str) -> str:
            chosen = {"action": action, "_selected_action": [rows[letter] for letter in letters], **more}
            return str(self.client.post("/admin/txmq/parked/", chosen, follow=True).content)

        def may(*names: str) -> None:
            clerk.user_permissions.add(*Permission.objects.filter(codename__in=names))

        self.client.force_login(clerk)
        post("release", "a")
        post("drop", "a", confirmed="yes")
        self.assertEqual((messages(), Parked.objects.count()), ([], 6))
        may("release_parked")
        self.assertIn("2 messages wait again", post("release", "b"))
        post("drop", "c", confirmed="yes")
        self.assertEqual((messages(), Parked.objects.count()), (["a", "b"], 4))
        may("drop_parked")
        self.assertIn("deleted for good", post("drop", "c"))
        self.assertEqual(Parked.objects.count(), 4)
        self.assertIn("2 messages are dropped", post("drop", "c", confirmed="yes"))
        self.assertEqual([bytes(row.value) for row in Parked.objects.all()], [b"e", b"f"])

    def test_unit_over_the_limit_is_refused_savepoints_counted_out(self) -> None:
        with mock.patch("txmq.outbox.outbox.UNIT_ROWS_MAX", 3), transaction.atomic():
            for _ in range(2):
                with self.assertRaises(ValueError), transaction.atomic():
                    order("lost")
                    raise ValueError
            for customer in ("ada", "ben", "cleo"):
                order(customer)
                with self.assertRaises(ValueError), transaction.atomic():
                    send(TOPIC, b"lost")
                    raise ValueError
                if customer == "ben":
                    break
            order("cleo")
            with self.assertRaisesMessage(ConfigError, "commit in between"):
                send(TOPIC, b"one too many")
        self.both(["ada", "ben", "cleo"])

    def test_flush_leaves_an_outbox_of_another_name(self) -> None:
        tables = outbox.outbox_of("default").tables(connection)
        before = tables.peek(connection)
        call_command("flush", interactive=False, verbosity=0)
        after = tables.peek(connection)
        assert before is not None
        assert after is not None
        self.assertNotEqual(before.uuid, after.uuid)


class InboxCase(TransactionTestCase):  # type: ignore[misc]
    """Offsets that commit with rows; the consumer's part is in tests/services/consumer."""

    databases = ("default", "archive")

    def setUp(self) -> None:
        """A consumer has the partition."""
        self.store = offset_store()
        self.addCleanup(self.store.leave, "billing")
        self.assertIsNone(self.store.load("billing", SLOT, 2))

    def save(self, offset: int, given: Any = "default", generation: int = 2) -> None:
        """A row, and the offset."""
        Order.objects.create(customer=f"{offset}")
        position = OffsetPosition(SLOT, generation, offset)
        self.store.save_in(self.store.connection_of(given), "billing", position, None)

    def both(self, rows: list[str], offset: int | None) -> None:
        """What is committed."""
        saved = self.store.saved("billing", SLOT)
        self.assertEqual((orders(), None if saved is None else saved.offset), (rows, offset))

    def test_row_and_offset_commit_together_or_neither(self) -> None:
        with self.assertRaises(ValueError), transaction.atomic():
            self.save(1)
            raise ValueError
        self.both([], None)
        for offset, given in ((2, "default"), (3, connection), (4, connections["default"])):
            with transaction.atomic():
                self.save(offset, given)
                with self.assertRaises(ValueError), transaction.atomic():
                    self.save(9, given)
                    raise ValueError
        self.both(["2", "3", "4"], 4)

    def test_refused_transaction_cannot_commit_at_any_depth(self) -> None:
        with transaction.atomic():
            Order.objects.create(customer="ada")
            with self.assertRaises(FencedError), transaction.atomic():
                self.save(1, generation=1)
            with self.assertRaises(Exception), transaction.atomic():  # noqa: B017  the connection is closed
                Order.objects.create(customer="ben")
        self.both([], None)
        with self.assertRaises(FencedError), transaction.atomic():
            self.save(1, generation=1)
        with transaction.atomic():
            self.save(2)
        self.both(["2"], 2)

    def test_what_has_no_transaction_of_this_database_is_refused(self) -> None:
        position = OffsetPosition(SLOT, 2, 1)
        with self.assertRaisesMessage(ConfigError, "autocommit"):
            self.store.save_in(self.store.connection_of("default"), "billing", position, None)
        for given in ("archive", connections["archive"]):
            with self.assertRaisesMessage(ConfigError, "this consumer's offsets are in database 'default'"):
                self.store.connection_of(given)
        with self.assertRaisesMessage(ConfigError, "txmq.django.offset_store()"):
            txmq.DatabaseOffsetStore(lambda: None).connection_of(connection)
        self.both([], None)


class SchemaCase(TransactionTestCase):  # type: ignore[misc]
    """Migrations, on the second database."""

    databases = ("default", "archive")

    def migrate(self, *words: str) -> None:
        """Of the app alone."""
        call_command("migrate", "txmq", *words, database="archive", verbosity=0)

    def test_migrations_make_the_tables_that_install_makes(self) -> None:
        migrated = schema()
        self.migrate("zero")
        self.assertEqual(schema(), [])
        raw = connector("archive")()
        Outbox("other").install(raw)
        installed = schema()
        for table in ("txmq_outbox", "txmq_outbox_parked", "txmq_outbox_relay"):
            run(raw, f"DROP TABLE {table}")
        raw.commit()
        raw.close()
        self.migrate()
        self.assertEqual(migrated, installed)
        self.assertEqual(migrated, schema())
        self.assertGreater(len(migrated), 2)

    def test_tables_of_another_shape_are_refused_by_name(self) -> None:
        self.migrate("zero")
        with connections["archive"].cursor() as cursor:
            cursor.execute("CREATE TABLE txmq_outbox_parked (id INTEGER)")
        try:
            with self.assertRaisesMessage(ConfigError, "table txmq_outbox_parked is not an outbox's"):
                self.migrate()
            applied = MigrationRecorder(connections["archive"]).applied_migrations()
            self.assertNotIn(("txmq", "0001_initial"), applied)
        finally:
            with connections["archive"].cursor() as cursor:
                for table in {"txmq_outbox", "txmq_outbox_parked", "txmq_outbox_relay"} & set(
                    connections["archive"].introspection.table_names()
                ):
                    cursor.execute(f"DROP TABLE {table}")
            self.migrate()

    def test_router_leaves_a_database_out(self) -> None:
        self.migrate("zero")
        with override_settings(DATABASE_ROUTERS=[NotThere()]):
            self.migrate()
            self.assertEqual(schema(), [])
            self.migrate("zero")
        self.migrate()
        self.assertNotEqual(schema(), [])

    def test_models_and_migrations_agree(self) -> None:
        call_command("makemigrations", "txmq", check=True, dry_run=True, verbosity=0)

    def test_sql_of_the_migration_can_be_read(self) -> None:
        said = io.StringIO()
        for name in ("0001", "0002"):
            call_command("sqlmigrate", "txmq", name, stdout=said)
        self.assertEqual(said.getvalue().count("CREATE TABLE"), 4)


class NotThere:
    """A router."""

    def allow_migrate(self, db: str, app_label: str, **_: Any) -> bool | None:
        """Not in the archive."""
        return False if (db, app_label) == ("archive", "txmq") else None


def schema() -> list[Any]:
    """Everything that the second database knows of the outbox's tables."""
    questions = {
        "sqlite": ["SELECT type, name, sql FROM sqlite_master WHERE tbl_name LIKE 'txmq_outbox%' ORDER BY name"],
        "mysql": [
            "SELECT * FROM information_schema.columns WHERE table_schema = DATABASE() AND table_name LIKE "
            "'txmq_outbox%' ORDER BY table_name, ordinal_position",
            "SELECT * FROM information_schema.statistics WHERE table_schema = DATABASE() AND table_name LIKE "
            "'txmq_outbox%' ORDER BY table_name, index_name",
            "SELECT table_name, engine, table_collation FROM information_schema.tables WHERE "
            "table_schema = DATABASE() AND table_name LIKE 'txmq_outbox%' ORDER BY table_name",
        ],
        "postgresql": [
            "SELECT table_name, column_name, column_default, is_nullable, data_type, character_maximum_length, "
            "collation_name, identity_generation, identity_increment FROM information_schema.columns "
            "WHERE table_name LIKE 'txmq_outbox%' ORDER BY table_name, ordinal_position",
            "SELECT tablename, indexname, indexdef FROM pg_indexes WHERE tablename LIKE 'txmq_outbox%' ORDER BY 2",
            "SELECT sequencename, data_type, cache_size, cycle FROM pg_sequences WHERE sequencename LIKE 'txmq_%'",
        ],
    }
    found: list[Any] = []
    with connections["archive"].cursor() as cursor:
        for question in questions[connections["archive"].vendor]:
            cursor.execute(question)
            found += cursor.fetchall()
    return found


class IsolatedCase(TestCase):  # type: ignore[misc]
    """Tests of a project: nothing is committed."""

    databases = ("default", "archive")

    def test_what_was_sent_is_seen(self) -> None:
        with self.captureOnCommitCallbacks(execute=True) as callbacks:
            self.client.get("/take/ada")
        self.assertEqual([(row.value, row.key) for row in sent(TOPIC)], [(b"ada", b"a")])
        self.assertEqual((len(callbacks), messages()), (1, []))

    def test_next_test_sees_nothing_of_it(self) -> None:
        self.assertEqual(sent(), [])
        with transaction.atomic():
            send("mails", b"hello", headers={"trace": b"1"})
            order("ada")
        self.assertEqual([(row.value, dict(row.headers)) for row in sent("mails")], [(b"hello", {"trace": b"1"})])

    def test_a_send_is_one_query(self) -> None:
        for _ in range(2):
            outbox.outbox_of("default")._looked = float("-inf")
            with self.assertNumQueries(1):
                send(TOPIC, b"ada")

    def test_driver_s_own_connection_is_taken(self) -> None:
        outbox.outbox_of("default")._looked = float("-inf")
        outbox.outbox_of("default").send(connection.connection, TOPIC, b"ada")
        self.assertEqual([row.value for row in sent()], [b"ada"])

    @override_settings(TXMQ={"CODEC": "json"})  # type: ignore[untyped-decorator]
    def test_codec_makes_bytes_of_values(self) -> None:
        send(TOPIC, {"customer": "ädä", "total": 3})
        with override_settings(TXMQ={"CODEC": lambda value: str(value).encode()}):
            send(TOPIC, 42)
        with override_settings(TXMQ={}), self.assertRaisesMessage(ConfigError, 'TXMQ = {"CODEC": "json"} in'):
            send(TOPIC, {})
        self.assertEqual([row.value for row in sent()], ['{"customer":"ädä","total":3}'.encode(), b"42"])

    @override_settings(TXMQ={"CODEX": "json"})  # type: ignore[untyped-decorator]
    def test_wrong_settings_are_refused_by_name(self) -> None:
        with self.assertRaisesMessage(ConfigError, "did you mean 'CODEC'?"):
            send(TOPIC, b"ada")

    def test_checks_name_what_is_wrong(self) -> None:
        call_command("check")
        for wrong, words in (
            ({"BOOTSTRAP": "http://broker1"}, "(txmq.E001) TXMQ['BOOTSTRAP']: "),
            ({"NAME": "n" * 195}, "(txmq.E003) database 'default' makes the outbox's name 'nnn"),
        ):
            with self.settings(TXMQ=wrong), self.assertRaisesMessage(SystemCheckError, words):
                call_command("check")
        with mock.patch.object(connections["archive"], "vendor", "oracle"):
            with self.assertRaisesMessage(SystemCheckError, "(txmq.E002) database 'archive' is oracle: an outbox is"):
                call_command("check")
            with self.settings(DATABASE_ROUTERS=[NotThere()]):
                call_command("check")
            dummy = {"ENGINE": "django.db.backends.dummy"}  # what Django makes of "archive": {}
            with mock.patch.dict(connections["archive"].settings_dict, dummy):
                call_command("check")

    def test_admin_shows_messages_and_changes_nothing(self) -> None:
        self.client.force_login(User.objects.create_superuser("root"))
        send(TOPIC, b"\xff of ada", b"ada")
        number = sent()[0].id
        with connection.cursor() as cursor:
            cursor.execute("INSERT INTO txmq_outbox_parked SELECT o.*, 'refused', 0 FROM txmq_outbox o")
        for table, words in (("waiting", ("ada",)), ("parked", ("ada", "refused"))):
            for page in (f"/admin/txmq/{table}/", f"/admin/txmq/{table}/{number}/change/"):
                shown = self.client.get(page)
                self.assertEqual(shown.status_code, 200)
                for word in words:
                    self.assertContains(shown, word)
            self.assertContains(shown, "\\xff of ada")
            for page in (f"/admin/txmq/{table}/add/", f"/admin/txmq/{table}/{number}/delete/"):
                self.assertEqual(self.client.post(page, {"post": "yes"}).status_code, 403)
        self.assertEqual(len(sent()), 1)


class StrayCase(TransactionTestCase):  # type: ignore[misc]
    """``producer.send`` asks ``enclosing`` which transaction its message joins."""

    def test_producer_in_atomic_warns_once(self) -> None:
        self.addCleanup(SEND_WATCHERS.__setitem__, slice(None), list(SEND_WATCHERS))
        self.assertEqual(SEND_WATCHERS, [apps.warn_once])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            enclosing(self)
            self.assertEqual(caught, [])
            with transaction.atomic():
                enclosing(self)
                enclosing(self)
        self.assertEqual(len(caught), 1)
        self.assertIn("txmq.django.send()", str(caught[0].message))


class QuietCase(TestCase):  # type: ignore[misc]
    """The transaction of a TestCase is none of the project's."""

    def test_producer_outside_of_atomic_warns_of_nothing(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            enclosing(self)
