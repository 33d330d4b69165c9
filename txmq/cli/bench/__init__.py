"""``txmq bench``."""
