"""The outbox as an app of Django's: ``INSTALLED_APPS += ["txmq.django"]``, then ``txmq.django.send`` in ``atomic()``.

``sending.py`` writes a message in the transaction that is open, ``relaying.py`` runs a relay in this process,
``manage.py txmq_relay`` is a process of its own, ``testing.py`` shows tests what was sent. ``import txmq`` loads none
of it.
"""

from __future__ import annotations

from txmq.django.relaying import relay
from txmq.django.sending import send

__all__ = ["relay", "send"]
