"""The table of ``offset_store()``, by the statement of ``DatabaseOffsetStore``."""

from __future__ import annotations

from typing import Any

from django.db import migrations, models
from django.db.migrations.operations.base import Operation

from txmq.client.consumer.offsets.database_store import DEFAULT_TABLE, create_statement
from txmq.xa.database.dialects import dialect_for


class CreateOffsets(Operation):  # type: ignore[misc]  # Django has no types
    """Makes the table, in each database in which a router allows it."""

    reversible = True

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Another operation of the migration makes the model."""

    def database_forwards(self, app_label: str, schema_editor: Any, _from_state: Any, to_state: Any) -> None:
        """Make it if it is missing."""
        connection, model = schema_editor.connection, to_state.apps.get_model(app_label, "SavedOffset")
        if self.allow_migrate_model(connection.alias, model):
            schema_editor.execute(create_statement(dialect_for(None, connection.vendor)), params=None)

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, _to_state: Any) -> None:
        """Drop it: groups begin anew, or are refused until an operator acts."""
        connection, model = schema_editor.connection, from_state.apps.get_model(app_label, "SavedOffset")
        if self.allow_migrate_model(connection.alias, model):
            schema_editor.execute(f"DROP TABLE {DEFAULT_TABLE}", params=None)

    def describe(self) -> str:
        """For ``migrate --plan``."""
        return "Create the table of consumers' offsets"


MODEL = migrations.CreateModel(
    name="SavedOffset",
    fields=[
        (
            "pk",
            models.CompositePrimaryKey(
                "consumer_group", "topic", "partition_number",
                blank=True, editable=False, primary_key=True, serialize=False,
            ),
        ),
        ("consumer_group", models.CharField(max_length=200)),
        ("topic", models.CharField(max_length=200)),
        ("partition_number", models.IntegerField()),
        ("generation", models.BigIntegerField()),
        ("next_offset", models.BigIntegerField(null=True)),
        ("aside", models.TextField(null=True)),
        ("log_history", models.CharField(max_length=2000, null=True)),
        ("saves", models.BigIntegerField(db_default=0)),
        ("saved_ms", models.BigIntegerField(null=True)),
    ],
    options={"db_table": "txmq_offset", "default_permissions": ()},
)  # fmt: skip


class Migration(migrations.Migration):  # type: ignore[misc]  # Django has no types
    """See the module's docstring."""

    dependencies = (("txmq", "0001_initial"),)
    operations = (migrations.SeparateDatabaseAndState(state_operations=[MODEL]), CreateOffsets())
