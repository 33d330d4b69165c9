"""The failure of a connection whose answers cannot be read.

A module of its own, because compiled modules (``docs/compiled.md``) have no classes with two bases.
"""

from __future__ import annotations

from txmq.errors import ConnectionLostError, RemoteProtocolError


class BrokenAnswerError(ConnectionLostError, RemoteProtocolError):
    """The broker's answers cannot be read: a fault of the broker, and a lost connection for the callers that wait."""
