"""The app's tables as models: the admin lists messages, ``flush`` empties all, tests begin without rows.

Nobody writes through them. ``txmq/outbox/tables.py`` and the offset store have the columns, and the migrations make the
tables by their statements.
"""

from __future__ import annotations

from datetime import UTC, datetime

from django.db import models

from txmq.client.consumer.offsets.database_store import DEFAULT_TABLE as OFFSETS
from txmq.outbox.tables import DEFAULT_TABLE

_READ_ONLY = ("view",)


class _Message(models.Model):  # type: ignore[misc]  # Django has no types
    unit = models.BigIntegerField(null=True)
    topic = models.CharField(max_length=200)
    message_key = models.BinaryField(null=True)
    value = models.BinaryField()
    headers = models.BinaryField(null=True)
    created_ms = models.BigIntegerField()

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return f"{self.id} to {self.topic}"

    @property
    def created(self) -> datetime:
        """When it was written, by the database's clock."""
        return datetime.fromtimestamp(self.created_ms / 1000, UTC)


class Waiting(_Message):
    """A message that no relay has taken to the broker yet."""

    id = models.BigAutoField(primary_key=True)

    class Meta:
        db_table = DEFAULT_TABLE
        verbose_name, verbose_name_plural = "waiting message", "waiting messages"
        default_permissions = _READ_ONLY
        ordering = ("id",)
        indexes = (models.Index(fields=["unit"], name=f"{DEFAULT_TABLE}_unit"),)


class Parked(_Message):
    """A message that the broker refuses, or that stands after such a one."""

    id = models.BigIntegerField(primary_key=True)
    why = models.CharField(max_length=200)
    since_ms = models.BigIntegerField()

    class Meta:
        db_table = f"{DEFAULT_TABLE}_parked"
        verbose_name, verbose_name_plural = "parked message", "parked messages"
        default_permissions = _READ_ONLY
        permissions = (
            ("release_parked", "Can release parked messages"), ("drop_parked", "Can drop parked messages"),
        )  # fmt: skip
        ordering = ("id",)

    @property
    def since(self) -> datetime:
        """When it was parked, by the database's clock."""
        return datetime.fromtimestamp(self.since_ms / 1000, UTC)


class RelayRow(models.Model):  # type: ignore[misc]  # Django has no types
    """What relays know; one row."""

    id = models.IntegerField(primary_key=True)
    uuid = models.CharField(max_length=200)
    home = models.CharField(max_length=200)
    last = models.CharField(max_length=200, null=True)
    claim = models.CharField(max_length=200, null=True)
    ids = models.TextField()
    holder = models.CharField(max_length=200, null=True)
    until_ms = models.BigIntegerField()

    class Meta:
        db_table = f"{DEFAULT_TABLE}_relay"
        default_permissions = ()

    def __str__(self) -> str:
        return f"relay of outbox {self.uuid}"


class SavedOffset(models.Model):  # type: ignore[misc]  # Django has no types
    """How far a consumer group is in a partition."""

    pk = models.CompositePrimaryKey("consumer_group", "topic", "partition_number")
    consumer_group = models.CharField(max_length=200)
    topic = models.CharField(max_length=200)
    partition_number = models.IntegerField()
    generation = models.BigIntegerField()
    next_offset = models.BigIntegerField(null=True)
    aside = models.TextField(null=True)
    log_history = models.CharField(max_length=2000, null=True)
    saves = models.BigIntegerField(db_default=0)
    saved_ms = models.BigIntegerField(null=True)

    class Meta:
        db_table = OFFSETS
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.consumer_group} in {self.topic}-{self.partition_number}"
