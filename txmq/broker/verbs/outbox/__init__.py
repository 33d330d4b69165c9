"""The outboxes of databases: rows whose messages are taken in the order of their numbers, each once."""
