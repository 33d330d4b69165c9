"""Programs for those who work on txmq; not installed."""
