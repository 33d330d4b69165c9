"""Simulated disk, clock, databases and broker; each passes the contract tests of the real one."""
