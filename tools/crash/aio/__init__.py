"""The campaign of ``txmq.aio``."""
