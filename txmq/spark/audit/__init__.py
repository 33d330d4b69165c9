"""The audit: rows of a table against messages of a topic."""
