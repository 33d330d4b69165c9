"""Benchmarks: every row of the budget, beside its bound and the bare limit of this machine: ``python -m bench``."""
