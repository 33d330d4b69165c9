"""``txmq audit``."""
