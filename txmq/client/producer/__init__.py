"""Producers: decisions in ``core``, threads and deadlines in ``sender``."""
