"""The outbox for SQLAlchemy: messages that commit with a session's rows.

``Outbox(metadata)`` has its tables in the application's metadata; ``send(session, ...)`` takes a Session or an
AsyncSession. ``session_messages.py`` says when a message is written.
"""

from txmq.sqlalchemy.outbox import Outbox

__all__ = ["Outbox"]
