"""Simulated disk, clock and databases, each held to the contract tests of the real one; a broker: the real core."""
