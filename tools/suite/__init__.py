"""``make test``: its stages, what is run once more, and when the whole is green."""
