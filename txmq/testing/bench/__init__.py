"""Loads and bare limits: what ``txmq bench`` (installed) and ``make bench`` (the repository's ``bench/``) share."""
