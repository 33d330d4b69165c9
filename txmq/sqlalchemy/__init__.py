"""The outbox and the inbox for SQLAlchemy: messages, and offsets, that commit with a session's rows.

``Outbox(metadata)`` has its tables in the application's metadata; ``send(session, ...)`` takes a Session or an
AsyncSession. ``outbox.py`` says when a message is written. ``DatabaseOffsetStore(metadata, connect)`` is for
consumers: ``message.ack(session)``.
"""

from txmq.sqlalchemy.offset_store import DatabaseOffsetStore
from txmq.sqlalchemy.outbox import Outbox

__all__ = ["DatabaseOffsetStore", "Outbox"]
