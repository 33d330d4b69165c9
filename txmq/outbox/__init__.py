"""The outbox: messages in the application's own transaction, which a relay takes to the broker, each once, in order.

``page.py`` says which rows a page is made of, ``relay_core.py`` what a relay does in which order. Neither knows a
database, a connection or a clock.
"""

from __future__ import annotations

from txmq.outbox.outbox import Outbox, OutboxTransaction, new_unit

__all__ = ["Outbox", "OutboxTransaction", "new_unit"]
