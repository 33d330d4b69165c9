"""The source: batches and streams through a broker."""
