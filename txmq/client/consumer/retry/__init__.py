"""Messages that fail: deferred, retried, dead letters, redrive."""
