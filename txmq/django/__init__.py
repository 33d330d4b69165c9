"""Outbox and inbox as an app of Django's: ``INSTALLED_APPS += ["txmq.django"]``, then ``send`` in ``atomic()``.

``outbox.py`` writes a message in the transaction that is open, and runs a relay in this process; ``manage.py
txmq_relay`` is a process of its own. ``offsets.py`` saves a consumer's offset in the transaction, ``testing.py`` shows
tests what was sent. ``import txmq`` loads none of it.
"""

from __future__ import annotations

from txmq.django.offsets import offset_store
from txmq.django.outbox import relay, send

__all__ = ["offset_store", "relay", "send"]
