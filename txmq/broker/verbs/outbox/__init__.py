"""The outboxes of databases: pages of rows, each taken once, after the one before."""
