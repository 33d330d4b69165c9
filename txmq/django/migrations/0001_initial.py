"""The outbox's tables, by the statements of ``txmq/outbox/tables.py``."""

from __future__ import annotations

from typing import Any

from django.db import migrations, models
from django.db.migrations.operations.base import Operation

from txmq.django.outbox import outbox_of


class CreateOutbox(Operation):  # type: ignore[misc]  # Django has no types
    """Makes the tables, in each database in which a router allows them."""

    reversible = True

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Another operation of the migration makes the models."""

    def database_forwards(self, app_label: str, schema_editor: Any, _from_state: Any, to_state: Any) -> None:
        """Make what is missing; tables of these names with another shape are refused."""
        connection, model = schema_editor.connection, to_state.apps.get_model(app_label, "Waiting")
        if not self.allow_migrate_model(connection.alias, model):
            return
        tables = outbox_of(connection.alias).tables(connection)
        for statement in tables.statements():
            if statement.startswith("CREATE INDEX") and not schema_editor.collect_sql:
                tables.require_shape(connection)
            schema_editor.execute(statement, params=None)
        if not schema_editor.collect_sql:
            tables.require_shape(connection)

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, _to_state: Any) -> None:
        """Drop the tables, with the messages that wait."""
        connection, model = schema_editor.connection, from_state.apps.get_model(app_label, "Waiting")
        if not self.allow_migrate_model(connection.alias, model):
            return
        tables = outbox_of(connection.alias).tables(connection)
        for table in (tables.name, tables.parked, tables.relay):
            schema_editor.execute(f"DROP TABLE {table}", params=None)

    def describe(self) -> str:
        """For ``migrate --plan``."""
        return "Create the tables of the outbox"


def _message(key: models.Field, *more: tuple[str, models.Field]) -> list[tuple[str, models.Field]]:
    return [
        ("unit", models.BigIntegerField(null=True)),
        ("topic", models.CharField(max_length=200)),
        ("message_key", models.BinaryField(null=True)),
        ("value", models.BinaryField()),
        ("headers", models.BinaryField(null=True)),
        ("created_ms", models.BigIntegerField()),
        ("id", key),
        *more,
    ]


MODELS = [
    migrations.CreateModel(
        name="Waiting",
        fields=_message(models.BigAutoField(primary_key=True, serialize=False)),
        options={
            "verbose_name": "waiting message", "verbose_name_plural": "waiting messages", "db_table": "txmq_outbox",
            "ordering": ("id",), "default_permissions": ("view",),
            "indexes": [models.Index(fields=["unit"], name="txmq_outbox_unit")],
        },
    ),
    migrations.CreateModel(
        name="Parked",
        fields=_message(
            models.BigIntegerField(primary_key=True, serialize=False),
            ("why", models.CharField(max_length=200)), ("since_ms", models.BigIntegerField()),
        ),
        options={
            "verbose_name": "parked message", "verbose_name_plural": "parked messages",
            "db_table": "txmq_outbox_parked", "ordering": ("id",), "default_permissions": ("view",),
            "permissions": (
                ("release_parked", "Can release parked messages"), ("drop_parked", "Can drop parked messages"),
            ),
        },
    ),
    migrations.CreateModel(
        name="RelayRow",
        fields=[
            ("id", models.IntegerField(primary_key=True, serialize=False)),
            ("uuid", models.CharField(max_length=200)),
            ("home", models.CharField(max_length=200)),
            ("last", models.CharField(max_length=200, null=True)),
            ("claim", models.CharField(max_length=200, null=True)),
            ("ids", models.TextField()),
            ("holder", models.CharField(max_length=200, null=True)),
            ("until_ms", models.BigIntegerField()),
        ],
        options={"db_table": "txmq_outbox_relay", "default_permissions": ()},
    ),
]  # fmt: skip


class Migration(migrations.Migration):  # type: ignore[misc]  # Django has no types
    """See the module's docstring."""

    initial = True
    dependencies: tuple[tuple[str, str], ...] = ()
    operations = (migrations.SeparateDatabaseAndState(state_operations=MODELS), CreateOutbox())
