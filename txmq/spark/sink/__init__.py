"""The sink: exactly once, one transaction a batch."""
