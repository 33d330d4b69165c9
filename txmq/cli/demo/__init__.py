"""``txmq demo`` and ``txmq demo-audit``."""
