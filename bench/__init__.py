"""Benchmarks: every row of the budget, with its bound and the bare limit of this machine: ``python -m bench``."""
